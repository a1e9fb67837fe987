# SPDX-License-Identifier: Apache-2.0
"""SGLang's external linker ``TardisLinker``: SSD and DRAM <-> the device pool, layer by layer (docs/direct.md).

SGLang calls everything here from the scheduler's thread. No call does I/O; none waits but where SGLang says so
(``finish_layer_wise_loading``, ``reset``, ``close``). What goes wrong does not reach SGLang as an exception: a page
that cannot be found is a miss, one that cannot be kept is not, and a load that fails is computed again.
"""

from __future__ import annotations

import atexit
import collections
import os
from typing import Any, NamedTuple

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from sglang_tardis.bridge.keys import block_hashes
from sglang_tardis.config import load_config
from sglang_tardis.gio_session import GioSession
from sglang_tardis.gpu_transfers import GpuTransfers
from sglang_tardis.kv_pools import KvPools
from sglang_tardis.layer_counter import LayerCounter
from sglang_tardis.load_engine import Load, LoadEngine, LoadPages
from sglang_tardis.log import FolderLog, RateLimitedLog, logger
from sglang_tardis.metrics import LinkerMetrics, StoreMetrics
from sglang_tardis.offload_plan import plan_offload
from sglang_tardis.page_copies import GpuPageCopies, HostPageCopies, PageCopies
from sglang_tardis.pinned_tier import Pinned, PinnedTier
from sglang_tardis.sglang import device_pool, seams, weight_updates
from sglang_tardis.sglang.hashing import exercise_hashing
from sglang_tardis.sglang.identity import build_identity
from sglang_tardis.sglang.live_namespace import LiveNamespace
from sglang_tardis.sglang.pool_memory import PoolMemory
from sglang_tardis.sglang.ranks import rank_of, refuse_unsupported
from sglang_tardis.sglang.server_settings import ServerSettings
from sglang_tardis.store import HashArray, Namespace, Store
from sglang_tardis.write_behind import Offload, WriteBehind

__all__ = ["TardisLinker"]

_MOST_REFUSED = 4096  # requests that are not offered hits again
_MOST_THREADS = 12
_LOADS = 8


class _Queued(NamedTuple):
    """A load that has not started."""

    namespace: Namespace | None  # None: it cannot
    hashes: HashArray
    device_indices: torch.Tensor
    pinned: Pinned | None


class _Batch:
    """Loads that SGLang started together; a source of `LayerCounter`."""

    def __init__(self, rids: list[str]) -> None:
        self.rids = rids
        self.loads: list[Load] = []
        self.slots: list[np.ndarray] = []
        self.failed = False
        self._waited: tuple[int, int] | None = None  # the stream, and the layer that it has waited for

    def wait_layer(self, layer: int) -> None:
        """See `LayerSource`. A stream that has waited for a layer has waited for those before it."""
        stream = torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else 0
        if self._waited is not None and self._waited[0] == stream and layer <= self._waited[1]:
            return
        for load in self.loads:
            load.wait_layer(layer)
        self._waited = (stream, layer)


class TardisLinker(UnifiedCacheLinker):
    """The direct door, one per scheduler process.

    Chosen by ``--hicache-storage-backend tardis`` with ``"mode": "direct"``, or by SGLang's own flags of external
    linkers; the settings are those of :class:`sglang_tardis.config.TardisConfig`.

    Args:
        server_args: SGLang's.
        params: SGLang's CacheInitParams.
        components: of the tree.
        extra_config: settings.
        forward_stream: where forwards run; None on CPU tensors.

    Raises:
        NotImplementedError: this release does not support the set-up, by name.
        ConfigError, TardisError, GioError, IdentityError, SeamError, MemoryError: see their messages.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: dict[str, Any] | None = None,
        forward_stream: torch.cuda.Stream | None = None,
    ) -> None:
        self.forward_stream = forward_stream
        self._closed = False
        self._closers: list[Any] = []
        self._log = RateLimitedLog()
        self._folder_log = FolderLog()
        self._refused: collections.OrderedDict[str, None] = collections.OrderedDict()
        self._queued: dict[str, _Queued] = {}
        self._batches: dict[int, _Batch] = {}
        self.counts: collections.Counter[str] = collections.Counter()
        try:
            self._open(server_args, params, components, dict(extra_config or {}))
        except BaseException:
            self.close()
            raise

    # ---- life cycle -----------------------------------------------------------------------------------------------

    def _open(self, server_args: Any, params: Any, components: Any, extra: dict[str, Any]) -> None:
        settings = ServerSettings()
        size_gb = extra.pop("hicache_size", None) or settings.get("hicache_size", 0)
        ratio = extra.pop("hicache_ratio", None) or settings.get("hicache_ratio", 0)
        self._config = load_config(extra)
        seams.install_direct()
        seams.require("weight updates", "extra keys")
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        device_pool.refuse_unsupported_server(settings, params, components, pool)
        if getattr(server_args, "enable_linker_mla_dedup", False):
            raise NotImplementedError(
                "tardis, direct mode: expected that each rank loads its pages, found --enable-linker-mla-dedup; leave "
                "it out"
            )
        storage = device_pool.storage_config(pool, params, settings, extra)
        refuse_unsupported(storage, settings)
        self._rank = rank_of(storage)
        self._pools = KvPools.of(pool)
        self._layout = device_pool.page_layout(self._pools)
        self.page_size = self._pools.page_tokens
        self.pools = {PoolName.KV: self._pools}
        self._on_gpu = self._pools.device.type == "cuda"
        pieces = device_pool.piece_layout(self._layout)
        identity = build_identity(
            storage,
            pool,
            device_pool.host_shape(pool, self.page_size, self._layout),
            pieces,
            weights_revision=self._config.weights_revision,
            device_pool=pool,
            settings=settings,
        )
        exercise_hashing(self.page_size)

        self._store = Store(
            self._config.folder, self._config.store_options(object_bytes_hint=self._layout.object_bytes)
        )
        self._closers.append(self._store.close)
        self._live = LiveNamespace(self._store, identity, pieces, settings)
        live = weight_updates.current()
        if live is not None:
            self._live.follow(live)
        self._open_transfers(settings, size_gb, ratio)
        self.layer_done_counter = LayerCounter(self._layout.layers)
        self._metrics = (StoreMetrics(), LinkerMetrics()) if params.enable_metrics else None
        if self._metrics is not None:
            self._metrics[0].set_path(self._store.path_report(), pieces.tag)
        weight_updates.register(self)
        atexit.register(self.close)
        self._say_start()

    def _open_transfers(self, settings: ServerSettings, size_gb: Any, ratio: Any) -> None:
        """Everything that moves pages, from the outside in."""
        pools, layout, config = self._pools, self._layout, self._config
        ranks = max(1, int(settings.get("tp_size", 1) or 1))
        threads = config.controller_threads or min(_MOST_THREADS, max(1, (os.cpu_count() or 1) // (2 * ranks)))
        self._threads = threads if self._on_gpu or config.controller_threads else 1
        queues = config.controller_queues or min(_MOST_THREADS, self._threads)
        self._session = GioSession(
            layout,
            store=self._store,
            threads=self._threads,
            queues=queues,
            device=pools.device,
            deadline_ms=config.load_deadline_ms,
        )
        self._closers.append(self._session.close)
        transfers = None
        if self._on_gpu:
            transfers = GpuTransfers(pools, layout)
            self._closers.insert(0, transfers.close)
        self._transfers = transfers
        spread = config.placement == "layers" and bool(config.more_paths)
        self._engine = LoadEngine(
            self._store,
            self._live_or_placeholder(),
            pools,
            self._session,
            transfers=transfers,
            rings=not spread,
            loads=_LOADS,
        )
        self._closers.append(self._engine.close)
        dram = config.dram_bytes or device_pool.dram_bytes(pools.pages * layout.object_bytes, size_gb, ratio)
        self._check_host_memory(dram)
        self._tier = PinnedTier(dram, layout.object_bytes, pinned=self._on_gpu)
        self._closers.insert(0, self._tier.close)
        if self._on_gpu:
            memory = PoolMemory(self._store, _Buffers(self._tier.memory.tensor()))
            self._closers.insert(1, memory.release)
        copies: PageCopies = HostPageCopies(pools, layout)
        if transfers is not None:
            copies = GpuPageCopies(transfers, pools)
        self._copies = copies
        self._closers.append(copies.close)
        regions = [0, layout.key_bytes] if layout.value_bytes else [0]
        offsets = np.array(
            [layout.layer_offset(layer) + at for layer in range(layout.layers) for at in regions], np.uint64
        )
        most = config.write_behind_bytes or self._tier.memory.size // 2
        self._write_behind = WriteBehind(self._tier, offsets, max(most, layout.object_bytes))
        self._closers.append(self._write_behind.close)

    def _live_or_placeholder(self) -> Namespace:
        """A namespace for the engine's shape, also while that of the weights in use is not known."""
        identity, pieces = self._live.identity, device_pool.piece_layout(self._layout)
        return self._live.current() or self._store.namespace(
            identity.fingerprint(), identity.description(), pieces.object_layout()
        )

    def _check_host_memory(self, wanted: int) -> None:
        from sglang.srt.mem_cache.pool_host.base import host_memory_budget_bytes

        found = host_memory_budget_bytes(wanted)
        if wanted > found:
            raise MemoryError(
                f"tardis, direct mode: expected {wanted / 1e9:.2f} GB of host memory for the DRAM tier, found "
                f"{found / 1e9:.2f} GB that may be taken; set dram, --hicache-size or --hicache-ratio"
            )

    def _say_start(self) -> None:
        report, stats = self._store.path_report(), self._store.stats()
        logger.info(
            "tardis: direct mode, store %s, rank %s, capacity %.1f GiB, %d pages recovered, namespace %s; DRAM tier of "
            "%.2f GiB, %d pages of %d bytes, %s; pages from files by rings of %s: %d queue pairs of the software "
            "controller, whose %d host threads work for each command (engine %s, direct I/O %s)%s",
            " + ".join((self._config.folder, *self._config.more_paths)),
            self._rank,
            stats.get("capacity_bytes", 0) / 2**30,
            stats.get("recovered_pages", 0),
            self._live.identity.fingerprint().hex(),
            self._tier.memory.size / 2**30,
            self._tier.slots,
            self._layout.object_bytes,
            "pinned" if self._on_gpu else "not pinned: no GPU",
            "the GPU" if self._on_gpu else "a host thread: no GPU",
            self._session.rings,
            self._threads,
            report.get("engine"),
            "on" if report.get("direct_io") else "off",
            "" if self._config.verify_reads else "; VERIFICATION OF READS IS OFF",
        )
        self._folder_log.look(self._store, stats)

    def follow_weights(self, live: weight_updates.LiveWeights) -> None:
        """Move to the namespace of new weights, or serve and keep nothing while they are unknown."""
        self._live.follow(live)

    def reset(self) -> None:
        """Wait for every transfer, and empty the DRAM tier. What is stored stays."""
        if self._closed:
            return
        self._quiesce()
        self._write_behind.forget_results()
        self._tier.clear()
        self._refused.clear()

    def _quiesce(self) -> None:
        for rid in list(self._queued):
            self.cancel_queued_load(rid)
        for index in list(self._batches):
            self.finish_layer_wise_loading(index)
        self.layer_done_counter.set_consumer(-1)

    def close(self) -> None:
        """Wait for every transfer, make what was stored durable and release everything. Again does nothing."""
        if self._closed:
            return
        atexit.unregister(self.close)
        weight_updates.unregister(self)
        if hasattr(self, "layer_done_counter"):
            self._quiesce()
        self._closed = True
        for step in reversed(self._closers):  # whatever became of those before
            try:
                step()
            except Exception:
                logger.exception("tardis: closing the direct door failed")

    # ---- queries ---------------------------------------------------------------------------------------------------

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """Every number of leading pages that can be restored, from the tier and the store together. No I/O."""
        try:
            namespace = None if self._closed or rid in self._refused else self._live.current()
            keys = _kv(transfers).keys
            if namespace is None or not keys:
                return []
            return list(range(1, self._run(namespace, block_hashes(keys)) + 1))
        except Exception:
            self._failed("lookup")
            return []

    def _run(self, namespace: Namespace, hashes: HashArray) -> int:
        """Leading pages that are in the store or the tier."""
        files = self._engine.sound
        at, n, base = 0, len(hashes), 0
        there: np.ndarray | None = None
        while at < n:
            if files:
                at += namespace.lookup(hashes[at:])
                if at == n:
                    break
            if there is None:
                there, base = self._tier.find(namespace.handle, hashes[at:]), at
            rest = there[at - base :]
            run = len(rest) if rest.all() else int(np.argmin(rest))
            if run == 0:
                break
            at += run
        return at

    def refuse_rid(self, rid: str) -> None:
        """Offer this request no hits any more: a load for it has failed, and it is computed."""
        self._refused[rid] = None
        self._refused.move_to_end(rid)
        while len(self._refused) > _MOST_REFUSED:
            self._refused.popitem(last=False)

    # ---- loads -----------------------------------------------------------------------------------------------------

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Queue a load. Always True: what is wrong with it shows at its end, on every rank alike."""
        if rid in self._queued:
            raise RuntimeError(f"tardis: expected one load of request {rid} at a time, found another one queued")
        transfer = _kv(transfers)
        hashes = np.empty((0, 32), np.uint8)
        namespace = pinned = None
        try:
            namespace = None if self._closed else self._live.current()
            hashes = block_hashes(transfer.keys)
            if namespace is not None:
                pinned = self._tier.pin(namespace.handle, hashes)
        except Exception:
            self._failed("load")
            namespace = None
        self._queued[rid] = _Queued(namespace, hashes, transfer.device_indices, pinned)
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        """Forget a load that has not started."""
        queued = self._queued.pop(rid, None)
        if queued is None:
            return False
        if queued.pinned is not None:
            self._tier.unpin(queued.pinned.slots)
        return True

    def start_layer_wise_loading(self) -> int:
        """Start what is queued; the index of the batch, or -1."""
        if not self._queued:
            return -1
        queued, self._queued = self._queued, {}
        batch = _Batch(list(queued))
        try:
            batch.slots = [load.pinned.slots for load in queued.values() if load.pinned is not None]
            self._begin(batch, list(queued.values()))
        except Exception:
            batch.failed = True
            self._failed("load")
        index = self.layer_done_counter.add(batch)
        self._batches[index] = batch
        return index

    def _begin(self, batch: _Batch, queued: list[_Queued]) -> None:
        namespace = self._live.current()
        if namespace is None or any(load.namespace is not namespace for load in queued):
            batch.failed = True
            return
        self._engine.use_namespace(namespace)
        ids = self._page_ids(torch.cat([load.device_indices for load in queued]))
        there = np.concatenate([load.pinned.there for load in queued])
        addresses = np.concatenate([load.pinned.addresses for load in queued])
        hashes = np.concatenate([load.hashes for load in queued])
        if self._transfers is not None:
            stream = self._transfers.load_stream
            stream.wait_stream(torch.cuda.current_stream(self._pools.device))  # it makes the ids
            if self.forward_stream is not None:
                stream.wait_stream(self.forward_stream)  # slots that were free until now may still be read there
        pinned, files = np.flatnonzero(there), np.flatnonzero(~there)
        most_pinned, most_files = self._engine.most_pinned_pages, self._engine.most_file_pages
        for part in range(max(-(-len(pinned) // most_pinned), -(-len(files) // most_files))):
            a = slice(part * most_pinned, (part + 1) * most_pinned)
            b = slice(part * most_files, (part + 1) * most_files)
            pages = LoadPages(
                _take(ids, pinned[a]), addresses[a], _take(ids, files[b]), np.ascontiguousarray(hashes[files[b]])
            )
            batch.loads.append(self._engine.begin(pages))
        self.counts["loads"] += len(queued)
        self.counts["pages_from_memory"] += len(pinned)
        self.counts["pages_from_files"] += len(files)

    def _page_ids(self, indices: torch.Tensor) -> torch.Tensor:
        """int32 pages of token slots, on the pools' device; nothing waits for it."""
        first = indices[:: self.page_size]
        if not self._on_gpu:  # for nothing there
            rows = indices.view(-1, self.page_size)
            if not torch.equal(rows, first[:, None] + torch.arange(self.page_size)) or (first % self.page_size).any():
                raise ValueError(f"token slots: expected aligned pages of {self.page_size} in a row, found others")
        return torch.div(first, self.page_size, rounding_mode="floor").to(self._pools.device, torch.int32)

    def is_finished(self, counter_index: int) -> bool:
        """Whether :meth:`finish_layer_wise_loading` would not wait for layers."""
        batch = self._batches.get(counter_index)
        return batch is None or all(load.is_done() for load in batch.loads)

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait until the batch writes to device memory no more; whether every byte of it is right."""
        batch = self._batches.pop(counter_index, None)
        if batch is None:
            return True
        good = not batch.failed
        for load in batch.loads:
            try:
                good = load.finish() and good
            except Exception:
                good = False
                self._failed("load")
        self.layer_done_counter.remove(counter_index)
        for slots in batch.slots:
            self._tier.unpin(slots)
        if not good:
            self.counts["failed_loads"] += len(batch.rids)
            for rid in batch.rids:
                self.refuse_rid(rid)
            self._log.warning("load", "tardis: a load of %d requests failed; they are computed", len(batch.rids))
        return good

    # ---- offloads --------------------------------------------------------------------------------------------------

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Keep pages: copy them to the tier now, and store them behind. Always True, on every rank alike."""
        try:
            self._offload(_kv(transfers))
        except Exception:
            self._failed("offload")
            self._write_behind.submit(Offload(False))
        return True

    def _offload(self, transfer: PoolTransfer) -> None:
        namespace = self._live.current()
        if namespace is None:
            self._write_behind.submit(Offload(False))
            return
        hashes = block_hashes(transfer.keys)
        plan = plan_offload(self._tier, namespace, hashes, writes=self._rank.writes, room=self._write_behind.room)
        self.counts["pages_dropped_no_room"] += plan.no_room
        self.counts["pages_in_memory_only"] += plan.not_stored
        copy = None
        try:
            if len(plan.positions):
                ids = _take(self._page_ids(transfer.device_indices), plan.positions)
                ready = self.record_offload_ready() if self._on_gpu else []
                copy = self._copies.begin(ids, plan.addresses, ready)
        except BaseException:
            self._give_up(plan)
            raise
        if copy is None and len(plan.positions):
            self.counts["pages_dropped_no_room"] += len(plan.positions)
            self._give_up(plan)
            self._write_behind.submit(Offload(False))
            return
        self.counts["pages_offloaded"] += len(plan.positions)
        self.counts["pages_promoted"] += plan.promoted
        self._write_behind.submit(
            Offload(
                plan.whole,
                copy=copy,
                filled=plan.filled,
                kept=plan.kept,
                pinned=plan.pinned,
                runs=plan.runs,
                namespace=namespace,
            )
        )

    def _give_up(self, plan: Any) -> None:
        from sglang_tardis.loads_abi import ABORT

        self._tier.end(plan.filled, ABORT)
        self._tier.end(plan.kept, ABORT)
        self._tier.unpin(plan.pinned)

    def num_completed_offloads(self) -> int:
        """Offloads whose pages may change; asked at every step of the scheduler."""
        if self._metrics is not None and self._metrics[0].due():
            self._publish()
        return self._write_behind.num_completed()

    def pop_completed_offload(self) -> bool:
        """The oldest one's result: whether all its pages are kept."""
        return self._write_behind.pop()

    def drain(self) -> None:
        """Return when everything that was offloaded is stored as far as it can be, and durable. For tests and tools."""
        self._write_behind.drain()
        self._store.flush()

    # ---- statistics ------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, int]:
        """Counters of this door: pages and loads by what became of them, and what is in use now."""
        tier = {f"dram_{name}": value for name, value in self._tier.counters().items()}
        loader = {f"loader_{name}": value for name, value in self._engine.counters().items()}
        behind = {f"write_{name}": value for name, value in self._write_behind.state().items()}
        return {**self.counts, **tier, **loader, **behind, "loads_under_way": self._engine.under_way}

    def _publish(self) -> None:
        try:
            stats = self._store.stats()
            self._metrics[0].update(stats)
            self._metrics[1].update(self.state(), self._layout.object_bytes)
            self._folder_log.look(self._store, stats)
        except Exception:
            self._log.warning("stats", "tardis: statistics could not be collected", exc_info=True)

    def _failed(self, what: str) -> None:
        self.counts[f"failed_{what}_calls"] += 1
        self._log.warning(what, "tardis: a call failed (%s); it counts as a miss", what, exc_info=True)


class _Buffers(NamedTuple):
    """As a host pool shows its memory."""

    kv_buffer: torch.Tensor


def _kv(transfers: list[PoolTransfer]) -> PoolTransfer:
    if len(transfers) != 1 or transfers[0].name != PoolName.KV:
        raise ValueError(f"expected a transfer of KV alone, found {[str(transfer.name) for transfer in transfers]}")
    return transfers[0]


def _take(ids: torch.Tensor, positions: np.ndarray) -> torch.Tensor:
    """Those at positions in ascending order: a view where they follow each other."""
    if len(positions) == 0:
        return ids[:0]
    first, last = int(positions[0]), int(positions[-1]) + 1
    if last - first == len(positions):
        return ids[first:last]
    return ids[torch.from_numpy(positions).to(ids.device, non_blocking=True)]
