# SPDX-License-Identifier: Apache-2.0
"""What becomes of each page of an offload: which are copied to the pinned tier, which are stored."""

from __future__ import annotations

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


def plan_offload(tier: PinnedTier, namespace: Namespace, hashes: HashArray, *, writes: bool, room: int) -> OffloadPlan:
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
        room: how many pages more may wait to be stored.
    """
    space = namespace.handle
    stored = namespace.lookup(hashes)
    new = np.ascontiguousarray(hashes[stored:])
    pins = tier.pin(space, new)  # first, or they would make room for those behind them
    absent = np.flatnonzero(~pins.there)
    given = tier.reserve(space, np.ascontiguousarray(new[absent]))
    full = np.flatnonzero(given.results == loads_abi.FULL)
    end = int(absent[full[0]]) if len(full) else len(new)  # pages from there on are left out
    reserved = given.results == loads_abi.RESERVED
    taken = reserved & (absent < end)
    tier.end(given.slots[reserved & ~taken], loads_abi.ABORT)

    places, there = absent[taken], np.flatnonzero(pins.there)
    addresses = np.zeros(len(new), np.uint64)  # 0: somebody else fills it, or it is left out
    addresses[places] = given.addresses[taken]
    addresses[there] = pins.addresses
    addresses[end:] = 0
    ours = np.flatnonzero(addresses)
    stores = ours[: min(len(ours), room)] if writes else ours[:0]
    behind = int(stores[-1]) + 1 if len(stores) else 0  # pages from there on are kept alone
    addresses[behind:] = 0
    slots = given.slots[taken]
    tier.unpin(pins.slots[there >= behind])

    spare = tier.reserve(space, np.ascontiguousarray(hashes[:stored]), spare=True)
    promoted = spare.results == loads_abi.RESERVED
    return OffloadPlan(
        positions=np.concatenate([np.flatnonzero(promoted), stored + places]),
        addresses=np.concatenate([spare.addresses[promoted], given.addresses[taken]]),
        filled=slots[places < behind],
        kept=np.concatenate([spare.slots[promoted], slots[places >= behind]]),
        pinned=pins.slots[there < behind],
        runs=_runs(hashes, stored, new, addresses),
        whole=end == len(new) and (not writes or len(stores) == len(ours)),
        no_room=len(new) - end,
        not_stored=len(ours) - len(stores) if writes else 0,
        promoted=int(np.count_nonzero(promoted)),
    )


def _runs(hashes: HashArray, stored: int, new: HashArray, addresses: npt.NDArray[np.uint64]) -> list[StoreRun]:
    """Of pages that have an address, those in a row."""
    has = np.flatnonzero(addresses)
    runs = []
    for run in np.split(has, np.flatnonzero(np.diff(has) > 1) + 1) if len(has) else []:
        first, last = int(run[0]), int(run[-1]) + 1
        before = stored + first - 1
        parent = hashes[before].tobytes() if before >= 0 else None
        runs.append(StoreRun(np.ascontiguousarray(new[first:last]), addresses[first:last], parent))
    return runs
