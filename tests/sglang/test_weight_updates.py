# SPDX-License-Identifier: Apache-2.0
"""Weights replaced at run time, through SGLang's own scheduler-side updater: no page of the old ones is served."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.numpy import load_file, save_file
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager, _WeightUpdateSession
from sglang_tardis.sglang import weight_updates
from tree_server import Split, TreeServer, _content_digest, prompt, write_checkpoint

TOKENS = prompt(1, 6)


class Model:
    """Stands for tp_worker and the model runner: what is loaded decides the KV that TreeServer computes."""

    def __init__(self, server):
        self.server = server
        self.succeed = True

    def weight_update_runners(self):
        return [("target", SimpleNamespace(weight_updater=self))]

    model_runner = property(lambda self: SimpleNamespace(weight_updater=self, model=torch.nn.Module()))

    def update_weights_from_disk(self, path, load_format, recapture_cuda_graph=False):
        if self.succeed:
            self.server.weights = _content_digest(path)
        return self.succeed, "message"

    def _loaded(self, *_, **__):
        self.server.weights = f"from memory {id(self)} {self.server._requests}"
        return self.succeed, "message"

    update_weights_from_tensor = update_weights_from_ipc = load_weights_from_distributed = _loaded

    def receive_weights_from_distributed(self, **_):
        return []

    def deserialize_own_rank(self, tensors):
        return tensors

    def begin_weight_update(self):
        pass

    def end_weight_update(self, run_post_load):
        pass


@pytest.fixture
def server(tmp_path, model):
    with TreeServer(tmp_path / "store", model) as server:
        yield server


@pytest.fixture
def updater(server, monkeypatch):
    monkeypatch.setattr(torch.distributed, "barrier", lambda group=None: None)

    def flush_cache(empty_cache=True):
        server.flush()
        return True

    updater = object.__new__(SchedulerWeightUpdaterManager)
    model = Model(server)
    values = dict(tp_worker=model, draft_worker=None, memory_saver_adapter=None, flush_cache=flush_cache)
    values |= dict(
        is_fully_idle=lambda **_: True, scheduler=SimpleNamespace(record_weight_version_change=lambda **_: None)
    )
    values |= dict(metrics_collector=None, _session=None, tp_cpu_group=None)
    for name, value in values.items():
        setattr(updater, name, value)
    return updater


def request(**values):
    defaults = dict(flush_cache=True, torch_empty_cache=False, load_format=None, weight_version=None, selector="all")
    defaults |= dict(recapture_cuda_graph=False, names=[], dtypes=[], shapes=[], group_name="g", zmq_handles={})
    return SimpleNamespace(**defaults | dict(serialized_named_tensors=[]) | values)


def test_from_disk_moves_to_the_new_weights(tmp_path, model, server, updater):
    new = write_checkpoint(tmp_path / "new", seed=5)
    assert server.prefill(TOKENS) == Split(0, 0, 0, 96)
    assert updater.update_weights_from_disk(request(model_path=new)).success
    assert server.prefill(TOKENS) == Split(0, 0, 0, 96)  # prefill compares with the new model's KV
    server.flush()
    assert server.prefill(TOKENS) == Split(0, 0, 96, 0)
    assert updater.update_weights_from_disk(request(model_path=model)).success
    assert server.prefill(TOKENS) == Split(0, 0, 96, 0)  # back to the first weights: their pages are still there
    server.cache.detach_storage_backend()
    weight_updates.forget()
    with TreeServer(tmp_path / "store", new) as fresh:  # a fresh server on the new weights has the same namespace
        assert fresh.prefill(TOKENS) == Split(0, 0, 96, 0)


@pytest.mark.parametrize(
    "method", ["update_weights_from_tensor", "update_weights_from_distributed", "update_weights_from_ipc"]
)
def test_weights_from_memory_get_a_namespace_of_their_own(server, updater, method):
    server.prefill(TOKENS)
    updater._session = _WeightUpdateSession(selector="all")
    for _ in range(2):
        assert getattr(updater, method)(request()).success
        assert server.prefill(TOKENS) == Split(0, 0, 0, 96)
        server.flush()
        assert server.prefill(TOKENS) == Split(0, 0, 96, 0)
    assert server.storage._identity.weights.startswith("revision:live:")


def test_without_a_flush_nothing_is_served_or_stored(tmp_path, server, updater, caplog):
    new = write_checkpoint(tmp_path / "new", seed=5)
    server.prefill(TOKENS)
    assert updater.update_weights_from_disk(request(model_path=new, flush_cache=False)).success
    assert "did not flush" in caplog.text
    server.flush()  # by hand; what was in the tree was of both kinds, and the backup queue may hold some of it
    assert server.prefill(TOKENS) == Split(0, 0, 0, 96)
    server.flush()
    assert server.prefill(TOKENS) == Split(0, 0, 0, 96)
    assert server.storage._store.stats()["set_pages_written"] == 6
    assert updater.update_weights_from_disk(request(model_path=new)).success
    assert server.prefill(TOKENS) == Split(0, 0, 0, 96)
    server.flush()
    assert server.prefill(TOKENS) == Split(0, 0, 96, 0)


def test_a_failed_update_suspends(tmp_path, server, updater):
    server.prefill(TOKENS)
    updater.tp_worker.succeed = False
    assert not updater.update_weights_from_disk(request(model_path=tmp_path / "nowhere")).success
    server.flush()
    assert server.prefill(TOKENS) == Split(0, 0, 0, 96)
    assert weight_updates.current().unknown


def test_an_update_that_raises_suspends(tmp_path, server, updater, monkeypatch):
    server.prefill(TOKENS)
    monkeypatch.setattr(updater.tp_worker, "update_weights_from_disk", lambda *_, **__: 1 / 0, raising=False)
    with pytest.raises(ZeroDivisionError):
        updater.update_weights_from_disk(request(model_path=tmp_path))
    server.flush()
    assert server.prefill(TOKENS) == Split(0, 0, 0, 96)


def test_new_weights_that_cannot_be_identified_suspend(tmp_path, server, updater):
    broken = write_checkpoint(tmp_path / "broken", seed=6)
    server.prefill(TOKENS)
    (broken / "model.safetensors").write_bytes(b"x")
    assert updater.update_weights_from_disk(request(model_path=broken)).success
    assert server.prefill(TOKENS) == Split(0, 0, 0, 96)
    server.flush()
    assert server.prefill(TOKENS) == Split(0, 0, 0, 96)


def test_a_call_that_was_turned_down_changes_nothing(server, updater):
    server.prefill(TOKENS)
    assert not updater.update_weights_from_tensor(request()).success  # no session is open
    assert weight_updates.current() is None
    server.flush()
    assert server.prefill(TOKENS) == Split(0, 0, 96, 0)


def test_a_session_that_loaded_nothing_itself_suspends(server, updater):
    """RDMA writes weights without any update call; only the end of the session shows it."""
    server.prefill(TOKENS)
    assert updater.begin_weight_update(request()).success
    assert updater.end_weight_update(request()).success
    assert "outside SGLang" in weight_updates.current().unknown
    server.flush()
    assert server.prefill(TOKENS) == Split(0, 0, 0, 96)


def test_a_session_with_updates_ends_quietly(server, updater):
    assert updater.begin_weight_update(request()).success
    assert updater.update_weights_from_tensor(request()).success
    revision = weight_updates.current()
    assert updater.end_weight_update(request()).success
    assert weight_updates.current() is revision


@pytest.mark.parametrize("flush", [True, False])
def test_attached_after_an_update(tmp_path, server, updater, flush):
    """A backend attached later must not believe that the model has the weights the server was started with."""
    new = write_checkpoint(tmp_path / "new", seed=5)
    server.prefill(TOKENS)
    server.cache.detach_storage_backend()
    assert updater.update_weights_from_disk(request(model_path=new, flush_cache=flush)).success
    server.flush()
    ok, message = server.attach()
    assert ok, message
    assert server.prefill(TOKENS) == Split(0, 0, 0, 96)
    server.flush()
    assert server.prefill(TOKENS) == (Split(0, 0, 96, 0) if flush else Split(0, 0, 0, 96))


def test_a_part_of_a_checkpoint_gets_a_namespace_of_its_own(tmp_path, server, updater):
    """The same part over other weights would be another model."""
    part = write_checkpoint(tmp_path / "part", seed=7)
    tensors = load_file(part / "model.safetensors")
    save_file({name: tensors[name] for name in list(tensors)[:2]}, part / "model.safetensors")
    for _ in range(2):
        assert updater.update_weights_from_disk(request(model_path=part)).success
        assert server.prefill(TOKENS) == Split(0, 0, 0, 96)
        server.flush()
        assert server.prefill(TOKENS) == Split(0, 0, 96, 0)


@pytest.mark.parametrize("enabled, cpu_backup", [(True, False), (True, True), (False, False)])
def test_weights_that_were_released_are_unknown_until_loaded(server, updater, monkeypatch, enabled, cpu_backup):
    """Resuming gives memory, not weights, unless SGLang kept a copy."""
    saver = SimpleNamespace(enabled=enabled, pause=lambda tag: None, resume=lambda tag: None)
    updater.memory_saver_adapter, updater.offload_tags, updater.scheduler = saver, set(), None
    server.prefill(TOKENS)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_device_module", lambda: SimpleNamespace(synchronize=lambda: None))
        patch.setattr(SchedulerWeightUpdaterManager, "_assert_weight_cache_inactive", lambda self, op: None)
        patch.setattr(weight_updates.ServerSettings, "get", lambda self, name: cpu_backup)
        updater.release_memory_occupation(SimpleNamespace(tags=["weights"]))
        updater.resume_memory_occupation(SimpleNamespace(tags=["weights"]))
    kept = not enabled or cpu_backup
    assert (weight_updates.current() is None) == kept
    for _ in range(2):  # the second time: nor was anything stored
        server.flush()
        assert server.prefill(TOKENS) == (Split(0, 0, 96, 0) if kept else Split(0, 0, 0, 96))


@pytest.mark.parametrize("how", ["written", "renamed", "link"])
def test_a_checkpoint_that_changed_since_it_was_loaded_names_nothing(tmp_path, how):
    """Attached at run time: the files are of other weights than those that the model holds."""
    old, new = write_checkpoint(tmp_path / "old", seed=1), write_checkpoint(tmp_path / "new", seed=2)
    model = tmp_path / "latest"
    model.symlink_to(old)
    time.sleep(0.05)  # the file system's clock ticks in milliseconds
    with TreeServer(tmp_path / "store", model) as server:
        server.prefill(TOKENS)
        server.cache.detach_storage_backend()
        ok, message = server.attach()
        assert ok, message
        server.cache.detach_storage_backend()
        time.sleep(0.05)
        if how == "written":
            (old / "model.safetensors").write_bytes((new / "model.safetensors").read_bytes())
        elif how == "renamed":
            (new / "model.safetensors").rename(old / "model.safetensors")
        else:
            (tmp_path / "link").symlink_to(new)
            (tmp_path / "link").rename(model)
        time.sleep(0.05)
        ok, message = server.attach()
        assert not ok and "changed after" in message and "weights_revision" in message


def test_a_checkpoint_that_changed_since_an_update_names_nothing(tmp_path, server, updater):
    new = write_checkpoint(tmp_path / "new", seed=5)
    time.sleep(0.05)
    assert updater.update_weights_from_disk(request(model_path=new)).success
    server.cache.detach_storage_backend()
    time.sleep(0.05)
    write_checkpoint(new, seed=6)
    time.sleep(0.05)
    ok, message = server.attach()
    assert ok, message
    for _ in range(2):
        assert server.prefill(TOKENS) == Split(0, 0, 0, 96)
        server.flush()


def test_updates_without_tardis_are_left_alone(tmp_path, model, updater, server):
    server.cache.detach_storage_backend()
    assert updater.update_weights_from_disk(request(model_path=model)).success
