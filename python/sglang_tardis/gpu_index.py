# SPDX-License-Identifier: Apache-2.0
"""The hash index of docs/gstore.md in device memory, or in host memory by the same code, for `tardis::lookup`."""

from __future__ import annotations

import ctypes
import itertools
import weakref

import numpy as np
import numpy.typing as npt
import torch

from sglang_tardis import gio_abi

__all__ = ["ANSWER_DTYPE", "ENTRY_DTYPE", "STATUSES", "ObjectIndex", "find_index"]

# tardis_gpu_index_entry and tardis_gpu_index_answer (cpp/gstore/index.h).
ENTRY_DTYPE = np.dtype(
    [
        ("key", np.uint8, 32),
        ("location", np.uint64),
        ("generation", np.uint64),
        ("root", np.uint64),
        ("payload_bytes", np.uint32),
        ("space", np.uint16),
        ("op", np.uint8),  # 0 put, 1 add, 2 erase
        ("reserved", np.uint8),
    ]
)
ANSWER_DTYPE = np.dtype(
    [
        ("location", np.uint64),
        ("generation", np.uint64),
        ("root", np.uint64),
        ("payload_bytes", np.uint32),
        ("status", np.uint32),  # 0 miss, 1 found, 2 unknown: take it for a miss
    ]
)
STATUSES = ("inserted", "replaced", "erased", "exists", "stale", "absent", "full", "busy")

_MOST_ENTRIES = 100_000_000_000  # what 2^32 buckets hold

_handles = itertools.count(1)
_indexes: weakref.WeakValueDictionary[int, ObjectIndex] = weakref.WeakValueDictionary()  # an op names it by int


def find_index(handle: int) -> ObjectIndex:
    """The index of that handle.

    Raises:
        GioError: there is none.
    """
    index = _indexes.get(handle)
    if index is None:
        raise gio_abi.GioError(f"index {handle}: expected the handle of an ObjectIndex, found none", "closed")
    return index


class ObjectIndex:
    """Where the objects of a store are, by block hash and namespace.

    Lookups of one index on a GPU run one after the other; they may run beside `apply`.

    Args:
        entries: room for so many objects.
        device: "cpu", or a CUDA device.

    Attributes:
        handle: names the index to `tardis::lookup`.
        host_calls: calls into the libraries by ops on this index.

    Raises:
        GioError: `GpuLibraryMissingError` without libtardis_gpu.so.
    """

    def __init__(self, entries: int, device: str | torch.device = "cpu") -> None:
        if not 0 <= entries <= _MOST_ENTRIES:
            raise ValueError(f"ObjectIndex: expected 0 to {_MOST_ENTRIES} entries, found {entries}")
        self.device = torch.empty(0, device=device).device
        self.handle = next(_handles)
        self.host_calls = 0
        self._core = gio_abi.core()
        self._gpu = gio_abi.gpu() if self.device.type == "cuda" else None
        size = self._core.library.tardis_index_memory_bytes(entries)
        self._memory = torch.zeros(size + 256, dtype=torch.uint8, device=self.device)
        self.place = gio_abi.Index()
        at = -(-self._memory.data_ptr() // 256) * 256
        if self._gpu is None:
            self._core.call("tardis_index_place", ctypes.byref(self.place), at, size)
        else:
            with torch.cuda.device(self.device):
                self._gpu.call("tardis_gpu_load")
                self._gpu.call("tardis_gpu_index_place", ctypes.byref(self.place), at, size)
        # One for lookups, one for changes.
        self.tickets = torch.zeros((2, gio_abi.TICKET_BYTES), dtype=torch.uint8, device=self.device)
        if self._gpu is not None:
            torch.cuda.synchronize(self.device)  # an op may come on another stream than these zeros
        _indexes[self.handle] = self

    def apply(self, changes: npt.NDArray[np.void]) -> list[str]:
        """Insert, replace or erase; waits for the device.

        Args:
            changes: `ENTRY_DTYPE`, at most one of a key.

        Returns:
            Of each change one of `STATUSES`.
        """
        if changes.dtype != ENTRY_DTYPE or changes.ndim != 1:
            raise ValueError(f"changes: expected a 1-D array of ENTRY_DTYPE, found {changes.dtype}, {changes.ndim}-D")
        changes = np.ascontiguousarray(changes)
        n = len(changes)
        if n == 0:
            return []
        if self._gpu is None:
            found = np.empty(n, dtype=np.uint8)
            self._core.call(
                "tardis_index_apply",
                ctypes.byref(self.place),
                changes.ctypes.data,
                n,
                found.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)),
            )
        else:
            with torch.cuda.device(self.device):
                rows = torch.from_numpy(changes.view(np.uint8)).to(self.device)
                count = torch.tensor([n], dtype=torch.int32, device=self.device)
                statuses = torch.empty(n, dtype=torch.uint8, device=self.device)
                self._gpu.call(
                    "tardis_gpu_index_apply",
                    ctypes.byref(self.place),
                    rows.data_ptr(),
                    count.data_ptr(),
                    n,
                    statuses.data_ptr(),
                    self.tickets[1].data_ptr(),
                    None,
                    0,
                    torch.cuda.current_stream().cuda_stream,
                )
                found = statuses.cpu().numpy()
        return [STATUSES[status] for status in found]

    def new_answers(self, keys: int) -> torch.Tensor:
        """Room for answers: int64 `[keys, 4]` on the device, `ANSWER_DTYPE` in each row."""
        return torch.zeros((keys, 4), dtype=torch.int64, device=self.device)
