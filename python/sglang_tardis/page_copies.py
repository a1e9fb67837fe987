# SPDX-License-Identifier: Apache-2.0
"""Copies of pages out of KV pools, to objects `[layer][K,V]` in host memory."""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from sglang_tardis import loads_abi
from sglang_tardis.gpu_transfers import GpuTransfers
from sglang_tardis.host_memory import HostMemory
from sglang_tardis.kv_pools import KvPools, PageLayout

__all__ = ["Copy", "GpuPageCopies", "HostPageCopies", "PageCopies"]

_RING_WORDS = 1 << 16  # addresses of pages that are on their way
_CALL_PAGES = 1024  # of one launch: what lower classes start should be short
_OFFLOAD_CTAS = 1


class Copy(Protocol):
    """One copy, begun."""

    def is_done(self) -> bool:
        """Whether its bytes are there; waits for nothing."""

    def wait(self) -> bool:
        """Return when its bytes are there, or will not be; whether they are. Not under the GIL."""


class PageCopies(Protocol):
    """Who copies."""

    def begin(self, ids: torch.Tensor, addresses: npt.NDArray[np.uint64], ready: list[torch.cuda.Event]) -> Copy | None:
        """Copy pages; they must not change until it is done.

        Args:
            ids: int32 `[n]`, pages of the pools, on their device.
            addresses: (n,) uint64, objects.
            ready: what the copy waits for, besides the current stream.

        Returns:
            None: too many are on their way, and nothing was begun.
        """

    def close(self) -> None:
        """Every copy is done."""


class _Done:
    """A copy that the call itself made."""

    def is_done(self) -> bool:
        return True

    def wait(self) -> bool:
        return True


class HostPageCopies:
    """Of pools in this process's memory, by the calling thread."""

    def __init__(self, pools: KvPools, layout: PageLayout) -> None:
        self._layout = layout
        self._pages = pools.pages
        sides = [(pools.keys, layout.key_bytes, 0)]
        if pools.values is not None:
            sides.append((pools.values, layout.value_bytes, layout.key_bytes))
        self._parts = [
            (buffer.data_ptr(), page_bytes, layout.layer_offset(layer) + offset)
            for side, page_bytes, offset in sides
            for layer, buffer in enumerate(side)
        ]

    def begin(self, ids: torch.Tensor, addresses: npt.NDArray[np.uint64], ready: list[torch.cuda.Event]) -> Copy:
        """See `PageCopies`."""
        for page, address in zip(ids.tolist(), addresses.tolist(), strict=True):
            if not 0 <= page < self._pages:
                raise ValueError(f"a copy of pages: expected pages below {self._pages}, found {page}")
            for base, page_bytes, offset in self._parts:
                ctypes.memmove(address + offset, base + page * page_bytes, page_bytes)
        return _Done()

    def close(self) -> None:
        """Nothing to wait for."""


class _GpuCopy:
    """A copy on the offload stream."""

    def __init__(self, event: torch.cuda.Event, errors: np.ndarray, ring_begin: int, keep: object) -> None:
        self.event, self._errors, self.ring_begin, self._keep = event, errors, ring_begin, keep
        self._good: bool | None = None

    def is_done(self) -> bool:
        return self.event.query()

    def wait(self) -> bool:
        self.event.synchronize()
        if self._good is None:
            self._good = int(self._errors[0]) == 0  # else ids outside of the pools
            self._keep = None
        return self._good

    @property
    def over(self) -> bool:
        """Nobody looks at its words of the ring any more."""
        return self._good is not None


class GpuPageCopies:
    """Of pools of a GPU, by its movers, on the stream of lowest priority. The host waits for nothing."""

    def __init__(self, transfers: GpuTransfers, pools: KvPools) -> None:
        self._transfers = transfers
        with torch.cuda.device(transfers.device):
            work = transfers.work(min(_CALL_PAGES, pools.pages), digests=False)
        self._call = loads_abi.GpuOffload(
            pools=transfers.pools, work=work, ctas=_OFFLOAD_CTAS, traffic=transfers.offload_traffic()
        )
        self._memory = HostMemory(8 * _RING_WORDS, pinned=True)
        self._words = self._memory.array(0, np.uint64, _RING_WORDS)
        self._begun: deque[_GpuCopy] = deque()
        self._end = 0  # words ever taken

    def begin(self, ids: torch.Tensor, addresses: npt.NDArray[np.uint64], ready: list[torch.cuda.Event]) -> Copy | None:
        """See `PageCopies`."""
        while self._begun and self._begun[0].over:
            self._begun.popleft()
        n = len(addresses)
        at = self._end % _RING_WORDS
        start = self._end if at + n + 1 <= _RING_WORDS else self._end + _RING_WORDS - at
        oldest = self._begun[0].ring_begin if self._begun else start
        if n + 1 > _RING_WORDS or start + n + 1 - oldest > _RING_WORDS:
            return None
        at = start % _RING_WORDS
        errors, objects = self._words[at : at + 1], self._words[at + 1 : at + 1 + n]
        errors[0], objects[:] = 0, addresses
        stream, call = self._transfers.offload_stream, self._call
        call.errors = errors.ctypes.data
        try:
            stream.wait_stream(torch.cuda.current_stream(self._transfers.device))  # it made the ids
            for event in ready:
                stream.wait_event(event)
            for first in range(0, n, call.work.most_pages):
                call.pages = min(n - first, call.work.most_pages)
                call.ids, call.objects = ids.data_ptr() + 4 * first, objects.ctypes.data + 8 * first
                self._transfers.enqueue_offload(call)
            done = torch.cuda.Event(blocking=True)
            done.record(stream)
        except BaseException:
            stream.synchronize()  # a part may have been enqueued, and writes to objects that the caller gives up
            raise
        copy = _GpuCopy(done, errors, start, ids)
        self._end = start + n + 1
        self._begun.append(copy)
        return copy

    def close(self) -> None:
        """Every copy is done."""
        self._transfers.offload_stream.synchronize()
        self._memory.close()
