# SPDX-License-Identifier: Apache-2.0
"""Runs of pages that a copy engine moves with one command for each layer's K and V (docs/loads.md)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["PAGE_RUN", "page_runs"]

# tardis_gpu_load_run: address of the first object, the first page, how many
PAGE_RUN = np.dtype([("object", np.uint64), ("page", np.uint32), ("pages", np.uint32)])


def page_runs(
    ids: npt.NDArray[np.int32], addresses: npt.NDArray[np.uint64], object_bytes: int, seams: Sequence[int] = ()
) -> npt.NDArray[np.void]:
    """Pages that follow each other in the pools, and whose objects follow each other in memory.

    Args:
        ids: (n,) int32, pages of the pools, in any order. What is no page stays none: a negative one is a large uint32.
        addresses: (n,) uint64, of their objects.
        object_bytes: from an object to the next.
        seams: addresses of objects that end a run before them: see `HostMemory`.

    Returns:
        (runs,) of `PAGE_RUN`, as few as there can be; together each page once.
    """
    order = np.argsort(ids, kind="stable")
    pages, objects = ids[order].astype(np.int64), addresses[order]
    follows = (np.diff(pages) == 1) & (objects[1:] == objects[:-1] + np.uint64(object_bytes))
    if len(seams):
        follows &= ~np.isin(objects[1:], np.array(seams, np.uint64))
    first = np.flatnonzero(np.concatenate([np.ones(min(1, len(ids)), np.bool_), ~follows]))
    runs = np.empty(len(first), PAGE_RUN)
    runs["object"], runs["page"] = objects[first], pages[first].astype(np.uint32)
    runs["pages"] = np.diff(first, append=len(ids))
    return runs
