# SPDX-License-Identifier: Apache-2.0
"""Repair of a store in use: the store frees slots whose headers are broken, then every page is read through it, and
what fails its digest is quarantined.

The store knows which pages are live and which slot was used again meanwhile, so that nothing is judged by mistake.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from .choose import closing

if TYPE_CHECKING:
    from ..store import Namespace, ObjectInfo, Store


def repair(path: str, progress: Callable[[int, int], bool]) -> tuple[dict[str, int], list[str]]:
    """Read every listed page of the store at `path`, by way of this process's own opening of it.

    Args:
        path: the store's folder.
        progress: called with (bytes done, bytes in all); False stops.

    Returns:
        Counts, and a line for each page that was quarantined or could not be read. `objects`, `bytes`: read and whole.
        `bad_payloads`: the others. `bad_headers`: slots freed. `gone`: evicted or written anew since they were
        listed. `unknown`: not read, as their namespace has no description to open it by.

    Raises:
        TardisError: the store cannot be opened, or `progress` stopped the pass (code closed).
    """
    from ..store import Store, TardisError, inspect, list_objects

    described = {one["fingerprint"]: one["description"] for one in inspect(path)["namespaces"]}
    shape = attrgetter("fingerprint", "parts", "payload_bytes")
    pages = sorted((page for page in list_objects(path) if not page.quarantined), key=shape)
    total = sum(page.payload_bytes for page in pages)
    report = dict.fromkeys(("objects", "bytes", "bad_payloads", "bad_headers", "gone", "unknown"), 0)
    problems: list[str] = []
    done = 0
    with closing(Store(path, create=False)) as store:
        report["bad_headers"] = store.repair_headers()
        if report["bad_headers"]:
            problems.append(f"{report['bad_headers']} slots had broken headers; they are free now")
        for (fingerprint, parts, payload_bytes), group in itertools.groupby(pages, shape):
            description = described.get(fingerprint.hex())
            reader = description and _Reader(store, fingerprint, description, parts, payload_bytes // parts)
            for page in group:
                done += payload_bytes
                if not reader:
                    report["unknown"] += 1
                elif (problem := reader.problem_of(page)) is not None:
                    report["bad_payloads"] += 1
                    problems.append(problem)
                else:
                    report["objects" if reader.whole else "gone"] += 1
                    report["bytes"] += payload_bytes if reader.whole else 0
                if not progress(done, total):
                    raise TardisError("verification was stopped; what was found so far is quarantined", "closed")
    return report, problems


class _Reader:
    """Reads pages of one namespace and size. Regions of a part lie side by side on disk: one region does for all."""

    def __init__(self, store: Store, fingerprint: bytes, description: str, parts: int, part_bytes: int) -> None:
        from ..store import ObjectLayout

        self._store = store
        self._space: Namespace = store.namespace(fingerprint, description, ObjectLayout(parts, (part_bytes,)))
        self._memory = np.empty(parts * part_bytes, dtype=np.uint8)
        steps = np.arange(parts, dtype=np.uint64) * np.uint64(part_bytes)
        self._pieces = (np.uint64(self._memory.ctypes.data) + steps)[None, :]
        self.whole = False

    def problem_of(self, page: ObjectInfo) -> str | None:
        """What is wrong with a page; None: nothing (`whole`), or it has gone."""
        self._store.last_problem = None
        self.whole = bool(self._space.get(np.frombuffer(page.key, dtype=np.uint8)[None, :], self._pieces)[0])
        problem = self._store.last_problem
        return None if self.whole or problem is None else f"key {page.key.hex()}: {problem}"
