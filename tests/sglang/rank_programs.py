# SPDX-License-Identifier: Apache-2.0
"""What a rank does in the tests with several processes; every function is called by name (rank_processes.py).

A rank's pages have a content that follows from a shard and the page's key, so that bytes of another rank, key or layer
range are noticed wherever they turn up.
"""

from __future__ import annotations

import hashlib
import importlib
import threading
import time
from pathlib import Path
from typing import Any

import host_pools
import numpy as np
import torch
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_hash_str
from sglang.srt.plugins import load_plugins
from sglang_tardis.sglang import seams
from sglang_tardis.sglang.seams import attaching_controller
from sglang_tardis.sglang.storage import TardisStorage
from tardis_cpu_support import apply_cpu_support
from tree_server import TreeServer

PAGE = 16
_state: dict[str, Any] = {}


def _prepare() -> None:
    """What SGLang does in a scheduler process at its start; here once, in the process that ranks are forked from."""
    torch.set_num_threads(1)
    load_plugins()
    seams.install_late()
    apply_cpu_support()
    get_hash_str(list(range(PAGE)), None, page_size=PAGE)  # compiled or loaded once
    for module in ("sglang.srt.model_loader.loader", "sglang.srt.layers.layer_boundary"):
        importlib.import_module(module)  # what resolving server arguments imports at its first time


_prepare()


# ---- one backend ----------------------------------------------------------------------------------------------------


def open_rank(
    *,
    folder: str,
    model: str,
    mla: bool = False,
    page_size: int = PAGE,
    layers: int = 3,
    heads: int = 2,
    shard: str = "",
    capacity: str = "64MiB",
    mem_layout: str = "page_first",
    revision: str | None = None,
    **rank: Any,
) -> dict[str, Any]:
    """Make this rank's host pool and its backend, through SGLang's factory. `rank`: fields of HiCacheStorageConfig."""
    pool, device = host_pools.host_pool(
        model, mem_layout, mla=mla, page_size=page_size, layers=layers, heads=heads, tokens=64 * page_size
    )
    extra = {"capacity": capacity} | ({"weights_revision": revision} if revision else {})
    config = host_pools.storage_config(folder, mla=mla, extra=extra, **rank)

    class Controller:
        mem_pool_device = device

    token = attaching_controller.set(Controller)
    try:
        storage = StorageBackendFactory.create_backend("tardis", config, pool)
    finally:
        attaching_controller.reset(token)
    assert type(storage) is TardisStorage
    storage.register_mem_pool_host(pool)
    _state.update(pool=pool, storage=storage, page_size=page_size, shard=shard, mla=mla)
    identity = storage._identity
    return {"fingerprint": identity.fingerprint().hex(), "rank": str(storage._rank), "writes": storage._rank.writes}


def _content(key: str, size: int) -> torch.Tensor:
    seed = hashlib.sha256(f"{_state['shard']}/{key}".encode()).digest()
    return torch.from_numpy(np.random.default_rng(np.frombuffer(seed, np.uint64)).integers(0, 256, size, np.uint8))


def _page(page: int) -> torch.Tensor:
    """A copy of the bytes of one page of the host pool."""
    return _state["pool"].get_data_page(page * _state["page_size"]).contiguous().view(torch.uint8).reshape(-1).clone()


def _slots(count: int) -> torch.Tensor:
    return host_pools.slots(range(count), _state["page_size"])


def write(*, keys: list[str]) -> list[bool]:
    """Fill host pages with the contents of these keys and store them."""
    pool, size = _state["pool"], _page(0).numel()
    for page, key in enumerate(keys):
        data = _content(key, size).view(pool.get_data_page(0).dtype)
        pool.set_from_flat_data_page(page * _state["page_size"], data)
    return _state["storage"].batch_set_v1(keys, _slots(len(keys)))


def read(*, keys: list[str], shard: str | None = None) -> list[str]:
    """Read pages into poisoned memory; for each key "good", "missed" or "WRONG" (not the bytes of this shard)."""
    pool, own = _state["pool"], _state["shard"]
    for buffer in host_pools.buffers(pool):
        buffer.fill_(host_pools.HOST_POISON)
    ok = _state["storage"].batch_get_v1(keys, _slots(len(keys)))
    _state["shard"] = own if shard is None else shard
    try:
        size = _page(0).numel()
        return [
            ("good" if torch.equal(_page(page), _content(key, size)) else "WRONG") if good else "missed"
            for page, (key, good) in enumerate(zip(keys, ok, strict=True))
        ]
    finally:
        _state["shard"] = own


def exists(*, keys: list[str]) -> int:
    """Leading pages that are stored."""
    return _state["storage"].batch_exists(keys)


def clear() -> bool:
    """SGLang's clear request."""
    return _state["storage"].clear()


def stats() -> dict[str, int]:
    """The store's counters as this process sees them."""
    return _state["storage"]._store.stats()


def close() -> None:
    """An orderly detach."""
    _state["storage"].close()


def write_and_read_for(*, seconds: float, keys: list[str], shards: list[str], seed: int) -> dict[str, int]:
    """Store and read random runs of shared keys as fast as it goes; counts of pages by outcome.

    `shards`: contents that a page may have; its writers differ.
    """
    random = np.random.default_rng(seed)
    counts = {"written": 0, "good": 0, "missed": 0, "WRONG": 0}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        begin = int(random.integers(0, len(keys) - 8))
        run = keys[begin : begin + 8]
        counts["written"] += sum(write(keys=run))
        outcomes = read(keys=run)
        for other in shards:
            if "WRONG" in outcomes and other != _state["shard"]:
                again = _compare(run, other)
                outcomes = [b if a == "WRONG" and b == "good" else a for a, b in zip(outcomes, again, strict=True)]
        for outcome in outcomes:
            counts[outcome] += 1
    return counts


def _compare(keys: list[str], shard: str) -> list[str]:
    """What is in host memory now, held against another shard's contents."""
    own, _state["shard"] = _state["shard"], shard
    try:
        size = _page(0).numel()
        return ["good" if torch.equal(_page(page), _content(key, size)) else "WRONG" for page, key in enumerate(keys)]
    finally:
        _state["shard"] = own


def read_for(*, seconds: float, keys: list[str], seed: int) -> dict[str, int]:
    """Read random runs of keys as fast as it goes; counts of pages by outcome."""
    random = np.random.default_rng(seed)
    counts = {"good": 0, "missed": 0, "WRONG": 0}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        begin = int(random.integers(0, len(keys) - 8))
        for outcome in read(keys=keys[begin : begin + 8]):
            counts[outcome] += 1
    return counts


def start_writing(*, keys: list[str]) -> None:
    """Write in a thread until the process dies."""

    def forever():
        while True:
            for begin in range(0, len(keys), 16):
                write(keys=keys[begin : begin + 16])

    threading.Thread(target=forever, daemon=True).start()


# ---- a tree and its controller, ranks joined by gloo ----------------------------------------------------------------


def join(*, rendezvous: str, rank: int, size: int) -> None:
    """Join the world of one server."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)


def common_name(*, what: str) -> str:
    """A name that all ranks of the world share."""
    from sglang_tardis.sglang import ranks

    return ranks.common_name(what)


def attach_together(*, fails: bool) -> str:
    """The agreement of ranks around an attach whose body fails here or not."""
    from types import SimpleNamespace

    import torch.distributed as dist
    from sglang_tardis.sglang import ranks

    controller = SimpleNamespace(attn_cp_group=None, attn_tp_group=dist.group.WORLD, tp_group=None, pp_group=None)
    try:
        with ranks.together(controller):
            if fails:
                raise OSError("no room for the index")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "attached"


def open_tree(*, folder: str, model: str, mla: bool, rank: int, size: int, shard: str, **options: Any) -> None:
    """SGLang's tree, controller and storage threads for one TP rank."""
    _state["tree"] = TreeServer(Path(folder), Path(model), mla=mla, tp=(rank, size), shard=shard, layers=2, **options)


def prefill(*, tokens: list[int]) -> tuple[int, ...]:
    """One prompt; every cached byte is compared. Returns where its tokens came from."""
    return tuple(_state["tree"].prefill(tokens))


def flush() -> None:
    """SGLang's /flush_cache."""
    _state["tree"].flush()


def break_storage(
    *,
    exists_at_most: int | None = None,
    get_at_most: int | None = None,
    get_raises: bool = False,
    set_fails: bool = False,
) -> None:
    """Make this rank's backend answer worse than it could; without arguments, heal it."""
    storage = _state["tree"].storage
    for name in ("batch_exists", "batch_get_v1", "batch_set_v1"):
        storage.__dict__.pop(name, None)
    query, get = storage.batch_exists, storage.batch_get_v1
    if exists_at_most is not None:
        storage.batch_exists = lambda keys, extra_info=None: min(query(keys, extra_info), exists_at_most)
    if get_at_most is not None:

        def get_some(keys, host_indices, extra_info=None):
            time.sleep(0.2)
            ok = get(keys, host_indices, extra_info)
            return ok[:get_at_most] + [False] * (len(ok) - get_at_most)

        storage.batch_get_v1 = get_some
    if get_raises:
        storage.batch_get_v1 = lambda *_: 1 / 0
    if set_fails:
        storage.batch_set_v1 = lambda keys, *_: [False] * len(keys)


def tree_writes() -> int:
    """Pages that this rank has written to the store."""
    return _state["tree"].storage._store.stats()["set_pages_written"]


def attach_tree(**extra: Any) -> tuple[bool, str]:
    """Attach storage to a server that runs."""
    return _state["tree"].attach(**extra)


def detach_tree() -> None:
    """Detach storage."""
    ok, message = _state["tree"].cache.detach_storage_backend()
    assert ok, message


def close_tree() -> None:
    """An orderly shutdown."""
    _state.pop("tree").close()
