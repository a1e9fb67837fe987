# SPDX-License-Identifier: Apache-2.0
"""Host memory in one piece, of any size, which a GPU reads and writes in place if it is pinned."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

__all__ = ["HostMemory", "registered_step"]

_PAGE_BYTES = 4096
_HUGE_PAGE_BYTES = 2 << 20
_FAULT_THREADS = 16
_REGISTERED_BYTES = 64 << 30  # of a call: one of hundreds of GiB would be refused
_PORTABLE_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped
_DONT_FORK = getattr(mmap, "MADV_DONTFORK", 10)
_HUGE_PAGE = getattr(mmap, "MADV_HUGEPAGE", 14)


def registered_step(unit: int) -> int:
    """Bytes of a call that registers memory: whole pages and whole units of `unit` bytes."""
    whole = math.lcm(_PAGE_BYTES, unit)
    return max(1, _REGISTERED_BYTES // whole) * whole


class HostMemory:
    """Zeroed, page-aligned memory.

    Pinned memory is touched by several threads before it is registered, which is many times faster than leaving that
    to the driver, and is not there in a forked child: a copy on write would move the pages under the GPU.

    Args:
        size: in bytes.
        pinned: whether a GPU uses it; needs a CUDA device.
        unit: where a GPU's copy engines may begin, in bytes from the start.

    Attributes:
        address: of the first byte, for the host and for devices.
        size: in bytes.
        seams: addresses, of whole units, that no copy of a copy engine may reach across: memory that is pinned by
            several calls is several memories to it.

    Raises:
        MemoryError: there is not that much, or it cannot be pinned.
    """

    def __init__(self, size: int, *, pinned: bool, unit: int = 1) -> None:
        self.size = size
        self._step = registered_step(unit)
        self.pinned = pinned
        self._registered: list[int] = []
        whole = max(size, 1)
        if pinned:
            whole = -(-whole // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        try:
            self._map = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(
                f"expected {size} bytes of host memory, found less ({error}); set a smaller dram"
            ) from error
        self._view = np.frombuffer(self._map, np.uint8)
        self.address = self._view.ctypes.data
        self.seams = [self.address + at for at in range(self._step, whole, self._step)] if pinned else []
        if pinned:
            try:
                self._pin(whole)
            except BaseException:
                self.close()
                raise

    def _pin(self, whole: int) -> None:
        self._map.madvise(_DONT_FORK)
        with contextlib.suppress(OSError):  # small pages do as well
            self._map.madvise(_HUGE_PAGE)
        threads = min(_FAULT_THREADS, os.cpu_count() or 1)
        step = max(_HUGE_PAGE_BYTES, -(-whole // threads) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda at: ctypes.memset(self.address + at, 0, min(step, whole - at)), range(0, whole, step)))
        runtime = torch.cuda.cudart()
        for at in range(0, whole, self._step):
            size = min(self._step, whole - at)
            code = int(runtime.cudaHostRegister(self.address + at, size, _PORTABLE_MAPPED))
            if code != 0:
                raise MemoryError(
                    f"expected to pin {self.size} bytes of host memory, found CUDA error {code} at {at}; set a smaller "
                    "dram, or raise the limit of locked memory (ulimit -l)"
                )
            self._registered.append(self.address + at)

    def array(self, offset: int, dtype: np.typing.DTypeLike, count: int) -> np.ndarray:
        """`count` elements from a byte offset; the memory must outlive the array."""
        size = np.dtype(dtype).itemsize * count
        if not 0 <= offset <= offset + size <= self.size:
            raise ValueError(f"expected bytes within {self.size}, found {offset} to {offset + size}")
        return self._view[offset : offset + size].view(dtype)

    def tensor(self) -> torch.Tensor:
        """All of it, uint8; the memory must outlive the tensor."""
        return torch.from_numpy(self._view[: self.size])

    def close(self) -> None:
        """Unpin it. Nobody uses it any more; the memory itself goes with the last array that shows it."""
        registered, self._registered = self._registered, []
        for address in registered:
            torch.cuda.cudart().cudaHostUnregister(address)
