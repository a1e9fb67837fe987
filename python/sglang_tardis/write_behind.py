# SPDX-License-Identifier: Apache-2.0
"""Write-behind: pages that were copied into the pinned tier are published there, and stored by a thread.

An offload is *done* for SGLang when its copy is: its pages of the pools may then change. Storing goes on from the
tier, whose slots stay until it has ended. What waits to be stored is bounded in bytes: beyond that, pages are kept in
the tier alone.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_tardis import loads_abi
from sglang_tardis.log import RateLimitedLog
from sglang_tardis.page_copies import Copy
from sglang_tardis.pinned_tier import PinnedTier
from sglang_tardis.store import HashArray, Namespace

__all__ = ["Offload", "StoreRun", "WriteBehind"]


class StoreRun(NamedTuple):
    """Pages in a row of a prompt, to be stored in one call.

    Attributes:
        hashes: (n, 32) uint8.
        addresses: (n,) uint64, their objects in the tier.
        parent: hash of the page before them, if it is known.
    """

    hashes: HashArray
    addresses: npt.NDArray[np.uint64]
    parent: bytes | None


class Offload:
    """One of SGLang's offloads.

    Args:
        result: what SGLang is told if the copy succeeds: whether all its pages are kept somewhere.
        copy: None: nothing is copied.
        filled: slots that the copy fills, to be stored, and pinned until they are.
        kept: slots that the copy fills, to be kept in the tier alone.
        pinned: slots that were there already and are stored from, pinned by the caller.
        runs: what is stored, into `namespace`.
    """

    def __init__(
        self,
        result: bool,
        *,
        copy: Copy | None = None,
        filled: npt.NDArray[np.uint32] | None = None,
        kept: npt.NDArray[np.uint32] | None = None,
        pinned: npt.NDArray[np.uint32] | None = None,
        runs: list[StoreRun] | None = None,
        namespace: Namespace | None = None,
    ) -> None:
        none = np.empty(0, np.uint32)
        self.promised = result
        self.copy = copy
        self.filled = none if filled is None else filled
        self.kept = none if kept is None else kept
        self.pinned = none if pinned is None else pinned
        self.runs = runs or []
        self.namespace = namespace
        self.result: bool | None = None
        self.failed = False

    @property
    def pages(self) -> int:
        """How many are to be stored."""
        return sum(len(run.hashes) for run in self.runs)


class WriteBehind:
    """The queue and its thread. Results come in the order of `submit`.

    Args:
        tier: where pages are copied to; its objects are those of the namespaces.
        piece_offsets: (pieces,) uint64, where the pieces of an object lie in it, in stored order.
        most_bytes: that wait to be stored.

    Attributes:
        counts: pages by what became of them: "copied", "stored", "copy_failed", "not_stored".
    """

    def __init__(self, tier: PinnedTier, piece_offsets: npt.NDArray[np.uint64], most_bytes: int) -> None:
        self._tier = tier
        self._offsets = piece_offsets
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._queue: collections.deque[Offload] = collections.deque()
        self._results: collections.deque[Offload] = collections.deque()
        self._waiting_bytes = 0
        self._busy = self._closing = False
        self._log = RateLimitedLog()
        self.counts: collections.Counter[str] = collections.Counter()
        self._thread = threading.Thread(target=self._main, name="tardis-write-behind", daemon=True)
        self._thread.start()

    @property
    def room(self) -> int:
        """How many pages more may wait to be stored."""
        return max(0, self._most_bytes - self._waiting_bytes) // self._tier.object_bytes

    @property
    def waiting_bytes(self) -> int:
        """Of pages that are to be stored."""
        return self._waiting_bytes

    def submit(self, offload: Offload) -> None:
        """Take an offload over."""
        at_once = offload.copy is None or offload.copy.is_done()
        with self._changed:
            self._waiting_bytes += offload.pages * self._tier.object_bytes
            self._results.append(offload)
            if at_once:
                self._settle(offload)
            if offload.runs or not at_once:
                self._queue.append(offload)
                self._changed.notify_all()

    def num_completed(self) -> int:
        """Results that can be popped; does not wait for a copy."""
        with self._lock:
            done = 0
            for offload in self._results:
                if offload.result is None and offload.copy is not None and offload.copy.is_done():
                    self._settle(offload)
                if offload.result is None:
                    break
                done += 1
            return done

    def pop(self) -> bool:
        """The oldest result.

        Raises:
            IndexError: it is not there yet.
        """
        with self._lock:
            if not self._results or self._results[0].result is None:
                raise IndexError("expected an offload that is done, found none")
            return bool(self._results.popleft().result)

    def drain(self) -> None:
        """Return when everything submitted before is copied, and stored as far as it can be."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queue and not self._busy)

    def forget_results(self) -> None:
        """Drain, and have no result left that can be popped."""
        self.drain()
        with self._lock:
            self._results.clear()

    def close(self) -> None:
        """Drain and end the thread. Again does nothing."""
        self.drain()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def state(self) -> Mapping[str, int]:
        """Pages by what became of them, and "waiting_bytes"."""
        with self._lock:
            return {**self.counts, "waiting_bytes": self._waiting_bytes}

    # ---- under the lock
    def _settle(self, offload: Offload) -> None:
        """The copy is done: the pages are found from now on."""
        good = offload.copy is None or offload.copy.wait()
        if good:
            self._tier.end(offload.filled, loads_abi.PUBLISH_PINNED)
            self._tier.end(offload.kept, loads_abi.PUBLISH)
        else:
            self._tier.end(offload.filled, loads_abi.ABORT)
            self._tier.end(offload.kept, loads_abi.ABORT)
            self._log.warning("copy", "tardis: pages outside of the KV pools were to be copied; they are not kept")
        self.counts["copied" if good else "copy_failed"] += len(offload.filled) + len(offload.kept)
        offload.failed = not good
        offload.result = good and offload.promised

    # ---- the thread
    def _main(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                offload = self._queue.popleft()
                self._busy = True
            try:
                self._finish(offload)
            except Exception:  # the next ones are not to wait for ever
                self._log.warning("write-behind", "tardis: an offload could not be ended", exc_info=True)

    def _finish(self, offload: Offload) -> None:
        if offload.copy is not None:
            offload.copy.wait()
        with self._lock:
            if offload.result is None:
                self._settle(offload)
        stored = 0
        for run in offload.runs:
            if offload.failed:
                break
            try:
                pieces = run.addresses[:, None] + self._offsets
                stored += int(np.count_nonzero(offload.namespace.set(run.hashes, pieces, run.parent)))
            except Exception:
                self._log.warning("store", "tardis: %d pages were not stored", len(run.hashes), exc_info=True)
        with self._lock:
            self._tier.unpin(offload.pinned)
            if not offload.failed:
                self._tier.unpin(offload.filled)
            self._waiting_bytes -= offload.pages * self._tier.object_bytes
            self.counts["stored"] += stored
            self.counts["not_stored"] += offload.pages - stored
