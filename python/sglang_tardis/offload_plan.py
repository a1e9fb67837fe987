# SPDX-License-Identifier: Apache-2.0
"""What becomes of each page of an offload: which are copied to the pinned tier, which are stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_tardis import loads_abi
from sglang_tardis.pinned_tier import PinnedTier
from sglang_tardis.store import HashArray, Namespace
from sglang_tardis.write_behind import StoreRun

__all__ = ["OffloadPlan", "plan_offload"]


class OffloadPlan(NamedTuple):
    """A plan, whose slots are reserved or pinned.

    Attributes:
        positions: (m,) int64, of the pages to be copied, in order.
        addresses: (m,) uint64, where to.
        filled, kept, pinned, runs: as `Offload` has them.
        whole: every page is kept somewhere, or will be if nothing fails.
        no_room: pages for which the tier has no slot, and those behind them.
        not_stored: pages that are kept in the tier alone, since too much waits to be stored.
        promoted: pages that are stored, and copied to the tier as well.
    """

    positions: npt.NDArray[np.int64]
    addresses: npt.NDArray[np.uint64]
    filled: npt.NDArray[np.uint32]
    kept: npt.NDArray[np.uint32]
    pinned: npt.NDArray[np.uint32]
    runs: list[StoreRun]
    whole: bool
    no_room: int
    not_stored: int
    promoted: int


def plan_offload(
    tier: PinnedTier, namespace: Namespace, hashes: HashArray, *, writes: bool, has_room: Callable[[int], bool]
) -> OffloadPlan:
    """Plan an offload.

    The leading pages that are stored are copied to the tier if that costs no page there that was ever used again: they
    have just been loaded from files, or will be soon. The others take the slots of what is worth least, and are stored.
    Where the tier has no slot (all are being filled, read or stored), that page and those behind it are left out: a
    prompt is restored from its beginning.

    Args:
        tier: where to.
        namespace: of the pages.
        hashes: (n, 32) uint8, pages in a row of a prompt.
        writes: whether this rank stores pages; else another one stores the same bytes.
        has_room: whether so many pages more may wait to be stored.
    """
    space = namespace.handle
    stored = namespace.lookup(hashes)
    new = np.ascontiguousarray(hashes[stored:])
    given = tier.reserve(space, new)
    full = np.flatnonzero(given.results == loads_abi.FULL)
    end = int(full[0]) if len(full) else len(new)
    behind = given.slots[end:][given.results[end:] == loads_abi.RESERVED]
    tier.end(behind, loads_abi.ABORT)
    reserved = given.results[:end] == loads_abi.RESERVED
    addresses = np.where(reserved, given.addresses[:end], np.uint64(0))

    there = np.flatnonzero(given.results[:end] == loads_abi.THERE)
    pins = tier.pin(space, np.ascontiguousarray(new[there]))
    addresses[there[pins.there]] = pins.addresses
    ours = int(np.count_nonzero(addresses))
    stores = writes and ours > 0 and has_room(ours)
    slots = given.slots[:end][reserved]
    none = np.empty(0, np.uint32)
    runs = _runs(hashes, stored, new[:end], addresses) if stores else []
    if not stores:
        tier.unpin(pins.slots)

    spare = tier.reserve(space, np.ascontiguousarray(hashes[:stored]), spare=True)
    promoted = spare.results == loads_abi.RESERVED
    return OffloadPlan(
        positions=np.concatenate([np.flatnonzero(promoted), stored + np.flatnonzero(reserved)]),
        addresses=np.concatenate([spare.addresses[promoted], addresses[reserved]]),
        filled=slots if stores else none,
        kept=np.concatenate([spare.slots[promoted], none if stores else slots]),
        pinned=pins.slots if stores else none,
        runs=runs,
        whole=end == len(new) and (stores or not writes or ours == 0),
        no_room=len(new) - end,
        not_stored=0 if stores or not writes else ours,
        promoted=int(np.count_nonzero(promoted)),
    )


def _runs(hashes: HashArray, stored: int, new: HashArray, addresses: npt.NDArray[np.uint64]) -> list[StoreRun]:
    """Of pages that have an address, those in a row; somebody else fills the ones between them."""
    has = np.flatnonzero(addresses)
    breaks = np.flatnonzero(np.diff(has) > 1) + 1
    runs = []
    for run in np.split(has, breaks):
        first, last = int(run[0]), int(run[-1]) + 1
        before = stored + first - 1
        parent = hashes[before].tobytes() if before >= 0 else None
        runs.append(StoreRun(np.ascontiguousarray(new[first:last]), addresses[first:last], parent))
    return runs
