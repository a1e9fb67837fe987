# SPDX-License-Identifier: Apache-2.0
"""The direct door without SGLang: pages of a pool <-> pinned memory and the files of a store (docs/direct.md).

What `sglang.linker` translates SGLang's calls into. All calls come from one thread, the scheduler's; none does I/O, and
none waits but `LoadBatch.finish`, `reset` and `close`; on a GPU `start`, for the kernels of the current stream.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sglang_tardis.gio_session import GioSession
from sglang_tardis.gpu_transfers import GpuTransfers
from sglang_tardis.intervals import HostInterval, Interval, StreamInterval
from sglang_tardis.kv_pools import KvPools, PageLayout
from sglang_tardis.load_engine import Load, LoadEngine, LoadPages
from sglang_tardis.loads_abi import ABORT
from sglang_tardis.log import logger
from sglang_tardis.offload_plan import OffloadPlan, plan_offload
from sglang_tardis.page_copies import GpuPageCopies, HostPageCopies, PageCopies
from sglang_tardis.pinned_tier import Pinned, PinnedTier
from sglang_tardis.store import HashArray, Namespace, Store
from sglang_tardis.write_behind import Offload, WriteBehind

__all__ = ["DirectDoor", "DoorOptions", "LoadBatch", "QueuedLoad"]

_LOADS = 8
_MANY_SLOTS = 1 << 16
_BOUNCE_BYTES = 32 << 20  # of all queue pairs: beyond it they leave the host's caches before a GPU has read them
_REST_US = 200  # forwards need the cores between loads


class DoorOptions(NamedTuple):
    """Settings.

    Attributes:
        dram: bytes of the pinned tier.
        write_behind: bytes of it that may wait to be stored; 0: half.
        threads: of the software controller.
        queues: pairs of it.
        deadline_ms: of a layer's read.
        writes: whether this rank stores pages, or another one the same bytes.
        rings: False: parts of objects lie in several files, and the host reads them.
        copy_engine: False: movers alone load pages from memory, for comparisons.
    """

    dram: int
    write_behind: int = 0
    threads: int = 1
    queues: int = 1
    deadline_ms: int = 5_000
    writes: bool = True
    rings: bool = True
    copy_engine: bool = True


class QueuedLoad(NamedTuple):
    """A load that has not started.

    Attributes:
        namespace: None: it cannot.
        hashes: (n, 32) uint8.
        indices: int64 `[n * page_tokens]`, token slots of the pools.
        pinned: those that are in the tier, pinned.
    """

    namespace: Namespace | None
    hashes: HashArray
    indices: torch.Tensor
    pinned: Pinned | None


class LoadBatch:
    """Loads that start together; a source of `LayerCounter`."""

    def __init__(self, door: DirectDoor, slots: list[npt.NDArray[np.uint32]]) -> None:
        self._door = door
        self._slots = slots
        self.loads: list[Load] = []
        self.failed = False
        self._waited: tuple[int, int] | None = None  # the stream, and the layer that it has waited for
        self.transfers: list[Interval] = []  # on the stream of loads
        self._waits: list[Interval] = []  # of the forward

    def wait_layer(self, layer: int) -> None:
        """See `LayerSource`. A stream that has waited for a layer has waited for those before it."""
        stream = self._door.current_stream()
        if self._waited is not None and self._waited[0] == stream and layer <= self._waited[1]:
            return
        wait = self._door.take_interval()
        wait.begin()
        for load in self.loads:
            load.wait_layer(layer)
        wait.end()
        self._waits.append(wait)
        self._waited = (stream, layer)

    def is_done(self) -> bool:
        """Whether `finish` would not wait for layers."""
        return all(load.is_done() for load in self.loads)

    def finish(self) -> bool:
        """Wait until nothing is written to the pools any more; whether every byte is right. Once."""
        for load in self.loads:  # each of them, whatever became of those before: the next ones still write
            try:
                self.failed = not load.finish() or self.failed
            except Exception:
                self.failed = True
                logger.exception("tardis: a load could not be ended")
        slots, self._slots = self._slots, []
        for each in slots:
            self._door.tier.unpin(each)
        self._count_times()
        return not self.failed

    def _count_times(self) -> None:
        for name, intervals in (("load_ns", self.transfers), ("layer_wait_ns", self._waits)):
            self._door.counts[name] += sum(interval.nanoseconds() for interval in intervals)
            self._door.give_back(intervals)
        self.transfers, self._waits = [], []


class DirectDoor:
    """Loads and offloads of one pool.

    Args:
        store: open; closed after the door.
        namespace: of the pages' geometry. Calls name the one in use.
        pools: on the CPU or a GPU.
        layout: of a page of them.
        options: see `DoorOptions`.
        forward_stream: where forwards run; loads wait for what is enqueued there.

    Attributes:
        counts: pages and loads by what became of them.
        tier, session, engine, behind: its parts.
    """

    def __init__(
        self,
        store: Store,
        namespace: Namespace,
        pools: KvPools,
        layout: PageLayout,
        options: DoorOptions,
        forward_stream: torch.cuda.Stream | None = None,
    ) -> None:
        self._pools, self._options, self._forward_stream = pools, options, forward_stream
        self.layout, self.page_tokens = layout, pools.page_tokens
        self.on_gpu = pools.device.type == "cuda"
        self.counts: collections.Counter[str] = collections.Counter()
        self._intervals: list[Interval] = []  # those not in use
        self._steps: list[Callable[[], None]] = []  # of close, the last first
        try:
            self._open(store, namespace)
        except BaseException:
            self.close()
            raise

    def _open(self, store: Store, namespace: Namespace) -> None:
        pools, layout, options = self._pools, self.layout, self._options
        self.tier = PinnedTier(options.dram, layout.object_bytes, pinned=self.on_gpu)
        self._steps.append(self.tier.close)
        self.session = GioSession(
            layout,
            store=store,
            threads=options.threads,
            queues=options.queues,
            bounce_bytes=_BOUNCE_BYTES,
            device=pools.device,
            deadline_ms=options.deadline_ms,
            rest_us=_REST_US,
        )
        self._steps.append(self.session.close)
        self._transfers = GpuTransfers(pools, layout) if self.on_gpu else None
        if self._transfers is not None:
            self._steps.append(self._transfers.close)
        self.engine = LoadEngine(
            store,
            namespace,
            pools,
            self.session,
            transfers=self._transfers,
            rings=options.rings,
            loads=_LOADS,
            copy_engine=options.copy_engine,
            seams=self.tier.memory.seams,
        )
        self._steps.append(self.engine.close)
        copies: PageCopies = HostPageCopies(pools, layout)
        if self._transfers is not None:
            copies = GpuPageCopies(self._transfers, pools)
        self._copies = copies
        self._steps.append(copies.close)
        regions = [0, layout.key_bytes] if layout.value_bytes else [0]
        offsets = [layout.layer_offset(layer) + at for layer in range(layout.layers) for at in regions]
        most = options.write_behind or self.tier.memory.size // 2
        self.behind = WriteBehind(self.tier, np.array(offsets, np.uint64), max(most, layout.object_bytes))
        self._steps.append(self.behind.close)
        if self.on_gpu:
            with torch.cuda.device(pools.device):
                self._warm_up()

    def _warm_up(self) -> None:
        """Load the kernels of torch that calls use: the first use of each would cost the scheduler tens of ms."""
        indices = torch.arange(4 * self.page_tokens, device=self._pools.device)
        ids = self._page_ids(torch.cat([indices[: self.page_tokens], indices[self.page_tokens :]]))
        _take(ids, np.array([0, 2]))
        for count in (len(indices), _MANY_SLOTS):  # sorted by other kernels
            self.put_in_order(torch.arange(count, device=self._pools.device))
        torch.cuda.Event(blocking=True).record()
        torch.cuda.current_stream(self._pools.device).synchronize()

    def current_stream(self) -> int:
        """The cudaStream_t that waits of this thread are enqueued on; 0 on the CPU."""
        return torch.cuda.current_stream(self._pools.device).cuda_stream if self.on_gpu else 0

    def take_interval(self) -> Interval:
        """For `give_back`: events are made once."""
        if self._intervals:
            return self._intervals.pop()
        return StreamInterval() if self.on_gpu else HostInterval()

    def give_back(self, intervals: Sequence[Interval]) -> None:
        """They measure nothing any more."""
        self._intervals += intervals

    def close(self) -> None:
        """End everything; what waits to be stored is stored. Every batch was finished. Again does nothing."""
        steps, self._steps = self._steps, []
        for step in reversed(steps):  # whatever became of those before
            try:
                step()
            except Exception:
                logger.exception("tardis: closing the direct door failed")

    def wait_for_copies(self) -> None:
        """Return when no offload reads the pools any more; storing goes on."""
        if self._transfers is not None:
            self._transfers.offload_stream.synchronize()

    def reset(self) -> None:
        """Wait for every offload, and empty the tier. What is stored stays. Every batch was finished."""
        self.behind.forget_results()
        self.tier.clear()

    def state(self) -> dict[str, int]:
        """Counters: pages and loads by what became of them, and what is in use now."""
        tier = {f"dram_{name}": value for name, value in self.tier.counters().items()}
        loader = {f"loader_{name}": value for name, value in self.engine.counters().items()}
        behind = {f"write_{name}": value for name, value in self.behind.state().items()}
        fields = ("renewals", "loads_by_copy_engine", "copy_engine_runs", "loads_by_movers")
        now = {"loads_under_way": self.engine.under_way, **{name: getattr(self.engine, name) for name in fields}}
        return {**self.counts, **tier, **loader, **behind, **now}

    # ---- queries and loads
    def find_run(self, namespace: Namespace, hashes: HashArray) -> int:
        """How many leading pages are in the store or the tier. No I/O."""
        files = self.engine.sound
        at, n, base = 0, len(hashes), 0
        there: npt.NDArray[np.bool_] | None = None
        while at < n:
            if files:
                at += namespace.lookup(hashes[at:])
                if at == n:
                    break
            if there is None:
                there, base = self.tier.find(namespace.handle, hashes[at:]), at
            rest = there[at - base :]
            run = len(rest) if rest.all() else int(np.argmin(rest))
            if run == 0:
                break
            at += run
        return at

    def queue(self, namespace: Namespace | None, hashes: HashArray, indices: torch.Tensor) -> QueuedLoad:
        """A load to be started or cancelled; what of it is in the tier stays there until then."""
        pinned = None if namespace is None else self.tier.pin(namespace.handle, hashes)
        return QueuedLoad(namespace, hashes, indices, pinned)

    @staticmethod
    def put_in_order(indices: torch.Tensor) -> None:
        """Sort token slots that were just allocated, before pages get them.

        An allocator's list is mixed more with every eviction; in the pool's own order pages are in the long runs that
        copy engines want.
        """
        indices.copy_(indices.sort().values)

    def cancel(self, load: QueuedLoad) -> None:
        """Forget it."""
        if load.pinned is not None:
            self.tier.unpin(load.pinned.slots)

    def start(self, namespace: Namespace | None, queued: Sequence[QueuedLoad], *, hides: bool = False) -> LoadBatch:
        """Start what was queued for one batch; what cannot be started shows at its end.

        Args:
            namespace: the one in use.
            queued: by `queue`.
            hides: see `LoadPages`.
        """
        batch = LoadBatch(self, [load.pinned.slots for load in queued if load.pinned is not None])
        try:
            if namespace is None or any(load.namespace is not namespace for load in queued):
                batch.failed = True
            else:
                self._begin(batch, namespace, queued, hides)
        except Exception:
            batch.failed = True
            logger.exception("tardis: a load could not be started")
        return batch

    def _begin(self, batch: LoadBatch, namespace: Namespace, queued: Sequence[QueuedLoad], hides: bool) -> None:
        self.engine.use_namespace(namespace)
        indices = [load.indices for load in queued]
        ids = self._page_ids(indices[0] if len(indices) == 1 else torch.cat(indices))
        there = np.concatenate([load.pinned.there for load in queued])
        addresses = np.concatenate([load.pinned.addresses for load in queued])
        hashes = np.concatenate([load.hashes for load in queued])
        pinned, files = np.flatnonzero(there), np.flatnonzero(~there)
        pinned_ids, file_ids = _take(ids, pinned), _take(ids, files)
        stream = None if self._transfers is None else self._transfers.load_stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self._pools.device))  # it makes the ids
            if self._forward_stream is not None:
                stream.wait_stream(self._forward_stream)  # slots that were free until now may still be read there
        transfer = self.take_interval() if stream is not None else None
        if transfer is not None:
            transfer.begin(stream)
        most_pinned, most_files = self.engine.most_pinned_pages, self.engine.most_file_pages
        for part in range(max(-(-len(pinned) // most_pinned), -(-len(files) // most_files))):
            a = slice(part * most_pinned, (part + 1) * most_pinned)
            b = slice(part * most_files, (part + 1) * most_files)
            from_files = np.ascontiguousarray(hashes[files[b]])
            pages = LoadPages(pinned_ids[a], addresses[a], file_ids[b], from_files, hides)
            batch.loads.append(self.engine.begin(pages))
        if transfer is not None:
            transfer.end(stream)
            batch.transfers.append(transfer)
        self.counts["loads"] += len(queued)
        self.counts["pages_from_memory"] += len(pinned)
        self.counts["pages_from_files"] += len(files)

    def _page_ids(self, indices: torch.Tensor) -> torch.Tensor:
        """int32 pages of token slots, on the pools' device; nothing waits for it."""
        first = indices[:: self.page_tokens]
        if not self.on_gpu:  # for nothing there
            rows = indices.view(-1, self.page_tokens)
            in_a_row = torch.equal(rows, first[:, None] + torch.arange(self.page_tokens))
            if not in_a_row or bool((first % self.page_tokens).any()):
                raise ValueError(f"token slots: expected aligned pages of {self.page_tokens} in a row, found others")
        return torch.div(first, self.page_tokens, rounding_mode="floor").to(self._pools.device, torch.int32)

    # ---- offloads
    def offload(
        self,
        namespace: Namespace | None,
        hashes: HashArray,
        indices: torch.Tensor,
        ready: Callable[[], list[torch.cuda.Event]],
    ) -> None:
        """Copy pages to the tier, and store them behind. The result comes in the order of the calls.

        Args:
            namespace: None: nothing is kept.
            hashes: (n, 32) uint8, pages in a row of a prompt.
            indices: int64 `[n * page_tokens]`, token slots; they must not change until the result is there.
            ready: events that the copy waits for on a GPU; called if there is one.
        """
        if namespace is None:
            self.behind.submit(Offload(False))
            return
        plan = plan_offload(self.tier, namespace, hashes, writes=self._options.writes, room=self.behind.room)
        copy = None
        try:
            if len(plan.positions):
                ids = _take(self._page_ids(indices), plan.positions)
                copy = self._copies.begin(ids, plan.addresses, ready() if self.on_gpu else [])
        except BaseException:
            self._give_up(plan)
            raise
        self.counts["pages_dropped_no_room"] += plan.no_room
        if copy is None and len(plan.positions):
            self.counts["pages_dropped_no_room"] += len(plan.positions) - plan.promoted
            self._give_up(plan)
            self.behind.submit(Offload(False))
            return
        self.counts["pages_in_memory_only"] += plan.not_stored
        self.counts["pages_offloaded"] += len(plan.positions)
        self.counts["pages_promoted"] += plan.promoted
        self.behind.submit(
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

    def _give_up(self, plan: OffloadPlan) -> None:
        self.tier.end(plan.filled, ABORT)
        self.tier.end(plan.kept, ABORT)
        self.tier.unpin(plan.pinned)


def _take(ids: torch.Tensor, positions: npt.NDArray[np.int64]) -> torch.Tensor:
    """Those at positions in ascending order: a view where they follow each other."""
    if len(positions) == 0:
        return ids[:0]
    first, last = int(positions[0]), int(positions[-1]) + 1
    if last - first == len(positions):
        return ids[first:last]
    return ids[torch.from_numpy(positions).to(ids.device, non_blocking=True)]
