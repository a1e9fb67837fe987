# SPDX-License-Identifier: Apache-2.0
"""Gio sessions: queue pairs of a software NVMe controller over memory, a file or a store, which a GPU drives, or a host
thread (docs/torch-ops.md). The ops of `sglang_tardis.gpu` name a session by its `handle`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from sglang_tardis import gio_abi, loads_abi
from sglang_tardis.kv_pools import PageLayout

if TYPE_CHECKING:
    from sglang_tardis.store import Store

__all__ = ["GioSession", "LayerReport", "RingReport", "find_session"]

_PAGE_BYTES = 4096
_MOST_SLOT_BYTES = 2 << 20
_DIGESTED_BYTES = 16 << 10
_MOST_INT32, _MOST_WORD = (1 << 31) - 1, (1 << 32) - 1
_MOST_OFFSET = (1 << 63) - 1
_SPIN_US = 1_000  # a controller's thread that may rest does so after it: layers of a load come faster
_MOST_REST_US = 10_000
_FLAGS = ("pending", "done", "error")
_ENDS = ("none", "done", "refused", "failed", "timed out", "not sent", "damaged")
_ERRORS = ("none", "commands", "deadline", "queue fault", "queue down", "too many")

_handles = itertools.count(1)
_sessions: weakref.WeakValueDictionary[int, GioSession] = weakref.WeakValueDictionary()  # an op can name it by int only


def find_session(handle: int) -> GioSession:
    """The open session of that handle.

    Raises:
        GioError: it is closed, or never was.
    """
    session = _sessions.get(handle)
    if session is None or session.closed:
        raise gio_abi.GioError(f"session {handle}: expected the handle of an open GioSession, found none", "closed")
    return session


@dataclasses.dataclass(frozen=True)
class RingReport:
    """How one queue pair ended (cpp/gio/iocb.h: RingReport); the numbers are of commands."""

    error: str
    fault: int
    done: int
    refused: int
    failed: int
    timed_out: int
    not_sent: int
    doorbells: int
    damaged: int


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """What became of the last transfer of a layer.

    Attributes:
        flag: "pending", "done" or "error".
        ends: per command, in page order: "done", "refused", "failed", "timed out", "not sent", "damaged".
        nvme_status: per command, the controller's status field (uint16), 0 unless "failed".
        rings: per queue pair.
        commands_per_page: how many of `ends` follow each other for one page.
    """

    flag: str
    ends: tuple[str, ...]
    nvme_status: npt.NDArray[np.uint16]
    rings: tuple[RingReport, ...]
    commands_per_page: int

    @property
    def pages_done(self) -> list[bool]:
        """Per page, whether all of its commands are done."""
        step = self.commands_per_page
        return [all(end == "done" for end in self.ends[i : i + step]) for i in range(0, len(self.ends), step)]

    @property
    def needs_renew(self) -> bool:
        """Whether a queue pair is of no use until `GioSession.renew`."""
        return any(ring.error in ("deadline", "queue fault", "queue down") for ring in self.rings)


def _name(names: tuple[str, ...], value: int) -> str:
    return names[value] if value < len(names) else f"unknown {value}"


def _close(
    core: gio_abi.Core,
    session: ctypes.c_void_p,
    memory: torch.Tensor,
    store: Store | None,
    lock: threading.Lock,
    process: int,
) -> None:
    """The controller's threads use `memory` and `store` until this returns; whoever is amid a transfer has `lock`, also
    at the end of the process. A child of a fork has neither the threads, for which it would wait, nor whoever has the
    lock.
    """
    if os.getpid() != process:
        return
    with lock:
        core.library.tardis_gio_close(session)
    del memory, store


def _expect_to_fit(most: int, **numbers: int) -> None:
    for name, number in numbers.items():
        if not 0 <= number <= most:  # ctypes would take its lower bits
            raise ValueError(f"GioSession: expected {name} of 0 to {most}, found {number}")


class GioSession:
    """Queue pairs and the working memory of transfers; a context manager.

    A software controller is on the other side, whose threads look for commands without a pause: `threads` cores of the
    host are busy while the session is open, unless `rest_us` lets them sleep. The ops of one session run one after the
    other: on a GPU the caller puts them on one stream, or orders their streams by events. Not thread-safe but for
    transfers on the CPU, which wait for each other.

    Args:
        layout: what a page is.
        bytes: of the drive, whole pages of 4096.
        file: where its bytes are kept, made if there is none; None: memory, zeroed.
        store: instead of both, an open store, whose data files are a read-only drive. Objects of it are told by their
            first blocks, and their layers are that far apart only if K and V of a page are whole blocks of the store.
            Closed after the session.
        threads: of the controller.
        queues: 1 to 16; on a GPU at most 12 for each of `ctas`.
        entries: of each queue's rings.
        commands: in flight at most, of a queue; 0: entries - 1.
        bounce_bytes: most of all bounce slots together, where `commands` is 0: fewer are in flight then, but at least
            two of each queue. 0: no limit.
        slot_bytes: most bytes of a command, whole pages of 4096; 0: K and V of a page, or 2 MiB if they are more.
        device: "cpu", or a CUDA device.
        deadline_ms: of each transfer, at most 15,000.
        ctas: SMs that a transfer takes on a GPU, 1 to 4.
        rest_us: threads of the controller that have found no command for a millisecond sleep between looks, for at most
            so many us (at most 10,000), which the first command after a pause may wait. 0: never.

    Attributes:
        handle: names the session to ops, and keeps nothing alive: hold the object as long as graphs that use it.
        flags: int32 `[layers]` on the device: 0 pending, 1 done, 2 error; for ops, if the caller has none of their own.
        host_calls: calls into the libraries by ops of this session. A replay of a graph makes none.
        most_pages: of one op.

    Raises:
        ValueError: options that make no sense.
        GioError: the controller, its file or the device refused; `GpuLibraryMissingError` without libtardis_gpu.so.
    """

    def __init__(
        self,
        layout: PageLayout,
        *,
        bytes: int = 0,
        file: str | os.PathLike[str] | None = None,
        store: Store | None = None,
        threads: int = 1,
        queues: int = 1,
        entries: int = 64,
        commands: int = 0,
        bounce_bytes: int = 0,
        slot_bytes: int = 0,
        device: str | torch.device = "cpu",
        deadline_ms: int = 2000,
        ctas: int = 4,
        rest_us: int = 0,
    ) -> None:
        _expect_to_fit(_MOST_OFFSET, bytes=bytes, bounce_bytes=bounce_bytes)
        _expect_to_fit(_MOST_REST_US, rest_us=rest_us)
        _expect_to_fit(
            _MOST_WORD, threads=threads, queues=queues, entries=entries, commands=commands, slot_bytes=slot_bytes
        )
        self.layout = layout
        self.device = _resolve(device)
        self.handle = next(_handles)
        self.host_calls = 0
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._call = gio_abi.Layer()
        self.deadline_ms = deadline_ms
        if not 1 <= ctas <= 4:
            raise ValueError(f"GioSession: expected 1 to 4 ctas, found {ctas}")
        if self.device.type == "cuda" and queues > 12 * ctas:
            raise ValueError(f"GioSession: expected at most 12 queues for each of {ctas} ctas, found {queues}")
        if slot_bytes == 0:
            slot_bytes = min(-(-layout.layer_bytes // _PAGE_BYTES) * _PAGE_BYTES, _MOST_SLOT_BYTES)
        self._store = store
        if store is not None and (bytes != 0 or file is not None):
            raise ValueError("GioSession: expected neither bytes nor a file where there is a store, found them")
        # Ids are int32, and no negative one is a slot. Slots of a store are where `blocks` says.
        self.slots = _MOST_INT32 if store is not None else min(bytes // layout.object_bytes, _MOST_INT32)
        if self.slots == 0:
            raise ValueError(f"GioSession: expected room for an object of {layout.object_bytes} bytes, found {bytes}")
        if commands == 0 and bounce_bytes != 0 and queues * slot_bytes != 0:
            commands = min(max(2, bounce_bytes // (queues * slot_bytes)), max(1, entries - 1))
        self.most_bytes = min(slot_bytes, layout.layer_bytes) // layout.block_bytes * layout.block_bytes
        if self.most_bytes < layout.layer_bytes and self.most_bytes > _DIGESTED_BYTES:
            self.most_bytes = self.most_bytes // _DIGESTED_BYTES * _DIGESTED_BYTES  # a command begins with a digest
        if self.most_bytes == 0:
            raise ValueError(f"GioSession: expected slots of a block of {layout.block_bytes} bytes, found {slot_bytes}")
        self.commands_per_page = -(-layout.layer_bytes // self.most_bytes)
        self._core = gio_abi.core()
        self._gpu = gio_abi.gpu() if self.device.type == "cuda" else None
        self.most_pages = self._core.sizes.most_contexts // self.commands_per_page
        if self.most_pages == 0:
            raise ValueError(
                f"GioSession: expected a page of at most {self._core.sizes.most_contexts} commands in a layer, found "
                f"{self.commands_per_page} of {self.most_bytes} bytes; use larger slot_bytes, or smaller pages"
            )
        self._options = gio_abi.Options(
            bytes=bytes,
            file=os.fsencode(file) if file is not None else None,
            block_bytes=layout.block_bytes,
            controller_threads=threads,
            queues=queues,
            entries=entries,
            commands=commands,
            slot_bytes=slot_bytes,
        )
        self._commands = commands or entries - 1
        self._usable = False
        self._session = self._open()
        self._expects = True
        self._core.call("tardis_gio_rest", self._session, _SPIN_US, rest_us)
        self._make_memory(min(ctas, queues))
        self._start_queues()
        _sessions[self.handle] = self

    # ---- life
    def expect(self, commands: bool) -> None:
        """Whether transfers may begin, as at first. While they may not, the controller's threads sleep, and look only
        now and then.
        """
        if commands != self._expects:
            self._core.library.tardis_gio_expect(self._session, int(commands))
            self._expects = commands

    def _open(self) -> ctypes.c_void_p:
        core = self._core if self._store is None else loads_abi.core()
        size_of = "tardis_gio_memory_bytes" if self._store is None else "tardis_gio_store_memory_bytes"
        bytes = getattr(core.library, size_of)(ctypes.byref(self._options))
        pinned = self._gpu is not None
        # Where options make no sense open says why; the memory must have some address for that.
        whole = torch.zeros(bytes + _PAGE_BYTES, dtype=torch.uint8, pin_memory=pinned)
        memory = whole[-whole.data_ptr() % _PAGE_BYTES :]
        session = ctypes.c_void_p()
        try:
            options, place = ctypes.byref(self._options), (memory.data_ptr(), ctypes.byref(session))
            if self._store is None:
                core.call("tardis_gio_open", options, *place)
            else:
                core.call("tardis_gio_open_store", options, self._store.handle, *place)
        except gio_abi.GioError as error:
            if error.code == "invalid_argument":
                raise ValueError(str(error)) from error
            raise
        self._end = weakref.finalize(self, _close, self._core, session, whole, self._store, self._lock, self._process)
        return session

    def _make_memory(self, ctas: int) -> None:
        """Everything that ops work in, so that none of them allocates; and the struct they fill in."""
        sizes, queues, layers = self._core.sizes, self._options.queues, self.layout.layers
        on_device = {"device": self.device}
        for_host = {"pin_memory": self._gpu is not None}
        self.flags = torch.zeros(layers, dtype=torch.int32, **on_device)
        self._state = torch.zeros(queues * sizes.state, dtype=torch.uint8, **on_device)
        self._uses = torch.zeros(queues * self._commands, dtype=torch.int16, **on_device)
        self._contexts = torch.zeros(sizes.most_contexts * sizes.context, dtype=torch.uint8, **on_device)
        self._ended = torch.zeros(1, dtype=torch.int32, **on_device)
        self._counts = torch.zeros(layers, dtype=torch.int32, **on_device)
        self._statuses = torch.zeros((layers, sizes.most_contexts), dtype=torch.int32, **for_host)
        self._reports = torch.zeros((layers, queues, sizes.report // 4), dtype=torch.int32, **for_host)
        self._queues = np.zeros(queues * sizes.queue, dtype=np.uint8)
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None
        self._work: torch.Tensor | None = None
        call = self._call
        call.blocks_per_slot, call.block_bytes = self.layout.object_blocks, self.layout.block_bytes
        call.most_bytes = self.most_bytes
        call.contexts, call.ended = self._contexts.data_ptr(), self._ended.data_ptr()
        call.queues, call.rings, call.ctas = self._queues.ctypes.data, queues, ctas
        call.page_bytes[:] = call.page_stride[:] = (self.layout.key_bytes, self.layout.value_bytes)

    def _start_queues(self, stream: torch.cuda.Stream | None = None) -> None:
        """`stream`: where the GPU's part is enqueued and waited for; None: the current one, and the whole device."""
        if self._gpu is None:
            self._grant_queues()
            self._core.call("tardis_gio_host_start", self._queues.ctypes.data, self._options.queues)
            if self._work is None:
                work = self._core.library.tardis_gio_host_work_bytes(self._queues.ctypes.data, self._options.queues)
                self._work = torch.zeros(work + 64, dtype=torch.uint8)
                self._call.work = -(-self._work.data_ptr() // 64) * 64
        else:
            with torch.cuda.device(self.device), torch.cuda.stream(stream):
                self._grant_queues()
                self._gpu.call("tardis_gpu_load")
                ours = torch.cuda.current_stream()  # behind the tables and zeros above
                self._gpu.call(
                    "tardis_gpu_gio_start_queues", self._queues.ctypes.data, self._options.queues, ours.cuda_stream
                )
                if stream is None:
                    torch.cuda.synchronize()
                else:
                    stream.synchronize()
        self._usable = True

    def _grant_queues(self) -> None:
        self._ended.zero_()
        prp, sgl = ctypes.c_void_p(), ctypes.c_void_p()
        prp_bytes, sgl_bytes = ctypes.c_size_t(), ctypes.c_size_t()
        self._core.call(
            "tardis_gio_tables",
            self._session,
            *(ctypes.byref(x) for x in (prp, prp_bytes, sgl, sgl_bytes)),
        )
        tables = tuple(
            torch.frombuffer(bytearray(ctypes.string_at(at, size.value)), dtype=torch.uint8)
            for at, size in ((prp, prp_bytes), (sgl, sgl_bytes))
        )
        if self._tables is None:
            self._tables = tuple(torch.zeros_like(table, device=self.device) for table in tables)
        for mine, table in zip(self._tables, tables, strict=True):
            mine.copy_(table)
        before = self._queues.tobytes()
        self._core.call(
            "tardis_gio_queues",
            self._session,
            self._state.data_ptr(),
            self._uses.data_ptr(),
            self._tables[0].data_ptr(),
            self._tables[1].data_ptr(),
            self._queues.ctypes.data,
        )
        if any(before) and before != self._queues.tobytes():
            raise gio_abi.GioError("renew: expected the queue pairs at their places, found others; close the session")

    @property
    def deadline_ms(self) -> int:
        """Of each transfer from its start to its end, 1 to 15,000; a graph keeps what it was when it was captured."""
        return self._call.deadline_ns // 1_000_000

    @deadline_ms.setter
    def deadline_ms(self, milliseconds: int) -> None:
        if not 1 <= milliseconds <= 15_000:
            raise ValueError(f"GioSession: expected deadline_ms of 1 to 15000, found {milliseconds}")
        self._call.deadline_ns = milliseconds * 1_000_000

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._end.alive

    def close(self) -> None:
        """Stop the controller and free its memory, behind a transfer that runs on the CPU; again does nothing.

        No kernel may use the session any more, and no graph that was captured with it may run again: this waits for
        nothing on a device.
        """
        _sessions.pop(self.handle, None)
        self._end()
        if os.getpid() == self._process:
            with self._lock:
                pass  # another thread may be closing it

    def __enter__(self) -> GioSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def renew(self, stream: torch.cuda.Stream | None = None) -> None:
        """Make the queue pairs anew, after a transfer whose report says `needs_renew`.

        Waits for the device. What was in flight has ended afterwards; graphs captured before stay valid.

        Args:
            stream: wait for this one alone, on which what is to be done is enqueued. Only where no kernel uses the
                session, or will until this has returned.

        Raises:
            GioError: the controller could not do it. The session refuses transfers until it could.
        """
        if self.device.type == "cuda" and stream is None:
            torch.cuda.synchronize(self.device)
        with self._lock:
            self._open_or_raise("renew")
            self._usable = False
            self._core.call("tardis_gio_renew", self._session)
            self._start_queues(stream)

    # ---- by the host
    def read(self, offset: int, memory: torch.Tensor) -> None:
        """Read `memory` (contiguous, in host memory, whole blocks) from byte `offset` of the drive."""
        self._host_transfer("tardis_gio_read", offset, memory)

    def write(self, offset: int, memory: torch.Tensor) -> None:
        """Write `memory` (contiguous, in host memory, whole blocks) at byte `offset` of the drive."""
        self._host_transfer("tardis_gio_write", offset, memory)

    def flush(self) -> None:
        """What was written is on the medium afterwards."""
        self._open_or_raise("flush")
        self._core.call("tardis_gio_flush", self._session)

    def report(self) -> str:
        """One line: the controller and its queues."""
        self._open_or_raise("report")
        return self._core.text("tardis_gio_report", self._session)

    def layer_report(self, layer: int, flags: torch.Tensor | None = None) -> LayerReport:
        """What became of the last transfer of a layer. Waits for the device; never called by an op.

        Args:
            layer: which.
            flags: those that the op was given; None: the session's own.
        """
        self._open_or_raise("layer_report")
        self._check_layer(layer)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        flag = int((self.flags if flags is None else flags)[layer].item())
        words = self._reports[layer].numpy().view(np.uint32)
        rings = tuple(RingReport(_name(_ERRORS, int(ring[0])), *(int(word) for word in ring[1:9])) for ring in words)
        contexts = int(self._counts[layer].item())
        if contexts > self._core.sizes.most_contexts:
            contexts = 0  # too many: none was looked at
        raw = self._statuses[layer, :contexts].numpy().view(np.uint32)
        return LayerReport(
            flag=_name(_FLAGS, flag),
            ends=tuple(_name(_ENDS, int(end)) for end in raw >> 16 & 0xFF),
            nvme_status=(raw & 0x7FFF).astype(np.uint16),
            rings=rings,
            commands_per_page=self.commands_per_page,
        )

    # ---- for loads
    @property
    def rings(self) -> int:
        """How many queue pairs."""
        return self._options.queues

    @property
    def commands(self) -> int:
        """How many are in flight at most, of each queue pair."""
        return self._commands

    @property
    def threads(self) -> int:
        """Of the controller."""
        return self._options.controller_threads

    def load_template(self, page_count: int) -> gio_abi.Layer:
        """What is the same for each layer of loads into pools of `page_count` pages (tardis/loads.h)."""
        template = gio_abi.Layer.from_buffer_copy(self._call)
        template.op, template.pool_page_count = gio_abi.READ, page_count
        template.context_count = self._counts.data_ptr()
        return template

    # ---- for the ops
    @contextmanager
    def transfer(self, layer: int) -> Iterator[gio_abi.Layer]:
        """The struct of a transfer of `layer`, but for what the caller's tensors say."""
        self._check_layer(layer)
        with self._lock:
            if self.closed or not self._usable:
                raise gio_abi.GioError(
                    f"session {self.handle}: expected one that is open, and renewed without an error since it was last",
                    "closed",
                )
            call = self._call
            call.first_block = self.layout.layer_block(layer)
            call.context_count = self._counts.data_ptr() + 4 * layer
            call.statuses = self._statuses.data_ptr() + 4 * layer * self._statuses.shape[1]
            call.reports = self._reports.data_ptr() + 4 * layer * self._reports[0].numel()
            yield call

    def _host_transfer(self, function: str, offset: int, memory: torch.Tensor) -> None:
        self._open_or_raise(function)
        _expect_to_fit(_MOST_OFFSET, offset=offset)
        if memory.device.type != "cpu" or not memory.is_contiguous():
            raise ValueError(
                f"{function}: expected a contiguous tensor in host memory, found one on {memory.device} with strides "
                f"{memory.stride()}"
            )
        size = memory.numel() * memory.element_size()
        self._core.call(function, self._session, offset, memory.data_ptr(), size)

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.layout.layers:
            raise ValueError(f"layer: expected 0 to {self.layout.layers - 1}, found {layer}")

    def _open_or_raise(self, what: str) -> None:
        if self.closed:
            raise gio_abi.GioError(f"{what}: expected an open session, found session {self.handle} closed", "closed")


def _resolve(device: str | torch.device) -> torch.device:
    found = torch.device(device)
    if found.type == "cpu":
        return torch.device("cpu")
    if found.type != "cuda":
        raise NotImplementedError(f"GioSession: expected device 'cpu' or 'cuda', found {found}")
    if not torch.cuda.is_available():
        raise gio_abi.GioError("GioSession: expected a CUDA device, found none; use device='cpu'", "cuda")
    return torch.device("cuda", found.index if found.index is not None else torch.cuda.current_device())
