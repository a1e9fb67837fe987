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
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from sglang_tardis.bridge.keys import block_hashes
from sglang_tardis.bridge.pieces import PieceLayout
from sglang_tardis.config import load_config
from sglang_tardis.direct_door import DirectDoor, DoorOptions, LoadBatch, QueuedLoad
from sglang_tardis.kv_pools import KvPools
from sglang_tardis.layer_counter import LayerCounter
from sglang_tardis.log import FolderLog, RateLimitedLog, logger
from sglang_tardis.metrics import LinkerMetrics, StoreMetrics
from sglang_tardis.sglang import device_pool, seams, weight_updates
from sglang_tardis.sglang.hashing import exercise_hashing
from sglang_tardis.sglang.identity import build_identity
from sglang_tardis.sglang.live_namespace import LiveNamespace
from sglang_tardis.sglang.pool_memory import PoolMemory
from sglang_tardis.sglang.ranks import rank_of, refuse_unsupported
from sglang_tardis.sglang.server_settings import ServerSettings
from sglang_tardis.store import Namespace, Store
from sglang_tardis.write_behind import Offload

__all__ = ["TardisLinker"]

_MOST_REFUSED = 4096  # requests that are not offered hits again
_MOST_THREADS = 12
_FEW_TOKENS = 512  # of a batch: computing them hides little


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
        self._steps: list[Callable[[], None]] = []  # of close, the last first
        self._door: DirectDoor | None = None
        self._log = RateLimitedLog()
        self._folder_log = FolderLog()
        self._refused: collections.OrderedDict[str, None] = collections.OrderedDict()
        self._queued: dict[str, QueuedLoad] = {}
        self._batches: dict[int, tuple[list[str], LoadBatch]] = {}
        self._new_tokens = 0  # of the batch whose loads start next
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
        self._alone = max(storage.tp_size, storage.attn_cp_size) == 1  # nobody else answers for the same request
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
        self._steps.append(self._store.close)
        self._live = LiveNamespace(self._store, identity, pieces, settings)
        live = weight_updates.current()
        if live is not None:
            self._live.follow(live)
        options = self._door_options(settings, size_gb, ratio)
        self._door = DirectDoor(
            self._store, self._any_namespace(pieces), self._pools, self._layout, options, self.forward_stream
        )
        self._steps.append(self._door.close)
        if self._on_gpu:
            self._tell_store_of_memory()
        self.layer_done_counter = LayerCounter(self._layout.layers)
        self._metrics = (StoreMetrics(), LinkerMetrics()) if params.enable_metrics else None
        if self._metrics is not None:
            self._metrics[0].set_path(self._store.path_report(), pieces.tag)
        weight_updates.register(self)
        atexit.register(self.close)
        self._say_start()

    def _door_options(self, settings: ServerSettings, size_gb: Any, ratio: Any) -> DoorOptions:
        config = self._config
        ranks = max(1, int(settings.get("tp_size", 1) or 1))
        threads = min(_MOST_THREADS, max(1, (os.cpu_count() or 1) * 3 // (4 * ranks))) if self._on_gpu else 1
        threads = config.controller_threads or threads
        dram = config.dram_bytes
        if dram == 0:
            dram = device_pool.dram_bytes(self._pools.pages * self._layout.object_bytes, size_gb, ratio)
        self._check_host_memory(dram)
        return DoorOptions(
            dram=dram,
            write_behind=config.write_behind_bytes,
            threads=threads,
            queues=config.controller_queues or min(_MOST_THREADS, threads),
            deadline_ms=config.load_deadline_ms,
            writes=self._rank.writes,
            rings=config.placement != "layers" or not config.more_paths,
        )

    def _any_namespace(self, pieces: PieceLayout) -> Namespace:
        """One of the pages' geometry, also while that of the weights in use is not known."""
        identity = self._live.identity
        return self._live.current() or self._store.namespace(
            identity.fingerprint(), identity.description(), pieces.object_layout()
        )

    def _tell_store_of_memory(self) -> None:
        """The tier is what the store writes from: see `PoolMemory`."""
        door = self._door
        memory = PoolMemory(self._store, _Buffers(door.tier.memory.tensor()))

        def release() -> None:
            door.behind.drain()  # nothing is written from it any more
            memory.release()

        self._steps.append(release)

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
            self._door.tier.memory.size / 2**30,
            self._door.tier.slots,
            self._layout.object_bytes,
            "pinned" if self._on_gpu else "not pinned: no GPU",
            "the GPU" if self._on_gpu else "a host thread: no GPU",
            self._door.session.rings,
            self._door.session.threads,
            report.get("engine"),
            "on" if report.get("direct_io") else "off",
            "" if self._config.verify_reads else "; VERIFICATION OF READS IS OFF",
        )
        self._folder_log.look(self._store, stats)

    def follow_weights(self, live: weight_updates.LiveWeights) -> None:
        """Move to the namespace of new weights, or serve and keep nothing while they are unknown."""
        self._live.follow(live)

    def end_transfers(self) -> None:
        """Return when nothing reads or writes the pools any more: their memory is to be released."""
        if not self._closed:
            self._quiesce()
            self._door.wait_for_copies()

    def reset(self) -> None:
        """Wait for every transfer, and empty the DRAM tier. What is stored stays."""
        if self._closed:
            return
        self._quiesce()
        self._door.reset()
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
            self._steps.append(self._quiesce)
        self._closed = True
        for step in reversed(self._steps):  # whatever became of those before
            try:
                step()
            except Exception:
                logger.exception("tardis: closing the direct door failed")

    # ---- queries ---------------------------------------------------------------------------------------------------

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """Every number of leading pages that can be restored, from the tier and the store together; where no other rank
        answers, the largest alone. No I/O.
        """
        try:
            namespace = None if self._closed or rid in self._refused else self._live.current()
            keys = _kv(transfers).keys
            if namespace is None or not keys:
                return []
            run = self._door.find_run(namespace, block_hashes(keys))
            # SGLang takes the longest that all ranks name, and spends 2 us on each that one names.
            return list(range(run if self._alone else 1, run + 1)) if run else []
        except Exception:
            self._failed("lookup")
            return []

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
        try:
            self._door.put_in_order(transfer.device_indices)  # the request takes its slots from here afterwards
            namespace = None if self._closed else self._live.current()
            queued = self._door.queue(namespace, block_hashes(transfer.keys), transfer.device_indices)
        except Exception:
            self._failed("load")
            queued = self._door.queue(None, block_hashes([]), transfer.device_indices)
        self._queued[rid] = queued
        return True

    def expect_tokens(self, count: int) -> None:
        """The batch whose loads start next computes so many tokens. Not part of SGLang's interface."""
        self._new_tokens = count

    def cancel_queued_load(self, rid: str) -> bool:
        """Forget a load that has not started."""
        queued = self._queued.pop(rid, None)
        if queued is None:
            return False
        self._door.cancel(queued)
        return True

    def start_layer_wise_loading(self) -> int:
        """Start what is queued; the index of the batch, or -1."""
        if not self._queued:
            return -1
        queued, self._queued = self._queued, {}
        try:
            namespace = None if self._closed else self._live.current()
        except Exception:  # the batch has failed, and gives back what its loads hold
            namespace = None
            self._failed("load")
        hides, self._new_tokens = self._new_tokens > _FEW_TOKENS, 0
        batch = self._door.start(namespace, list(queued.values()), hides=hides)
        index = self.layer_done_counter.add(batch)
        self._batches[index] = (list(queued), batch)
        return index

    def is_finished(self, counter_index: int) -> bool:
        """Whether :meth:`finish_layer_wise_loading` would not wait for layers."""
        rids_and_batch = self._batches.get(counter_index)
        return rids_and_batch is None or rids_and_batch[1].is_done()

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait until the batch writes to device memory no more; whether every byte of it is right."""
        rids, batch = self._batches.pop(counter_index, ([], None))
        if batch is None:
            return True
        try:
            good = batch.finish()
        except Exception:
            good = False
            self._failed("load")
        self.layer_done_counter.remove(counter_index)
        if not good:
            self.counts["failed_loads"] += len(rids)
            for rid in rids:
                self.refuse_rid(rid)
            self._log.warning("load", "tardis: a load of %d requests failed; they are computed", len(rids))
        return good

    # ---- offloads --------------------------------------------------------------------------------------------------

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Keep pages: copy them to the tier now, and store them behind. Always True, on every rank alike."""
        try:
            transfer = _kv(transfers)
            namespace = None if self._closed else self._live.current()
            self._door.offload(
                namespace, block_hashes(transfer.keys), transfer.device_indices, self.record_offload_ready
            )
        except Exception:
            self._failed("offload")
            self._door.behind.submit(Offload(False))
        return True

    def num_completed_offloads(self) -> int:
        """Offloads whose pages may change; asked at every step of the scheduler."""
        if not self._closed and self._metrics is not None and self._metrics[0].due():
            self._publish()
        return self._door.behind.num_completed()

    def pop_completed_offload(self) -> bool:
        """The oldest one's result: whether all its pages are kept."""
        return self._door.behind.pop()

    def drain(self) -> None:
        """Return when everything that was offloaded is stored as far as it can be, and durable. For tests and tools."""
        self._door.behind.drain()
        self._store.flush()

    # ---- statistics ------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, int]:
        """Counters of this door: pages and loads by what became of them, and what is in use now."""
        return {**self.counts, **self._door.state()}

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
