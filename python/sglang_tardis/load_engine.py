# SPDX-License-Identifier: Apache-2.0
"""Loads: objects of a store and of the pinned tier to pages of KV pools, layer by layer (docs/loads.md).

A load goes through a board in host memory. A thread of the library takes the lease, fills the board with places and
digests, and reads again what rings could not; a GPU's stream, or another thread of the library on CPU tensors, runs
the layers. Python's part is one call at the start and one at the end. Loads of one engine run in the order in which
they were begun; all calls come from one thread.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from sglang_tardis import loads_abi
from sglang_tardis.gio_abi import GioError, Layer
from sglang_tardis.gio_session import GioSession
from sglang_tardis.gpu_transfers import GpuTransfers
from sglang_tardis.host_memory import HostMemory
from sglang_tardis.kv_pools import KvPools
from sglang_tardis.log import RateLimitedLog, logger
from sglang_tardis.page_runs import page_runs
from sglang_tardis.store import HashArray, Namespace, Store

__all__ = ["Load", "LoadEngine", "LoadPages"]

_STAGING_BYTES = 32 << 20  # of a load: parts that the host reads again
_LEAST_REPAIRS = 16
_PAGE_BYTES = 4096
_PATIENCE_NS = 10_000_000_000  # beyond twice the deadline of a ring: what a loader's thread may take
_LOAD_CTAS = 4
_MOST_COPIES = 960  # of a load, by copy engines: beyond about 1,000 the host waits for them


class LoadPages(NamedTuple):
    """What a load moves: pages of the pools, and what they get.

    Attributes:
        pinned_ids: int32 `[n]` on the pools' device.
        pinned_addresses: (n,) uint64, of objects `[layer][K,V]` that stay where they are until the load has ended.
        file_ids: int32 `[m]` on the pools' device.
        file_hashes: (m, 32) uint8.
        hides: whether there is compute that the load shall run beside. A GPU's copy engines would hold it up: what a
            forward copies to the device first, from 32 KiB of pinned memory on, waits behind all of their work.
    """

    pinned_ids: torch.Tensor
    pinned_addresses: npt.NDArray[np.uint64]
    file_ids: torch.Tensor
    file_hashes: HashArray
    hides: bool = False


class _Board:
    """Host memory of one load at a time, where a GPU sees it, too."""

    def __init__(self, memory: HostMemory, offset: int, layout: loads_abi.BoardLayout, layers: int, most: int) -> None:
        self.address = memory.address + offset
        self.head = loads_abi.Board.from_address(self.address)
        self.done = memory.array(offset + layout.done, np.uint32, layers)
        self._words = memory.array(offset, np.uint8, layout.list)
        self._reports = memory.array(offset + layout.reports, np.uint8, layout.bytes - layout.reports)
        self.objects = memory.array(offset + layout.bytes, np.uint64, most)

    def clear(self) -> None:
        # The arrays between are written before they are read; but rings that do not run, of a load that fails, report
        # nothing, and are asked all the same.
        self._words[:] = self._reports[:] = 0


class _Runner(Protocol):
    """Who runs the layers."""

    def begin(self, load: Load, pages: LoadPages) -> None: ...
    def wait_layer(self, load: Load, layer: int) -> None: ...
    def is_done(self, load: Load) -> bool: ...
    def wait(self, load: Load) -> None: ...


class Load:
    """One load, from `LoadEngine.begin` to `finish`."""

    def __init__(self, engine: LoadEngine, board: _Board, number: int) -> None:
        self._engine = engine
        self.board = board
        self.number = number  # of the board
        self.handle: ctypes.c_void_p | None = None  # of the library's part: pages from files
        self.keep: object = None
        self.good: bool | None = None  # when it has ended

    def wait_layer(self, layer: int) -> None:
        """What follows (on CUDA: on the current stream) sees the layer's bytes, if the load turns out good."""
        if self.good is None:
            self._engine.runner.wait_layer(self, layer)

    def is_done(self) -> bool:
        """Whether `finish` would not wait for layers."""
        return self.good is not None or self._engine.runner.is_done(self)

    def finish(self) -> bool:
        """Wait until nothing is written to the pools any more; whether every byte is there. Again: the same answer."""
        if self.good is None:
            self._engine.finish(self)
        return bool(self.good)


class LoadEngine:
    """Loads into one server's pools.

    Args:
        store: where objects are read.
        space: their namespace; see `use_namespace`.
        pools: where they land.
        session: rings over the store's data files, whose controller reads for them.
        transfers: of the GPU; None: CPU tensors.
        rings: False: every page is read by the host (objects whose layers lie in several files).
        loads: boards: how many loads are under way at most before one waits for another, up to 16.
        copy_engine: whether copy engines of a GPU load pages from memory, where these are in long runs.
        seams: of the memory that those are in: see `HostMemory`.

    Attributes:
        copy_engine: may be changed.
        loads_by_copy_engine, loads_by_movers: those that a GPU has begun.
        copy_engine_runs: of the former: runs of pages.
        most_file_pages, most_pinned_pages: of one load.
        sound: whether pages can be loaded from files now: not while queue pairs are made anew.
        renewals: how often they were.
    """

    def __init__(
        self,
        store: Store,
        space: Namespace,
        pools: KvPools,
        session: GioSession,
        *,
        transfers: GpuTransfers | None = None,
        rings: bool = True,
        loads: int = 8,
        copy_engine: bool = True,
        seams: Sequence[int] = (),
    ) -> None:
        self._store, self._session, self._pools, self._layout = store, session, pools, session.layout
        self._rings = rings
        self._transfers = transfers
        self._core = loads_abi.core()
        self._space = space
        self._renewal: threading.Thread | None = None
        self._needs_renewal = self._lost = False
        self._log = RateLimitedLog()
        self.renewals = self.loads_by_copy_engine = self.loads_by_movers = self.copy_engine_runs = 0
        self.copy_engine = copy_engine
        self.seams = seams
        part = -(-self._layout.layer_bytes // _PAGE_BYTES) * _PAGE_BYTES
        most = session.most_pages
        self.shape = loads_abi.LoadShape(
            layers=self._layout.layers,
            chunks=self._layout.digests,
            most_pages=most,
            most_repairs=min(most, max(_LEAST_REPAIRS, _STAGING_BYTES // part)),
            commands_per_page=session.commands_per_page,
            rings=session.rings,
        )
        self.most_pinned_pages = most
        self.most_file_pages = most if rings else self.shape.most_repairs
        self.board_layout = loads_abi.BoardLayout()
        self._core.call("tardis_load_board_layout_of", ctypes.byref(self.shape), ctypes.byref(self.board_layout))
        each = -(-(self.board_layout.bytes + 8 * most) // _PAGE_BYTES) * _PAGE_BYTES
        pinned = transfers is not None
        self._board_memory = HostMemory(each * loads, pinned=pinned)
        self._staging = HostMemory(loads * self.shape.most_repairs * part, pinned=pinned)
        self._boards = [
            _Board(self._board_memory, each * i, self.board_layout, self._layout.layers, most) for i in range(loads)
        ]
        self._free = list(range(loads))
        self._active: deque[Load] = deque()
        self._loader = ctypes.c_void_p()
        self._part_stride = 0
        self._open_loader(space)
        session.expect(False)
        template = session.load_template(pools.pages)
        if transfers is None:
            self.runner: _Runner = _HostRunner(self, pools, template)
        else:
            self.runner = _GpuRunner(self, transfers, template, self._part_stride, loads)

    # ---- namespaces
    def use_namespace(self, space: Namespace) -> None:
        """Load objects of this namespace from now on. Loads under way are waited for."""
        if space.handle == self._space.handle:
            return
        self.quiesce()
        before = self._loader
        self._open_loader(space)  # first: where it fails, the engine goes on with the one it has
        self._core.library.tardis_loader_close(before)

    def _open_loader(self, space: Namespace) -> None:
        lease, found, layout = ctypes.c_void_p(), ctypes.c_size_t(), loads_abi.LeaseLayout()
        none = (ctypes.c_uint8 * 32)()
        self._core.call(
            "tardis_lease_acquire",
            self._store.handle,
            space.handle,
            ctypes.addressof(none),
            0,
            ctypes.byref(lease),
            ctypes.byref(found),
        )
        try:
            self._core.call("tardis_lease_layout_of", lease, ctypes.byref(layout))
        finally:
            self._core.library.tardis_lease_end(lease)
        options = loads_abi.LoaderOptions(
            shape=self.shape,
            name_space=space.handle,
            block_bytes=self._layout.block_bytes,
            loads=len(self._boards),
            staging=self._staging.address,
            staging_bytes=self._staging.size,
        )
        loader = ctypes.c_void_p()
        self._core.call("tardis_loader_open", self._store.handle, ctypes.byref(options), ctypes.byref(loader))
        self._loader, self._space, self._part_stride = loader, space, layout.part_stride

    # ---- loads
    @property
    def sound(self) -> bool:
        """Whether pages can be loaded from files now."""
        return not self._needs_renewal and not self._lost

    @property
    def under_way(self) -> int:
        """Loads that have begun and not ended."""
        return len(self._active)

    def begin(self, pages: LoadPages) -> Load:
        """Begin to load pages, behind earlier loads. Waits for one of those only if every board is in use; on a GPU, if
        no page is from files, for the kernels that make `pinned_ids` as well.

        Raises:
            GioError: it cannot begin; nothing is under way, and nothing was written.
        """
        files = len(pages.file_hashes)
        if len(pages.pinned_addresses) > self.most_pinned_pages or files > self.most_file_pages:
            raise GioError(
                f"a load: expected at most {self.most_pinned_pages} pages from memory and {self.most_file_pages} from "
                f"files, found {len(pages.pinned_addresses)} and {files}",
                "invalid_argument",
            )
        while not self._free:
            self._active[0].finish()
        if files and not self.sound:  # only now: a load that has just ended may have said so
            raise GioError("a load: expected queue pairs of use, found them being made anew", "busy")
        number = self._free.pop()
        if files:
            self._session.expect(True)
        load = Load(self, self._boards[number], number)
        load.board.clear()
        try:
            if files:
                load.handle = ctypes.c_void_p()
                self._core.call(
                    "tardis_load_begin",
                    self._loader,
                    pages.file_hashes.ctypes.data,
                    files,
                    int(self._rings),
                    load.board.address,
                    ctypes.byref(load.handle),
                )
            self.runner.begin(load, pages)
        except BaseException:
            try:
                if self._transfers is not None:  # a part may have been enqueued, and waits for the library's thread
                    self._transfers.load_stream.synchronize()
            finally:
                if load.handle:
                    self._core.call("tardis_load_end", load.handle, 1, ctypes.byref(loads_abi.LoadResult()))
            self._free.append(number)
            self._expect_commands()
            raise
        self._active.append(load)
        return load

    def finish(self, load: Load) -> None:
        """See `Load.finish`."""
        load.good = waited = good = False  # whatever is raised below
        try:
            self.runner.wait(load)
            waited = True
            good = load.board.head.errors == 0 and load.board.head.abandoned == 0
        finally:
            try:
                if load.handle is not None:  # in any case, or its thread would look after it for ever
                    result = loads_abi.LoadResult()
                    self._core.call("tardis_load_end", load.handle, int(not waited), ctypes.byref(result))
                    good = good and result.good == 1
                    self._needs_renewal = self._needs_renewal or result.renew == 1
            finally:
                load.keep = load.handle = None
                self._active.remove(load)
                self._free.append(load.number)
                uses_rings = self._expect_commands()
        load.good = good
        if self._needs_renewal and not self._lost and not uses_rings and self._renewal is None:
            self._start_renewal()

    def _expect_commands(self) -> bool:
        """Whether a load under way reads from files; if none does, the controller's threads sleep."""
        uses_rings = any(load.handle is not None for load in self._active)
        if not uses_rings:
            self._session.expect(False)
        return uses_rings

    def _start_renewal(self) -> None:
        renewal = threading.Thread(target=self._renew, name="tardis-renew", daemon=True)
        self._renewal = renewal
        try:
            renewal.start()
        except RuntimeError:  # no thread can be started now: after the next load, perhaps
            self._renewal = None
            self._log.warning("renew", "tardis: queue pairs are not made anew yet", exc_info=True)

    def _renew(self) -> None:
        """No load uses the queue pairs, or will until they are sound again. Loads from memory go on."""
        try:
            stream = torch.cuda.Stream(self._pools.device) if self._transfers is not None else None
            self._session.renew(stream)
            self.renewals += 1
            self._needs_renewal = False
            self._log.warning("renew", "tardis: queue pairs that had failed were made anew")
        except Exception:
            self._lost = True
            logger.exception(
                "tardis: queue pairs could not be made anew; pages are loaded from memory only from now on"
            )
        finally:
            self._renewal = None

    def counters(self) -> dict[str, int]:
        """Fields of tardis_loader_counters, since the namespace was last changed."""
        counters = loads_abi.LoaderCounters()
        self._core.library.tardis_loader_get_counters(self._loader, ctypes.byref(counters))
        return {name: getattr(counters, name) for name, _ in counters._fields_}

    def quiesce(self) -> None:
        """Finish every load that is under way, and what follows from it."""
        while self._active:
            try:
                self._active[0].finish()
            except Exception:  # it has ended all the same, and the others are to
                logger.exception("tardis: a load could not be waited for")
        renewal = self._renewal
        if renewal is not None:
            renewal.join()

    def close(self) -> None:
        """Quiesce and release everything but store, session and pools. Again does nothing."""
        if not self._loader:
            return
        self.quiesce()
        loader, self._loader = self._loader, ctypes.c_void_p()
        self._core.library.tardis_loader_close(loader)
        self._board_memory.close()
        self._staging.close()

    @property
    def loader(self) -> ctypes.c_void_p:
        """The tardis_loader."""
        return self._loader


class _HostRunner:
    """The layers by a thread of the library, where pools are memory of this process."""

    def __init__(self, engine: LoadEngine, pools: KvPools, template: Layer) -> None:
        self._engine, self._template = engine, template
        self._core = loads_abi.core()
        self._last = engine.shape.layers - 1
        sides = [side for side in (pools.keys, pools.values) if side is not None]
        self._layers = [np.array([buffer.data_ptr() for buffer in side], np.uint64) for side in sides]
        self._page_bytes = (pools.key_bytes, pools.value_bytes)
        self._pages = pools.pages

    def begin(self, load: Load, pages: LoadPages) -> None:
        pinned, files = len(pages.pinned_addresses), len(pages.file_hashes)
        pinned_ids, file_ids = pages.pinned_ids.contiguous(), pages.file_ids.contiguous()
        load.board.objects[:pinned] = pages.pinned_addresses
        ring = None
        run = loads_abi.HostLoad(pool_page_count=self._pages, pinned_pages=pinned)
        if files:
            ring = Layer.from_buffer_copy(self._template)
            ring.pool_pages = file_ids.data_ptr()
            run.ring = ctypes.pointer(ring)
        for half, addresses in enumerate(self._layers):
            run.layers[half] = addresses.ctypes.data
        run.page_bytes[:] = self._page_bytes
        if pinned:
            run.pinned_ids, run.pinned_objects = pinned_ids.data_ptr(), load.board.objects.ctypes.data
        load.keep = (pages, pinned_ids, file_ids, ring, run)
        self._core.call("tardis_load_run", self._engine.loader, load.handle, load.board.address, ctypes.byref(run))

    def wait_layer(self, load: Load, layer: int) -> None:
        self._core.call("tardis_load_wait", self._engine.loader, load.board.address, layer)

    def is_done(self, load: Load) -> bool:
        return load.board.done[self._last] != loads_abi.PENDING

    def wait(self, load: Load) -> None:
        self.wait_layer(load, self._last)


class _GpuRunner:
    """The layers by a stream; each layer's last byte has an event behind it."""

    def __init__(
        self, engine: LoadEngine, transfers: GpuTransfers, template: Layer, part_stride: int, loads: int
    ) -> None:
        layers, most = engine.shape.layers, engine.shape.most_pages
        self._engine, self._transfers, self._last = engine, transfers, layers - 1
        self._template = template
        self._slots = torch.arange(most, dtype=torch.int32, device=transfers.device)
        self._events = [[torch.cuda.Event() for _ in range(layers)] for _ in range(loads)]
        with torch.cuda.device(transfers.device):
            for event in (event for events in self._events for event in events):
                event.record(transfers.load_stream)  # there is a cudaEvent_t from the first record on
            transfers.load_stream.synchronize()
            torch.cuda.current_stream().synchronize()  # the slots
        self._event_arrays = [
            (ctypes.c_void_p * layers)(*(event.cuda_event for event in events)) for events in self._events
        ]
        self._call = loads_abi.GpuLoad(
            pools=transfers.pools,
            work=transfers.work(most, digests=True),
            slots=self._slots.data_ptr(),
            layer_blocks=part_stride // template.block_bytes,
            layout=engine.board_layout,
            shape=engine.shape,
            patience_ns=2 * template.deadline_ns + _PATIENCE_NS,
            traffic=transfers.load_traffic(),
            ctas=_LOAD_CTAS,
        )
        sides = 1 if transfers.layout.value_bytes == 0 else 2
        self._most_runs = _MOST_COPIES // (layers * sides)
        self._runs_call = loads_abi.GpuLoadRuns(
            pools=transfers.pools,
            object_stride=transfers.layout.object_bytes,
            link=transfers.link,
            link_class=loads_abi.LINK_RESTORE,
        )

    def begin(self, load: Load, pages: LoadPages) -> None:
        # Copy engines take no SM and more of the link, but commands for each run; movers need no runs. Pages from files
        # are moved layer by layer behind those from memory, in one call with them.
        only_memory = len(pages.pinned_addresses) > 0 and len(pages.file_hashes) == 0
        wanted = self._engine.copy_engine and only_memory and not pages.hides
        if wanted and self._begin_runs(load, pages):
            self._engine.loads_by_copy_engine += 1
        else:
            self._begin_movers(load, pages)
            self._engine.loads_by_movers += 1

    def _begin_runs(self, load: Load, pages: LoadPages) -> bool:
        """False: there are too many runs, and nothing is under way."""
        call = self._runs_call
        ids = pages.pinned_ids.cpu().numpy()  # waits for the kernels of the current stream that make them
        runs = page_runs(ids, pages.pinned_addresses, call.object_stride, self._engine.seams)
        if len(runs) > self._most_runs:
            return False
        self._engine.copy_engine_runs += len(runs)
        call.runs, call.run_count = runs.ctypes.data, len(runs)
        call.events = ctypes.addressof(self._event_arrays[load.number])
        load.keep = pages
        self._transfers.enqueue_runs(call)
        return True

    def _begin_movers(self, load: Load, pages: LoadPages) -> None:
        pinned, files = len(pages.pinned_addresses), len(pages.file_hashes)
        pinned_ids, file_ids = pages.pinned_ids.contiguous(), pages.file_ids.contiguous()
        load.board.objects[:pinned] = pages.pinned_addresses
        call = self._call
        call.pinned_ids = pinned_ids.data_ptr() if pinned else None
        call.pinned_objects = load.board.objects.ctypes.data if pinned else None
        call.file_ids = file_ids.data_ptr() if files else None
        call.ring = ctypes.pointer(self._template) if files else None
        call.pinned_pages, call.file_pages = pinned, files
        call.board = load.board.address
        call.events = ctypes.addressof(self._event_arrays[load.number])
        load.keep = (pages, pinned_ids, file_ids)  # the stream reads them
        self._transfers.enqueue_load(call)

    def wait_layer(self, load: Load, layer: int) -> None:
        torch.cuda.current_stream(self._transfers.device).wait_event(self._events[load.number][layer])

    def is_done(self, load: Load) -> bool:
        return self._events[load.number][self._last].query()

    def wait(self, load: Load) -> None:
        self._events[load.number][self._last].synchronize()
