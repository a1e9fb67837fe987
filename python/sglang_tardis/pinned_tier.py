# SPDX-License-Identifier: Apache-2.0
"""Typed face of the pinned tier: objects of one size in host memory, found by block hash (docs/restore.md)."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_tardis import loads_abi
from sglang_tardis.gio_abi import GioError
from sglang_tardis.host_memory import HostMemory
from sglang_tardis.store import HashArray

__all__ = ["Pinned", "PinnedTier", "Reservation"]

_REUSE_BONUS = 4  # times the slots of the tier


class Pinned(NamedTuple):
    """What `PinnedTier.pin` found.

    Attributes:
        there: (n,) bool, which of the objects.
        slots: (m,) uint32 of those, to be unpinned once.
        addresses: (m,) uint64 of those.
    """

    there: npt.NDArray[np.bool_]
    slots: npt.NDArray[np.uint32]
    addresses: npt.NDArray[np.uint64]


class Reservation(NamedTuple):
    """What `PinnedTier.reserve` gave.

    Attributes:
        results: (n,) uint8: RESERVED, THERE (published), BUSY (somebody fills it) or FULL of `loads_abi`.
        slots: (n,) uint32, where results is RESERVED; each is ended once.
        addresses: (n,) uint64, likewise.
    """

    results: npt.NDArray[np.uint8]
    slots: npt.NDArray[np.uint32]
    addresses: npt.NDArray[np.uint64]


class PinnedTier:
    """The tier and its memory. Thread-safe; no call does I/O or waits for more than a short lock.

    Args:
        size: of the memory, in bytes: no more is ever used.
        object_bytes: of each object, a multiple of 16, `[layer][K,V]` without padding.
        pinned: whether a GPU reads and writes it.

    Raises:
        GioError: not one object fits. MemoryError: there is not that much memory.
    """

    def __init__(self, size: int, object_bytes: int, *, pinned: bool) -> None:
        self.object_bytes = object_bytes
        self._core = loads_abi.core()
        self._tier = ctypes.c_void_p()
        slots = size // object_bytes
        if slots == 0:
            raise GioError(
                f"the DRAM tier: expected room for a page of {object_bytes} bytes, found {size}; set a larger dram",
                "invalid_argument",
            )
        self.memory = HostMemory(slots * object_bytes, pinned=pinned, unit=object_bytes)
        try:
            self._core.call(
                "tardis_pinned_open",
                self.memory.address,
                self.memory.size,
                object_bytes,
                _REUSE_BONUS * slots,
                ctypes.byref(self._tier),
            )
        except BaseException:
            self.memory.close()
            raise
        self.slots = slots

    def find(self, space: int, hashes: HashArray) -> npt.NDArray[np.bool_]:
        """Which of the objects are there; nothing is pinned, no use is counted.

        Args:
            space: handle of their namespace.
            hashes: (n, 32) uint8, C-contiguous.
        """
        there = np.empty(len(hashes), np.uint8)
        run = ctypes.c_size_t()
        self._call("tardis_pinned_find", space, hashes.ctypes.data, len(hashes), there.ctypes.data, ctypes.byref(run))
        return there.view(np.bool_)

    def pin(self, space: int, hashes: HashArray) -> Pinned:
        """Pin each of the objects that is there: it stays where it is until `unpin`."""
        n = len(hashes)
        slots, addresses = np.empty(n, np.uint32), np.empty(n, np.uint64)
        pinned = ctypes.c_size_t()
        self._call(
            "tardis_pinned_pin_each",
            space,
            hashes.ctypes.data,
            n,
            slots.ctypes.data,
            addresses.ctypes.data,
            ctypes.byref(pinned),
        )
        there = slots != loads_abi.NO_SLOT
        return Pinned(there, slots[there], addresses[there])

    def unpin(self, slots: npt.NDArray[np.uint32]) -> None:
        """Give pins back, once each."""
        if len(slots):
            slots = np.ascontiguousarray(slots)
            self._call("tardis_pinned_unpin", slots.ctypes.data, len(slots))

    def reserve(self, space: int, hashes: HashArray, *, spare: bool = False) -> Reservation:
        """Slots to be filled, found by nobody until they are published.

        Args:
            space: handle of their namespace.
            hashes: (n, 32) uint8.
            spare: take free slots and those of objects that were never used again, no others.
        """
        n = len(hashes)
        given = Reservation(np.empty(n, np.uint8), np.empty(n, np.uint32), np.empty(n, np.uint64))
        name = "tardis_pinned_reserve_spare" if spare else "tardis_pinned_reserve"
        self._call(name, space, hashes.ctypes.data, n, *(array.ctypes.data for array in given))
        return given

    def end(self, slots: npt.NDArray[np.uint32], how: int) -> None:
        """End reservations: ABORT, PUBLISH, or PUBLISH_PINNED (pinned once for the caller) of `loads_abi`."""
        if len(slots):
            slots = np.ascontiguousarray(slots)
            self._call("tardis_pinned_end", slots.ctypes.data, len(slots), how)

    def erase(self, space: int, hashes: HashArray) -> int:
        """Find these objects no more; returns how many were there."""
        erased = ctypes.c_size_t()
        self._call("tardis_pinned_erase", space, hashes.ctypes.data, len(hashes), ctypes.byref(erased))
        return erased.value

    def clear(self) -> int:
        """Find nothing of what is there any more; returns how many objects were. Pinned ones stay for their users."""
        erased = ctypes.c_size_t()
        self._call("tardis_pinned_clear", ctypes.byref(erased))
        return erased.value

    def counters(self) -> dict[str, int]:
        """Fields of tardis_pinned_counters."""
        counters = loads_abi.PinnedCounters()
        self._call("tardis_pinned_get_counters", ctypes.byref(counters))
        return {name: getattr(counters, name) for name, _ in counters._fields_}

    def close(self) -> None:
        """Nothing is pinned, reserved or under way any more. Again does nothing."""
        tier, self._tier = self._tier, ctypes.c_void_p()
        if tier:
            self._core.library.tardis_pinned_close(tier)
            self.memory.close()

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._core.library, name)(self._tier, *arguments)
        if code != 0:
            raise GioError(f"{name}: expected slots that the caller holds, found others", "invalid_argument")
