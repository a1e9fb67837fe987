# SPDX-License-Identifier: Apache-2.0
"""TardisStorage on SGLang's real host pools: bytes, layouts, refusals, life cycle."""

from __future__ import annotations

import hashlib
import logging

import pytest
import torch
from host_pools import buffers, host_pool, slots, storage_config
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang_tardis.bridge.keys import block_hash
from sglang_tardis.config import ConfigError
from sglang_tardis.sglang import pool_memory
from sglang_tardis.sglang.host_pool import UnsupportedPoolError
from sglang_tardis.sglang.identity import IdentityError
from sglang_tardis.sglang.storage import TardisStorage
from tree_server import HOST_POISON

KEYS = [hashlib.sha256(bytes([i])).hexdigest() for i in range(12)]
LAYOUTS = ["page_first_direct", "layer_first", "page_first"]
MHA_LAYOUTS = [*LAYOUTS, "page_head"]  # SGLang has no page_head layout for MLA


def fill(pool, seed):
    generator = torch.Generator().manual_seed(seed)
    for tensor in buffers(pool):
        tensor.copy_(torch.randint(0, 256, tensor.shape, generator=generator, dtype=torch.uint8))


def page_bytes(pool, page):
    """The bytes of a page in the order of SGLang's own flat pages, as [layer][stream] for the layer-major layouts."""
    if pool.layout in ("page_first", "page_head"):
        return pool.get_data_page(page * pool.page_size).view(torch.uint8)
    flat = pool.get_data_page(page * pool.page_size).view(torch.uint8)
    streams = 1 if "MLA" in type(pool).__name__ else 2
    return flat.view(streams, pool.layer_num, -1).transpose(0, 1).reshape(-1)


@pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize(
    "mem_layout,mla",
    [*((layout, False) for layout in MHA_LAYOUTS), *((layout, True) for layout in LAYOUTS)],
    ids=lambda value: {False: "mha", True: "mla"}.get(value, value),
)
def test_round_trip(model, open_storage, mem_layout, mla, dtype):
    pool, device = host_pool(model, mem_layout, mla=mla, dtype=dtype)
    fill(pool, 1)
    storage = open_storage(pool, device)
    written, read = [3, 1, 7, 8], [5, 2, 9, 0]
    expected = [page_bytes(pool, page).clone() for page in written]
    assert storage.batch_exists(KEYS[:4]) == 0
    assert storage.batch_set_v1(KEYS[:4], slots(written, 16)) == [True] * 4
    assert storage.batch_exists(KEYS[:6]) == 4
    assert storage.exists(KEYS[2]) and not storage.exists(KEYS[5])
    for tensor in buffers(pool):
        tensor.fill_(HOST_POISON)
    assert storage.batch_get_v1(KEYS[:4], slots(read, 16)) == [True] * 4
    for page, bytes_ in zip(read, expected, strict=True):
        assert torch.equal(page_bytes(pool, page), bytes_)
    untouched = sorted(set(range(pool.page_num)) - set(read))
    for page in untouched:
        assert (page_bytes(pool, page) == HOST_POISON).all(), f"page {page} was not asked for"


@pytest.mark.parametrize("mem_layout", LAYOUTS[:2])
def test_round_trip_of_a_registered_pool(model, open_storage, monkeypatch, mem_layout):
    monkeypatch.setattr(pool_memory, "_page_locked", lambda tensor: True)  # as with a GPU
    pool, device = host_pool(model, mem_layout)
    fill(pool, 1)
    storage = open_storage(pool, device)
    storage._pool_memory.wait()
    stats, size = storage._store.stats(), sum(tensor.nbytes for tensor in buffers(pool))
    if storage._store.path_report()["engine"] == "io_uring":
        assert stats["registered_bytes"] + stats["not_registered_bytes"] >= size
    expected = [page_bytes(pool, page).clone() for page in range(4)]
    assert storage.batch_set_v1(KEYS[:4], slots(range(4), 16)) == [True] * 4
    for tensor in buffers(pool):
        tensor.fill_(HOST_POISON)
    assert storage.batch_get_v1(KEYS[:4], slots(range(8, 12), 16)) == [True] * 4
    for page, bytes_ in zip(range(8, 12), expected, strict=True):
        assert torch.equal(page_bytes(pool, page), bytes_)
    if stats["registered_bytes"]:
        assert storage._store.stats()["registered_requests"] > 0
    # A pool that takes its place is registered instead.
    other, _ = host_pool(model, mem_layout)
    storage.register_mem_pool_host(other)
    storage._pool_memory.wait()
    assert storage._store.stats()["registered_bytes"] == stats["registered_bytes"]


@pytest.mark.parametrize("mla", [False, True], ids=["mha", "mla"])
@pytest.mark.parametrize("first,second", [(a, b) for a in LAYOUTS[:2] for b in LAYOUTS[:2] if a != b])
def test_layer_major_layouts_share_pages(model, open_storage, first, second, mla):
    pool, device = host_pool(model, first, mla=mla)
    fill(pool, 2)
    writer = open_storage(pool, device)
    assert writer.batch_set_v1(KEYS[:3], slots([0, 4, 2], 16)) == [True] * 3
    expected = [page_bytes(pool, page).clone() for page in (0, 4, 2)]
    writer.close()
    pool, device = host_pool(model, second, mla=mla)
    reader = open_storage(pool, device)
    assert reader.batch_exists(KEYS[:4]) == 3
    assert reader.batch_get_v1(KEYS[:3], slots([6, 1, 3], 16)) == [True] * 3
    for page, bytes_ in zip((6, 1, 3), expected, strict=True):
        assert torch.equal(page_bytes(pool, page), bytes_)


@pytest.mark.parametrize(
    "first,second",
    [(a, b) for a in MHA_LAYOUTS for b in MHA_LAYOUTS if a != b and not {a, b} <= {"page_first_direct", "layer_first"}],
)
def test_layouts_with_other_bytes_are_apart(model, open_storage, first, second):
    pool, device = host_pool(model, first)
    writer = open_storage(pool, device)
    assert all(writer.batch_set_v1(KEYS[:2], slots([0, 1], 16)))
    writer.close()
    pool, device = host_pool(model, second)
    assert open_storage(pool, device).batch_exists(KEYS[:2]) == 0


@pytest.mark.parametrize("mem_layout", ["page_first", "page_head"])
def test_other_layouts_are_stored_byte_for_byte(model, open_storage, tmp_path, mem_layout):
    """A page of K, and one of V, lie in the store's files exactly as they do in host memory."""
    pool, device = host_pool(model, mem_layout)
    fill(pool, 6)
    storage = open_storage(pool, device)
    assert storage._map.layout.tag == mem_layout
    pages = [3, 0, 2]
    assert all(storage.batch_set_v1(KEYS[:3], slots(pages, 16)))
    storage.close()
    stored = b"".join(file.read_bytes() for file in sorted((tmp_path / "store").rglob("*")) if file.is_file())
    for page in pages:
        begin, rows = (page, 1) if mem_layout == "page_head" else (page * 16, 16)
        for stream in (pool.k_buffer, pool.v_buffer):
            region = stream[begin : begin + rows].contiguous().view(torch.uint8).numpy().tobytes()
            assert stored.count(region) == 1


@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize("mem_layout", MHA_LAYOUTS)
def test_any_page_size(model, open_storage, mem_layout, page_size):
    pool, device = host_pool(model, mem_layout, page_size=page_size, tokens=64 * page_size, layers=2, head_dim=24)
    fill(pool, 3)
    storage = open_storage(pool, device)
    assert all(storage.batch_set_v1(KEYS, slots(range(12), page_size)))
    expected = [page_bytes(pool, page).clone() for page in range(12)]
    assert all(storage.batch_get_v1(KEYS, slots(range(20, 32), page_size)))
    for page, bytes_ in enumerate(expected, start=20):
        assert torch.equal(page_bytes(pool, page), bytes_)


@pytest.mark.parametrize("mem_layout", ["page_first", "page_first_direct"])
def test_different_head_dims_of_k_and_v(model, open_storage, mem_layout):
    pool, device = host_pool(model, mem_layout, head_dim=32, v_head_dim=16)
    assert type(pool).__name__ == "AsymmetricMHATokenToKVPoolHost"
    fill(pool, 4)
    storage = open_storage(pool, device)
    before = [tensor.clone() for tensor in buffers(pool)]
    assert all(storage.batch_set_v1(KEYS[:4], slots([0, 1, 2, 3], 16)))
    for tensor in buffers(pool):
        tensor.fill_(HOST_POISON)
    assert all(storage.batch_get_v1(KEYS[:4], slots([0, 1, 2, 3], 16)))
    for tensor, old in zip(buffers(pool), before, strict=True):
        rows = 4 if mem_layout == "page_first_direct" else 64
        assert torch.equal(tensor[:rows], old[:rows])
        assert (tensor[rows:] == HOST_POISON).all()


def test_one_store_call_per_batch(model, open_storage, monkeypatch):
    pool, device = host_pool(model, "layer_first", tokens=128 * 16)
    storage = open_storage(pool, device)
    keys = [hashlib.sha256(f"{i}".encode()).hexdigest() for i in range(128)]
    calls = []
    namespace = storage._current()
    for name in ("lookup", "get", "set"):
        original = getattr(namespace, name)
        monkeypatch.setattr(
            namespace,
            name,
            lambda hashes, *rest, _n=name, _o=original: calls.append((_n, len(hashes))) or _o(hashes, *rest),
        )
    indices = slots(range(128), 16)
    storage.batch_set_v1(keys, indices)
    storage.batch_exists(keys)
    storage.batch_get_v1(keys, indices)
    assert calls == [("set", 128), ("lookup", 128), ("get", 128)]


def test_parents(model, open_storage, monkeypatch):
    """The last earlier key is the parent; an operation of several batches goes on where the last one ended."""
    pool, device = host_pool(model)
    storage = open_storage(pool, device)
    parents = []
    namespace = storage._current()
    original = namespace.set
    monkeypatch.setattr(namespace, "set", lambda h, p, parent=None: parents.append(parent) or original(h, p, parent))
    indices = slots([0, 1], 16)
    storage.batch_set_v1(KEYS[:2], indices)
    storage.batch_set_v1(KEYS[2:4], indices, HiCacheStorageExtraInfo(prefix_keys=KEYS[:2]))
    same = []  # as 0.5.16 does it: one list, never extended because it was empty
    storage.batch_set_v1(KEYS[4:6], indices, HiCacheStorageExtraInfo(prefix_keys=same))
    storage.batch_set_v1(KEYS[6:8], indices, HiCacheStorageExtraInfo(prefix_keys=same))
    storage.batch_set_v1(KEYS[8:10], indices, HiCacheStorageExtraInfo(prefix_keys=[]))
    assert parents == [None, block_hash(KEYS[1]), None, block_hash(KEYS[5]), None]


def test_partial_reads_end_the_prefix(model, open_storage):
    pool, device = host_pool(model)
    storage = open_storage(pool, device)
    storage.batch_set_v1(KEYS[:2], slots([0, 1], 16))
    storage.batch_set_v1(KEYS[3:4], slots([3], 16))
    assert storage.batch_exists(KEYS[:4]) == 2
    assert storage.batch_get_v1(KEYS[:4], slots([0, 1, 2, 3], 16))[:3] == [True, True, False]


def test_v2_calls(model, open_storage):
    pool, device = host_pool(model)
    storage = open_storage(pool, device)
    storage.register_mem_host_pool_v2(pool, PoolName.KV)
    storage.on_host_pools_registered()
    indices = slots([0, 1, 2], 16)
    kv = PoolTransfer(name=PoolName.KV, host_indices=indices, keys=KEYS[:3])
    other = PoolTransfer(name=PoolName.SWA, host_indices=indices, keys=KEYS[:3])
    assert storage.batch_set_v2([kv, other]) == {PoolName.KV: [True] * 3, PoolName.SWA: [False] * 3}
    assert storage.batch_get_v2([kv, other]) == {PoolName.KV: [True] * 3, PoolName.SWA: [False] * 3}
    plain = storage.batch_exists_v2(KEYS[:5])
    assert (plain.kv_hit_pages, plain.extra_pool_hit_pages, plain.restorable_prefix_pages) == (
        3,
        {PoolName.KV: 3},
        [1, 2, 3],
    )


@pytest.mark.parametrize("policy,usable", [("ALL_PAGES", 0), ("TRAILING_PAGES", 0), ("BLOCK_GROUPS", 3)])
def test_exists_v2_with_a_pool_that_is_not_stored(model, open_storage, policy, usable):
    """The rules of SGLang's own file backend: a pool that must have pages and has none leaves no prefix."""
    pool, device = host_pool(model)
    storage = open_storage(pool, device)
    storage.batch_set_v1(KEYS[:3], slots([0, 1, 2], 16))
    transfer = PoolTransfer(name=PoolName.MAMBA, keys=KEYS[:1], hit_policy=PoolHitPolicy[policy])
    result = storage.batch_exists_v2(KEYS[:5], [transfer])
    assert result.kv_hit_pages == usable
    assert result.restorable_prefix_pages == list(range(1, usable + 1))
    assert result.extra_pool_hit_pages == {PoolName.KV: 3}


@pytest.mark.parametrize("mem_layout", MHA_LAYOUTS)
def test_copying_path(model, open_storage, mem_layout, caplog):
    """SGLang's generic calls agree with the zero-copy ones, and say that something is missing."""
    pool, device = host_pool(model, mem_layout)
    fill(pool, 5)
    storage = open_storage(pool, device)
    data = [pool.get_data_page(page * 16) for page in range(4)]
    with caplog.at_level(logging.WARNING):
        assert storage.batch_set(KEYS[:4], data) is True
        assert storage.batch_set(KEYS[:4], data) is True
    assert sum("attach_storage_backend" in record.message for record in caplog.records) == 1
    assert storage.batch_get_v1(KEYS[:4], slots([8, 9, 10, 11], 16)) == [True] * 4
    for page in range(4):
        assert torch.equal(page_bytes(pool, 8 + page), page_bytes(pool, page))
    targets = [pool.get_dummy_flat_data_page() for _ in range(6)]
    got = storage.batch_get(KEYS[:6], targets)
    assert [tensor is not None for tensor in got] == [True] * 4 + [False] * 2
    for tensor, original in zip(got[:4], data, strict=True):
        assert torch.equal(tensor.view(torch.uint8), original.view(torch.uint8))
    assert torch.equal(
        storage.get(KEYS[1], pool.get_dummy_flat_data_page()).view(torch.uint8), data[1].view(torch.uint8)
    )
    assert storage.get(KEYS[9], pool.get_dummy_flat_data_page()) is None
    assert storage.set(KEYS[9], data[0]) is True and storage.exists(KEYS[9])
    # a page of another size (draft KV in older releases) must not be stored as KV
    assert storage.batch_set([f"{KEYS[0]}.draft"], [data[0][: len(data[0]) // 2]]) is False
    assert not storage.exists(f"{KEYS[0]}.draft")


def test_wrong_calls_are_misses(model, open_storage, caplog):
    pool, device = host_pool(model)
    storage = open_storage(pool, device)
    assert storage.batch_set_v1(KEYS[:2], slots([0], 16)) == [False, False]  # fewer slots than keys
    assert storage.batch_set_v1(KEYS[:1], torch.arange(8, 24)) == [False]  # not a page boundary
    assert storage.batch_set_v1(KEYS[:1], slots([10_000], 16)) == [False]  # outside the pool
    assert storage.batch_get_v1(KEYS[:1], None) == [False]
    assert storage.batch_set_v1([], torch.empty(0, dtype=torch.int64)) == []
    assert storage.batch_exists([]) == 0
    assert storage._failures["write"] == 4 and storage._failures["read"] == 1
    assert len([record for record in caplog.records if "failed and counts as a miss" in record.message]) == 2  # not 4


def test_errors_of_the_store_stay_inside(model, open_storage, monkeypatch):
    pool, device = host_pool(model, page_size=16)
    storage = open_storage(pool, device, metrics=True)
    namespace = storage._current()

    def fail(*_):
        raise OSError("the disk is gone")

    for name in ("lookup", "get", "set"):
        monkeypatch.setattr(namespace, name, fail)
    monkeypatch.setattr(storage._store, "stats", fail)
    monkeypatch.setattr(storage._store, "clear", fail)
    indices = slots([0, 1], 16)
    assert storage.batch_exists(KEYS[:2]) == 0
    assert storage.batch_get_v1(KEYS[:2], indices) == [False, False]
    assert storage.batch_set_v1(KEYS[:2], indices) == [False, False]
    assert storage.batch_set(KEYS[:1], [pool.get_data_page(0)]) is False
    assert storage.batch_exists_v2(KEYS[:2]).kv_hit_pages == 0
    assert storage.clear() is False
    storage._metrics._last = float("-inf")
    assert storage.get_stats() is None


def test_no_statistics_without_metrics(model, open_storage):
    pool, device = host_pool(model)
    assert open_storage(pool, device).get_stats() is None


def test_statistics_with_metrics(model, open_storage, tmp_path):
    from sglang.srt.observability.metrics_collector import StorageMetrics

    pool, device = host_pool(model)
    storage = open_storage(pool, device, metrics=True)
    first = storage.get_stats()
    assert isinstance(first, StorageMetrics) and first.backup_pgs == []
    storage.batch_set_v1(KEYS[:4], slots([0, 1, 2, 3], 16))
    storage.batch_get_v1(KEYS[:5], slots([0, 1, 2, 3, 4], 16))
    stats = storage.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([4], [4])
    assert len(stats.backup_bandwidth) == len(stats.prefetch_bandwidth) == 1
    assert 0 < stats.backup_bandwidth[0] < 1000
    assert storage.get_stats().backup_pgs == []  # drained
    storage.close()
    assert isinstance(storage.get_stats(), StorageMetrics)


# ---- life cycle ---------------------------------------------------------------------------------------------------


def test_a_close_that_fails_still_gives_the_pool_memory_back(model, open_storage, monkeypatch):
    monkeypatch.setattr(pool_memory, "_page_locked", lambda tensor: True)  # as with a GPU
    pool, device = host_pool(model)
    storage = open_storage(pool, device, metrics=True)
    memory, store = storage._pool_memory, storage._store
    memory.wait()
    assert memory._storages

    class Failing:
        def __getattr__(self, name):
            return getattr(store, name)

        def stats(self):
            raise RuntimeError("no statistics")

        def close(self):
            store.close()
            raise RuntimeError("the last flush failed")

    storage._store = Failing()
    storage.close()
    assert not memory._storages and not memory._done


def test_a_pool_that_comes_after_close_is_left_alone(model, open_storage, monkeypatch):
    monkeypatch.setattr(pool_memory, "_page_locked", lambda tensor: True)  # as with a GPU
    storage = open_storage(*host_pool(model))
    storage.close()
    registered = storage._pool_memory
    storage.register_mem_pool_host(host_pool(model)[0])
    assert storage._pool_memory is registered


def test_after_close_everything_is_a_miss(model, open_storage):
    pool, device = host_pool(model)
    storage = open_storage(pool, device)
    indices = slots([0, 1], 16)
    assert all(storage.batch_set_v1(KEYS[:2], indices))
    storage.close()
    storage.close()
    assert storage.batch_exists(KEYS[:2]) == 0
    assert storage.batch_get_v1(KEYS[:2], indices) == [False, False]
    assert storage.batch_set_v1(KEYS[:2], indices) == [False, False]
    assert storage.batch_set(KEYS[:1], [pool.get_data_page(0)]) is False
    assert storage.get(KEYS[0], pool.get_dummy_flat_data_page()) is None
    assert storage.clear() is False
    again = open_storage(pool, device)
    assert again.batch_exists(KEYS[:2]) == 2


def test_clear(model, open_storage):
    pool, device = host_pool(model)
    storage = open_storage(pool, device)
    storage.batch_set_v1(KEYS[:3], slots([0, 1, 2], 16))
    assert storage.clear() is True
    assert storage.batch_exists(KEYS[:3]) == 0
    assert all(storage.batch_set_v1(KEYS[:3], slots([0, 1, 2], 16)))
    assert storage.batch_exists(KEYS[:3]) == 3


def test_two_backends_on_one_store(model, open_storage):
    """As two servers on one host, or two replicas of one: each finds what the other wrote, and outlives it."""
    pool, device = host_pool(model)
    first, second = open_storage(pool, device), open_storage(pool, device)
    indices = slots([0, 1], 16)
    assert all(first.batch_set_v1(KEYS[:2], indices))
    assert second.batch_exists(KEYS[:3]) == 2
    assert second.batch_get_v1(KEYS[:2], indices) == [True, True]
    first.close()
    assert all(second.batch_set_v1(KEYS[2:4], indices))
    assert second.batch_exists(KEYS[:5]) == 4


def test_factory_and_dynamic_route(model, tmp_path):
    """Through SGLang's factory: by name, and as a `dynamic` backend that gets its pool later."""
    pool, _ = host_pool(model)
    by_name = StorageBackendFactory.create_backend("tardis", storage_config(tmp_path / "store"), pool)
    assert type(by_name) is TardisStorage
    assert all(by_name.batch_set_v1(KEYS[:2], slots([0, 1], 16)))
    by_name.close()
    extra = {
        "backend_name": "tardis",
        "module_path": "sglang_tardis.sglang.storage",
        "class_name": "TardisStorage",
        "interface_v1": 1,
    }
    dynamic = StorageBackendFactory.create_backend("dynamic", storage_config(tmp_path / "store", extra=extra), pool)
    assert type(dynamic) is TardisStorage
    assert dynamic.batch_exists(KEYS[:2]) == 0  # no pool, no store
    dynamic.register_mem_pool_host(pool)
    assert dynamic.batch_exists(KEYS[:2]) == 2
    dynamic.close()


# ---- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [dict(tp_lcm_size=4), dict(should_split_heads=True)])
def test_split_heads_are_refused(model, open_storage, changes):
    pool, device = host_pool(model)
    with pytest.raises(NotImplementedError, match="tp_lcm_size"):
        open_storage(pool, device, **changes)


def test_mla_of_another_kind_of_pool_is_refused(model, open_storage, tmp_path):
    """SGLang lets one rank write for all where it takes the bytes for equal; the pool must agree."""
    pool, _ = host_pool(model)
    with pytest.raises(IdentityError, match="which ranks may share"):
        TardisStorage(storage_config(tmp_path / "store", mla=True), pool)


@pytest.mark.parametrize("name", [PoolName.SWA, PoolName.MAMBA, PoolName.INDEXER, PoolName.DRAFT])
def test_other_pools_are_refused_by_name(model, open_storage, name):
    pool, device = host_pool(model)
    storage = open_storage(pool, device)
    storage.register_mem_host_pool_v2(pool, PoolName.KV)
    with pytest.raises(UnsupportedPoolError, match=f"'{name.value}'"):
        storage.register_mem_host_pool_v2(pool, name)


def test_unknown_pool_classes_and_layouts_are_refused(model, open_storage):
    pool, device = host_pool(model)

    class PoolWithScales(type(pool)):
        pass

    pool.__class__ = PoolWithScales
    with pytest.raises(UnsupportedPoolError, match="PoolWithScales"):
        open_storage(pool, device)
    pool.__class__ = PoolWithScales.__mro__[1]
    pool.layout = "page_unified"
    with pytest.raises(ValueError, match="page_unified"):
        open_storage(pool, device)


def test_a_pool_that_hides_bytes_is_refused(model, open_storage):
    """Per-token scales beside K and V, for instance: the page on disk would not be the whole page."""
    pool, device = host_pool(model)
    pool.size_per_token += 4
    with pytest.raises(NotImplementedError, match="leave bytes out"):
        open_storage(pool, device)


def test_unknown_setting_is_refused(model, open_storage):
    pool, device = host_pool(model)
    with pytest.raises(ConfigError, match="capacitee"):
        open_storage(pool, device, extra={"capacitee": "1GiB"})


def test_a_failed_start_leaves_no_lock(model, open_storage, monkeypatch):
    from sglang_tardis.sglang import storage as module

    pool, device = host_pool(model)
    monkeypatch.setattr(module.TardisStorage, "_say_start", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        open_storage(pool, device)
    monkeypatch.undo()
    assert open_storage(pool, device).batch_exists(KEYS[:1]) == 0
