# SPDX-License-Identifier: Apache-2.0
"""Checks against the real SGLang 0.5.16, run in a process of their own (see test_sglang16.py).

Prints one JSON object: name of the check -> null, or the traceback of its failure.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tempfile
import threading
import time
import traceback
from contextlib import redirect_stderr
from pathlib import Path

import numpy as np
from sglang16_processes import run_late_imports, run_two_ranks
from sglang16_tree import PAGE, Server, tokens

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS.parents[1] / "demo" / "cpu_support"), str(TESTS / "sglang16_support")]

_TEMPORARY = tempfile.TemporaryDirectory(prefix="tardis-sglang16-", ignore_cleanup_errors=True)
FOLDER = Path(_TEMPORARY.name)
KEYS = [hashlib.sha256(bytes([i])).hexdigest() for i in range(8)]


def checkpoint(name, seed):
    from safetensors.numpy import save_file

    folder = FOLDER / name
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    save_file({"w": np.random.default_rng(seed).standard_normal((32, 32)).astype(np.float32)}, folder / "m.safetensors")
    return folder


def parser():
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


def check_release():
    import importlib.metadata

    import sglang

    assert importlib.metadata.version("sglang") == "0.5.16", sglang.__file__
    from sglang.srt import server_args

    assert isinstance(server_args.ServerArgs.__annotations__["hicache_write_policy"], str)  # the case that differs


def check_seams():
    from sglang_tardis.sglang import plugin

    bad = [seam for seam in plugin.check_seams() if not seam.ok]
    assert not bad, bad
    names = {seam.name for seam in plugin.check_seams()}
    assert {"draft", "extra keys", "weight updates", "prefix keys", "zero-copy", "attach"} <= names, names


def check_command_line():
    options = ["--model-path", "m", "--hicache-storage-backend"]
    assert parser().parse_args([*options, "tardis"]).hicache_storage_backend == "tardis"
    assert parser().parse_args([*options, "file"]).hicache_storage_backend == "file"
    errors = io.StringIO()
    try:
        with redirect_stderr(errors):
            parser().parse_args([*options, "tardiss"])
    except SystemExit as error:
        assert error.code == 2 and "tardis" in errors.getvalue()
    else:
        raise AssertionError("an unknown backend was accepted")


def check_direct_mode_is_refused():
    from sglang.srt.server_args import ServerArgs

    arguments = object.__new__(ServerArgs)
    arguments.enable_hierarchical_cache, arguments.hicache_storage_backend = True, "tardis"
    arguments.hicache_storage_backend_extra_config = '{"mode": "direct"}'
    try:
        arguments._handle_hicache()
    except ValueError as error:
        assert "0.5.16" in str(error) and "Use 0.5.23" in str(error), error
    else:
        raise AssertionError("mode direct was taken without a linker")


def check_attention_backend_is_refused():
    from sglang.srt.server_args import ServerArgs

    assert parser().parse_args(["--model-path", "m", "--attention-backend", "tardis"]).attention_backend == "tardis"
    arguments = object.__new__(ServerArgs)
    arguments.attention_backend = "tardis"
    try:
        arguments._handle_hicache()
    except ValueError as error:
        assert "0.5.16" in str(error) and "Use 0.5.23" in str(error), error
    else:
        raise AssertionError("the attention backend was taken by a release that it was not made for")


def round_trip(name, **options):
    model = checkpoint(f"model-{name}", 1)
    server = Server(FOLDER / name, model, **options)
    controller = server.controller
    assert controller.page_get_func == controller._page_get_zero_copy
    assert controller.page_set_func == controller._page_set_zero_copy
    assert server.cache.hicache_storage_pass_prefix_keys
    prompt = tokens(1, 6)
    assert server.prefill(prompt) == (0, 0, 96)
    assert server.prefill(prompt[:64] + tokens(2, 2)) == (64, 0, 32)
    server.flush()
    assert server.prefill(prompt) == (0, 96, 0)
    server.close()
    server = Server(FOLDER / name, model, **options)
    assert server.prefill(prompt[:64] + tokens(2, 2)) == (0, 96, 0)
    assert server.prefill(tokens(3, 2)) == (0, 0, 32)
    server.close()
    other = Server(FOLDER / name, checkpoint(f"other-{name}", 2), **options)
    assert other.prefill(prompt) == (0, 0, 96)
    other.close()


def check_round_trip_page_first():
    round_trip("page_first")


def check_round_trip_page_first_direct():
    round_trip("page_first_direct", layout="page_first_direct", io="direct")


def check_round_trip_layer_first():
    round_trip("layer_first", layout="layer_first")


def check_round_trip_layer_first_direct():
    round_trip("layer_first-direct", layout="layer_first", io="direct")


def check_round_trip_page_head():
    round_trip("page_head", layout="page_head")


def check_round_trip_mla():
    round_trip("mla", mla=True)
    round_trip("mla-direct", mla=True, layout="page_first_direct", io="direct")
    round_trip("mla-layer", mla=True, layout="layer_first")


def check_split_evict_match():
    """Nodes that split, are evicted to the host, from there to storage, and come back from each tier."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    server = Server(FOLDER / "evict", checkpoint("model-evict", 1))
    cache = server.cache
    trunk = tokens(1, 4)
    left, right = trunk + tokens(2, 3), trunk + tokens(3, 2)
    assert server.prefill(left) == (0, 0, 112)
    assert server.prefill(right) == (64, 0, 32)  # splits the node
    cache.evict(EvictParams(num_tokens=1 << 20))
    assert server.prefill(left) == (112, 0, 0)  # from the host
    cache.evict(EvictParams(num_tokens=1 << 20))
    cache.evict_host(1 << 20)
    server.poison()
    assert server.prefill(right) == (0, 96, 0)  # from storage
    assert server.prefill(left) == (64, 48, 0)  # the device's part, then storage's
    assert server.prefill(left + tokens(4, 2)) == (112, 0, 32)
    stats = server.controller.storage_backend._store.stats()
    assert stats["slots_live"] == 4 + 3 + 2 + 2, stats
    assert stats["get_pages_corrupt"] == stats["get_pages_failed"] == stats["set_pages_failed"] == 0
    server.close()


def check_threads_are_the_controllers_own():
    """What was checked above went through this release's backup and prefetch threads, and they end with the storage."""
    server = Server(FOLDER / "threads", checkpoint("model-threads", 1))
    controller = server.controller
    threads = [controller.backup_thread, controller.prefetch_thread, controller.prefetch_io_aux_thread]
    server.pump(lambda: all(thread.is_alive() for thread in threads))  # one of them is started by another
    callers = set()
    backend = controller.storage_backend
    for name in ("batch_exists", "batch_get_v1", "batch_set_v1"):
        original = getattr(backend, name)

        def noted(*args, _original=original, _name=name, **kwargs):
            callers.add((_name, threading.current_thread()))
            return _original(*args, **kwargs)

        setattr(backend, name, noted)
    prompt = tokens(1, 3)
    server.prefill(prompt)
    server.flush()  # stops the threads and starts others
    threads += [controller.prefetch_thread, controller.prefetch_io_aux_thread]
    assert server.prefill(prompt) == (0, 48, 0)
    assert {name for name, _ in callers} == {"batch_exists", "batch_get_v1", "batch_set_v1"}
    assert {thread for _, thread in callers} <= set(threads)
    server.close()
    assert not any(thread.is_alive() for thread in threads)


def check_write_back():
    """A page is stored when its node leaves the device."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    server = Server(FOLDER / "back", checkpoint("model-back", 1), hicache_write_policy="write_back")
    prompt = tokens(1, 5)
    assert server.prefill(prompt) == (0, 0, 80)
    assert server.controller.storage_backend._store.stats()["slots_live"] == 0
    server.cache.evict(EvictParams(num_tokens=1 << 20))
    server.pump(lambda: not server.cache.ongoing_write_through and not server.cache.ongoing_backup)
    assert server.controller.storage_backend._store.stats()["slots_live"] == 5
    server.flush()
    assert server.prefill(prompt) == (0, 80, 0)
    server.close()


def check_faults_are_misses():
    server = Server(FOLDER / "faults", checkpoint("model-faults", 1))
    backend, prompt = server.controller.storage_backend, tokens(1, 6)
    assert server.prefill(prompt) == (0, 0, 96)
    namespace = backend._current()
    get = namespace.get

    def fails(*_):
        raise OSError("the disk is gone")

    def half(hashes, pieces):
        ok = get(hashes, pieces)
        ok[2:] = False
        return ok

    for fault, loaded in ((fails, 0), (half, 32), (get, 96)):
        namespace.get = fault
        server.flush()
        assert server.prefill(prompt) == (0, loaded, 96 - loaded), fault
    server.close()


def check_prefetch_policies():
    """Whatever part has arrived when a request may not wait any longer: its bytes are right (prefill compares)."""
    for policy in ("best_effort", "timeout"):
        server = Server(FOLDER / policy, checkpoint(f"model-{policy}", 1), hicache_storage_prefetch_policy=policy)
        prompt = tokens(1, 6)
        server.prefill(prompt)
        server.flush()
        had, loaded, computed = server.prefill(prompt)
        assert had == 0 and loaded + computed == 96 and loaded % PAGE == 0
        server.close()


def check_metrics():
    """This release asks for statistics at every step and takes nothing but its own class."""
    server = Server(FOLDER / "metrics", checkpoint("model-metrics", 1), metrics=True)
    prompt = tokens(1, 4)
    server.prefill(prompt)
    server.flush()
    assert server.prefill(prompt) == (0, 64, 0)
    from sglang.srt.observability.metrics_collector import StorageMetrics

    assert type(server.controller.storage_backend.get_stats()) is StorageMetrics
    from prometheus_client import REGISTRY

    assert REGISTRY.get_sample_value("tardis_written_pages_total") is not None
    server.close()


def check_dynamic_route():
    extra = {
        "backend_name": "tardis",
        "module_path": "sglang_tardis.sglang.storage",
        "class_name": "TardisStorage",
        "interface_v1": 1,
    }
    model, prompt = checkpoint("model-dynamic", 1), tokens(1, 4)
    server = Server(FOLDER / "dynamic", model, backend="dynamic", extra=extra)
    assert server.cache.hicache_storage_pass_prefix_keys
    assert server.prefill(prompt) == (0, 0, 64)
    server.close()
    server = Server(FOLDER / "dynamic", model)
    assert server.prefill(prompt) == (0, 64, 0)
    server.close()


_BEFORE_THE_TREE = {}


def check_modules_imported_after_the_plugin():
    """A scheduler process of this release imports its tree when it builds it, long after plugins were loaded."""
    assert _BEFORE_THE_TREE["outcome"] is None, _BEFORE_THE_TREE["outcome"]


def check_long_prompt_has_parents():
    """More than one batch from the root: the release does not extend an empty list of earlier keys."""
    server = Server(FOLDER / "long", checkpoint("model-long", 1), page_size=PAGE)
    backend = server.controller.storage_backend
    namespace, calls = backend._current(), []
    original = namespace.set
    namespace.set = lambda hashes, pieces, parent=None: (
        calls.append((hashes, parent)) or original(hashes, pieces, parent)
    )
    first = tokens(1, 60)
    # one operation of several batches, through the real backup thread
    host = server.controller.mem_pool_host
    indices = host.alloc(60 * PAGE)
    import sglang.srt.managers.cache_controller as module

    module.STORAGE_BATCH_SIZE = 25
    keys = [hashlib.sha256(f"{i}".encode()).hexdigest() for i in range(60)]
    try:
        server.controller.write_storage(indices, first, keys, [])
        deadline = time.monotonic() + 20
        while server.controller.ack_backup_queue.empty():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        module.STORAGE_BATCH_SIZE = 128
    server.controller.ack_backup_queue.get()
    assert [len(hashes) for hashes, _ in calls] == [25, 25, 10]
    assert [parent for _, parent in calls] == [None, bytes.fromhex(keys[24]), bytes.fromhex(keys[49])]
    server.close()


def check_adapters_and_salts_are_apart():
    """This release's keys leave the adapter out; such prompts must be neither stored nor found."""
    server = Server(FOLDER / "lora", checkpoint("model-lora", 1))
    prompt = tokens(1, 6)
    assert server.prefill(prompt, "adapter") == (0, 0, 96)
    server.flush()
    assert server.prefill(prompt) == (0, 0, 96)  # not the adapter's pages
    server.flush()
    had, _, computed = server.prefill(prompt, "adapter")  # not the plain ones either (prefill compares)
    assert (had, computed) == (0, 96)
    assert server.prefill(prompt[:32] + tokens(5, 3), "adapter")[2] == 48
    server.flush()
    assert server.prefill(prompt) == (0, 96, 0)
    server.close()


def check_what_follows_an_image_is_not_stored():
    """This release's keys hold 30 bits of an image, which two images may share."""
    server = Server(FOLDER / "image", checkpoint("model-image", 1))
    text, image = tokens(1, 2), [1_000_000 + 12345] * (2 * PAGE)
    assert server.prefill(text) == (0, 0, 32)
    assert server.prefill(text + image) == (32, 0, 32)
    assert server.prefill(text + image + tokens(2, 2)) == (64, 0, 32)
    assert server.prefill(tokens(3, 4)) == (0, 0, 64)
    server.flush()
    assert server.prefill(text + image + tokens(2, 2)) == (0, 32, 64)
    server.flush()
    assert server.prefill(tokens(3, 4)) == (0, 64, 0)
    server.close()


def check_detach_attach():
    server = Server(FOLDER / "attach", checkpoint("model-attach", 1))
    prompt = tokens(1, 4)
    server.prefill(prompt)
    assert server.cache.detach_storage_backend()[0]
    server.flush()
    config = json.dumps({"path": str(FOLDER / "attach"), "prefetch_threshold": 1, "free_space_floor": 0})
    ok, message = server.cache.attach_storage_backend("tardis", '{"nonsense": 1}', served_model_name="served")
    assert not ok and "nonsense" in message, message
    ok, message = server.cache.attach_storage_backend("tardis", config, served_model_name="served")
    assert ok, message
    assert server.prefill(prompt) == (0, 64, 0)
    assert server.cache.clear_storage_backend()
    server.flush()
    assert server.prefill(prompt) == (0, 0, 64)
    server.close()


def check_draft_kv_is_refused():
    from sglang_tardis.sglang.host_pool import UnsupportedPoolError

    server = Server(FOLDER / "draft", checkpoint("model-draft", 1))
    server.controller.has_draft = True
    try:
        server.controller._maybe_register_draft_with_storage()
    except UnsupportedPoolError as error:
        assert "'draft'" in str(error)
    else:
        raise AssertionError("draft KV was accepted")
    server.close()


def check_weight_updates():
    from types import SimpleNamespace

    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang_tardis.sglang import weight_updates

    server = Server(FOLDER / "update", checkpoint("model-update", 1))
    new = checkpoint("model-update-new", 2)
    prompt = tokens(1, 4)
    server.prefill(prompt)

    def flush_cache(empty_cache=True):
        server.flush()
        return True

    updater = object.__new__(SchedulerWeightUpdaterManager)
    worker = SimpleNamespace(update_weights_from_disk=lambda request: (True, ""))
    values = dict(
        tp_worker=worker, draft_worker=None, metrics_collector=None, flush_cache=flush_cache, tp_cpu_group=None
    )
    for name, value in values.items():
        setattr(updater, name, value)
    request = SimpleNamespace(model_path=str(new), flush_cache=True, torch_empty_cache=False, load_format=None)
    assert updater.update_weights_from_disk(request).success
    assert weight_updates.current().model_path == str(new)
    assert server.prefill(prompt) == (0, 0, 64)
    request.flush_cache = False
    assert updater.update_weights_from_disk(request).success
    assert weight_updates.current().unknown
    server.flush()
    assert server.prefill(prompt) == (0, 0, 64)
    weight_updates.forget()
    server.close()


def check_failed_hook_stops_the_start():
    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang_tardis.sglang.seams import SeamError

    hooked = HiCacheController.attach_storage_backend
    HiCacheController.attach_storage_backend = hooked.__wrapped__
    try:
        Server(FOLDER / "hook", checkpoint("model-hook", 1))
    except SeamError as error:
        assert "0.5.16" in str(error) and "zero-copy" in str(error), error
    else:
        raise AssertionError("the server started without the hook")
    finally:
        HiCacheController.attach_storage_backend = hooked


_TWO_RANKS = {}


def check_two_ranks_mha():
    """TP 2: every rank has a namespace and bytes of its own, and both report the same hit."""
    first, second = _TWO_RANKS[False]()
    for rank in (first, second):
        assert not isinstance(rank, str), rank
        assert rank[0] == [(0, 0, 80), (0, 80, 0), (32, 0, 32)]
        assert rank[1] == 7
    assert first[2] != second[2]
    assert second[3] == "tp 1 of 2"


def check_two_ranks_mla():
    """TP 2 of MLA: rank 0 writes, both read."""
    first, second = _TWO_RANKS[True]()
    for rank in (first, second):
        assert not isinstance(rank, str), rank
        assert rank[0] == [(0, 0, 80), (0, 80, 0), (32, 0, 32)]
    assert (first[1], second[1]) == (7, 0)
    assert first[2] == second[2]
    assert second[3] == "tp 1 of 2 (reads only)"


def check_page_events():
    """The pages that its allocators take and give back, and lists of free pages that are put back."""
    import page_event_cases

    for page_size in (1, 4, 16):
        for need_sort in (False, True):
            page_event_cases.random_use(page_size, need_sort)
    assert page_event_cases.saved_states()
    page_event_cases.refusals()
    page_event_cases.listener_failures()
    page_event_cases.detaching_below_others()


def main() -> int:
    import tardis_sglang16_support
    import torch.distributed
    from sglang.srt.plugins import load_plugins
    from sglang_tardis.sglang import seams
    from tardis_cpu_support import apply_cpu_support

    torch.set_num_threads(1)
    _BEFORE_THE_TREE["outcome"] = run_late_imports()
    load_plugins()
    seams.install_late()
    apply_cpu_support()
    tardis_sglang16_support.register()
    from sglang.srt.mem_cache import hiradix_cache  # noqa: F401 - once, for all ranks
    from sglang.srt.mem_cache.utils import get_hash_str

    get_hash_str([1] * PAGE, None)
    for mla in (False, True):
        if not sys.argv[1:] or f"check_two_ranks_{'mla' if mla else 'mha'}" in sys.argv:
            outcome = run_two_ranks(mla, FOLDER, checkpoint(f"model-ranks-{'mla' if mla else 'mha'}", 1))
            _TWO_RANKS[mla] = lambda outcome=outcome: outcome
    torch.distributed.init_process_group("gloo", init_method=f"file://{FOLDER / 'rendezvous'}", rank=0, world_size=1)
    from sglang.srt.runtime_context import get_parallel

    with get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1):
        print("RESULTS " + json.dumps(run(sys.argv[1:])), flush=True)
    return 0


def run(chosen):
    results = {}
    for name, function in list(globals().items()):
        if name.startswith("check_") and (not chosen or name in chosen):
            try:
                function()
                results[name] = None
            except BaseException:
                results[name] = traceback.format_exc()
    return results


if __name__ == "__main__":
    sys.exit(main())
