# SPDX-License-Identifier: Apache-2.0
"""What makes a namespace of TardisStorage on SGLang's real host pools, and what the log says of it."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from host_pools import host_pool, publish, storage_config
from sglang_tardis.sglang.identity import IdentityError, identify_weights
from sglang_tardis.sglang.server_settings import ServerSettings
from sglang_tardis.sglang.storage import TardisStorage
from tree_server import write_checkpoint


def fingerprint(open_storage, model, tmp_path, mem_layout="page_first", extra=None, server=None, **geometry):
    pool, device = host_pool(model, mem_layout, **geometry)
    if server:
        publish(model, page_size=16, **server)
    storage = open_storage(pool, device, extra=extra or {})
    try:
        return storage._identity.fingerprint()
    finally:
        storage.close()


def test_what_makes_a_namespace(open_storage, model, tmp_path):
    """Equal set-ups agree; each thing that changes KV values or their meaning tells them apart."""

    def of(**changes):
        return fingerprint(open_storage, changes.pop("checkpoint", model), tmp_path, **changes)

    base = of()
    assert of() == base
    other_weights = write_checkpoint(tmp_path / "other", seed=1)
    other_config = write_checkpoint(tmp_path / "rope", seed=0, rope_theta=5e5)
    scales = tmp_path / "scales.json"
    scales.write_text('{"k": 1}')
    variants = {
        "weights": of(checkpoint=other_weights),
        "config": of(checkpoint=other_config),
        "revision": of(extra={"weights_revision": "a"}),
        "other revision": of(extra={"weights_revision": "b"}),
        "e4m3": of(dtype="fp8_e4m3"),
        "e5m2": of(dtype="fp8_e5m2"),
        "page size": of(page_size=32),
        "layout": of(mem_layout="page_first_direct"),
        "heads": of(heads=4),
        "head dim": of(head_dim=16),
        "layers": of(layers=4),
        "mla": of(mla=True),
        "override": of(server=dict(json_model_override_args='{"rope_theta": 2.0}')),
        "quantization": of(server=dict(quantization="fp8")),
        "kv scales": of(server=dict(quantization_param_path=str(scales))),
        "served name": of(server=dict(served_model_name="another")),
        "dummy": of(server=dict(load_format="dummy")),
        "hooks": of(server=dict(forward_hooks=[{"name": "steer"}])),
        "image positions": of(server=dict(enable_precise_embedding_interpolation=True)),
        "experts elsewhere": of(server=dict(kt_weight_path=str(other_weights))),
        "experts in int8": of(server=dict(kt_weight_path=str(other_weights), kt_method="AMXINT8")),
    }
    scales.write_text('{"k": 2}')
    variants["other kv scales"] = of(server=dict(quantization_param_path=str(scales)))
    values = [base, *variants.values()]
    assert len(set(values)) == len(values), {name: value.hex() for name, value in variants.items()}
    assert of(mem_layout="layer_first") == variants["layout"]  # the same bytes on disk
    unnamed = of(server=dict(served_model_name=None))
    moved = tmp_path / "elsewhere" / model.name
    moved.parent.mkdir()
    model.rename(moved)
    assert of(checkpoint=moved) == base  # where the files lie does not matter
    assert of(checkpoint=moved, server=dict(served_model_name=None)) == unnamed


def test_fp8_dtype_comes_from_the_device_pool(model, tmp_path):
    """Both fp8 types are uint8 in the host pool; without the device pool the flag decides, and `auto` is refused."""
    for dtype, expected in (("fp8_e4m3", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")):
        pool, _ = host_pool(model, dtype=dtype)
        storage = TardisStorage(storage_config(tmp_path / dtype), pool)
        assert storage._identity.kv_dtype == expected
        storage.close()
    pool, _ = host_pool(model, dtype="fp8_e4m3")
    publish(model, page_size=16)
    pool.dtype = torch.uint8
    with pytest.raises(IdentityError, match="--kv-cache-dtype"):
        TardisStorage(storage_config(tmp_path / "auto"), pool)


def test_weights_that_cannot_be_identified(model, open_storage, tmp_path):
    pool, device = host_pool(model)
    (model / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(IdentityError, match="weights_revision"):
        open_storage(pool, device)
    assert open_storage(pool, device, extra={"weights_revision": "r1"})._identity.weights == "revision:r1"
    elsewhere = ServerSettings(SimpleNamespace(model_path="nobody/no-such-model", load_format="auto"))
    with pytest.raises(IdentityError, match="weights_revision"):
        identify_weights(elsewhere, None)
    shared = ServerSettings(SimpleNamespace(model_path=str(model), load_format="auto", weight_cache_mode="client"))
    with pytest.raises(IdentityError, match="--weight-cache-mode client"):
        identify_weights(shared, None)
    remote = ServerSettings(SimpleNamespace(model_path=str(model), load_format="remote_instance"))
    with pytest.raises(IdentityError, match="--load-format remote_instance"):
        identify_weights(remote, None)


def test_hub_models_are_found_in_the_local_cache(tmp_path):
    """A hub name is resolved without the network; the snapshot's content is what counts."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    cache = tmp_path / "hub"
    repo = cache / "models--someone--tiny"
    write_checkpoint(repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    settings = ServerSettings(
        SimpleNamespace(model_path="someone/tiny", load_format="auto", revision=None, download_dir=str(cache))
    )
    plain = ServerSettings(SimpleNamespace(model_path=str(write_checkpoint(tmp_path / "plain")), load_format="auto"))
    assert identify_weights(settings, None) == identify_weights(plain, None)


def test_adapters_in_one_place_are_told_apart(model, open_storage, tmp_path):
    """SGLang keys an adapter by name and path; another adapter there must not find the first one's pages."""
    adapter = write_checkpoint(tmp_path / "adapter", seed=7)
    (adapter / "adapter_config.json").write_text('{"lora_alpha": 16}')
    server = dict(lora_paths=[f"x={adapter}"])
    first = fingerprint(open_storage, model, tmp_path, server=server)
    assert fingerprint(open_storage, model, tmp_path, server=server) == first
    (adapter / "adapter_config.json").write_text('{"lora_alpha": 32}')
    second = fingerprint(open_storage, model, tmp_path, server=server)
    write_checkpoint(adapter, seed=8)
    third = fingerprint(open_storage, model, tmp_path, server=server)
    assert len({first, second, third}) == 3


def test_a_folder_that_is_taken_out_is_logged_once(model, open_storage, caplog, monkeypatch):
    storage = open_storage(*host_pool(model, "page_first_direct"))
    store, report = storage._store, {"paths": [{"path": "/a", "state": "in use", "reason": ""}]}
    stats = {**store.stats(), "paths": 3, "paths_out": 0}
    monkeypatch.setattr(store, "stats", lambda: stats)
    monkeypatch.setattr(store, "path_report", lambda: report)

    def logged() -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="sglang_tardis"):
            assert storage.batch_get_v1(["0" * 64], torch.arange(storage._shape.page_tokens)) == [False]
        return [record.getMessage() for record in caplog.records]

    assert logged() == []
    for number, path in enumerate(("/b", "/c"), start=1):
        report["paths"].append({"path": path, "state": "out", "reason": "Input/output error"})
        stats["paths_out"] = number
        (line,) = logged()
        assert f"folder {path} is out (Input/output error)" in line
        assert logged() == []


def test_start_line(model, open_storage, caplog):
    pool, device = host_pool(model, "page_first_direct")
    with caplog.at_level(logging.INFO, logger="sglang_tardis"):
        storage = open_storage(pool, device)
    lines = [record.getMessage() for record in caplog.records if "tardis: store" in record.getMessage()]
    assert len(lines) == 1
    assert storage._identity.fingerprint().hex() in lines[0]
    assert "layout layer-major (host page_first_direct)" in lines[0]
    assert np.prod([3, 2, 16, 2, 32, 2]) == storage._map.layout.object_bytes
