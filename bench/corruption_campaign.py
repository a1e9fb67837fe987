#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Flip random bits in a closed store and read everything back: no page may arrive with a wrong byte.

The store has pages of 64 KiB in four parts and many of 4 KiB. Each round copies it whole, flips bits in one region -
payload of stored pages, slot headers, digest tables, segment superblocks, the small files beside the segments, or
anywhere in any file - opens it, loads every page and compares the bytes with what was stored.

Counted per region: pages with a wrong byte (must be 0), pages refused, and, for payload, pages with a flipped bit that
were not refused and whole pages that were (both 0). Flips in padding, free slots and the digest table harm no page. The
last row is the negative control: with `verify_reads` off, each page with a flipped bit must arrive with wrong bytes, or
the comparison could not fail. `size` of a row is the number of bits flipped.
"""

from __future__ import annotations

import argparse
import pathlib
import shutil
import sys
import tempfile
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from common import Report, add_common_arguments, file_system, machine_facts
from corrupt import SEGMENT_HEAD, stored_pages
from sglang_tardis.store import Namespace, ObjectLayout, Store, StoreOptions, TardisError

OPTIONS = StoreOptions(
    capacity_bytes=(20 << 20) + (1 << 20), segment_bytes=4 << 20, free_space_floor=0, engine="sync", io_workers=2
)
# Of all flips, and how many a round: enough to hit many pages at once, few enough that others stay whole.
REGIONS = {
    "payload": (0.5, 4000),
    "headers": (0.2, 4000),
    "digest table": (0.1, 4000),
    "anywhere": (0.198, 4000),
    "segment superblock": (0.001, 20),
    "small files": (0.001, 20),
}
CONTROL_ROUNDS = 5


class Range(NamedTuple):
    """A part of a file, and the key of the page whose bytes it holds, if any."""

    file: pathlib.Path
    first: int
    bytes: int
    key: bytes = b""


class Space:
    """The pages of one layout: keys, expected bytes, and memory to load into."""

    def __init__(self, name: str, layout: ObjectLayout, pages: int, seed: int) -> None:
        source = np.random.default_rng(seed)
        self.name, self.layout, self.count = name, layout, pages
        self.hashes = source.integers(0, 256, (pages, 32), dtype=np.uint8)
        self.expected = source.integers(0, 256, (pages, layout.object_bytes), dtype=np.uint8)
        self.memory = np.zeros_like(self.expected)

    def addresses(self, array: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
        """Addresses of every region of every page of an array as `expected`: u64 [page, part * region]."""
        offsets, at = [], 0
        for _ in range(self.layout.parts):
            for region in self.layout.region_bytes:
                offsets.append(at)
                at += region
        starts = array.ctypes.data + np.arange(self.count, dtype=np.uint64) * np.uint64(array.strides[0])
        return np.ascontiguousarray(starts[:, None] + np.array(offsets, dtype=np.uint64)[None, :])

    def open(self, store: Store) -> Namespace:
        return store.namespace(self.name.encode(), "{}", self.layout)

    def store(self, store: Store) -> None:
        if not self.open(store).set(self.hashes, self.addresses(self.expected)).all():
            raise SystemExit(f"storing failed: {store.last_problem}")

    def load(self, store: Store) -> tuple[set[bytes], set[bytes]]:
        """Load every page by itself; returns the keys of those with a wrong byte, and of those refused."""
        self.memory.fill(0x5A)
        space, pieces = self.open(store), self.addresses(self.memory)
        ok = np.array([space.get(self.hashes[i : i + 1], pieces[i : i + 1])[0] for i in range(self.count)], dtype=bool)
        wrong = ok & (self.memory != self.expected).any(axis=1)
        return {self.hashes[i].tobytes() for i in np.nonzero(wrong)[0]}, {
            self.hashes[i].tobytes() for i in np.nonzero(~ok)[0]
        }


class Pages:
    """Every page of the test, in two layouts."""

    def __init__(self) -> None:
        self.spaces = (
            Space("corruption-large", ObjectLayout(parts=4, region_bytes=(6000, 10_384)), 60, 1),
            Space("corruption-small", ObjectLayout(parts=1, region_bytes=(2500, 1500)), 1500, 2),
        )
        self.keys = {key.tobytes() for space in self.spaces for key in space.hashes}

    def store(self, folder: pathlib.Path) -> None:
        with Store(folder, OPTIONS) as store:
            for space in self.spaces:
                space.store(store)

    def load(self, folder: pathlib.Path, verify: bool = True) -> tuple[set[bytes], set[bytes]]:
        """As Space.load, of all. A store that cannot be opened refuses every page."""
        wrong: set[bytes] = set()
        refused: set[bytes] = set()
        try:
            with Store(folder, msgspec.structs.replace(OPTIONS, verify_reads=verify)) as store:
                for space in self.spaces:
                    bad, missing = space.load(store)
                    wrong |= bad
                    refused |= missing
        except TardisError:
            return wrong, self.keys - wrong
        return wrong, refused


def ranges_of(folder: pathlib.Path, region: str) -> list[Range]:
    """Where a region lies in the files of a closed store."""
    if region == "payload":
        return [
            Range(page.file, page.offset + part * page.part_stride, page.part_bytes, key)
            for key, page in stored_pages(folder).items()
            for part in range(page.parts)
        ]
    segments = sorted((folder / "segments").iterdir())
    small = [path for path in sorted(folder.rglob("*")) if path.is_file() and path not in segments]
    if region in ("small files", "anywhere"):
        files = small if region == "small files" else [*segments, *small]
        return [Range(path, 0, path.stat().st_size) for path in files if path.stat().st_size > 0]
    ranges = []
    for file in segments:
        head = SEGMENT_HEAD.unpack(file.read_bytes()[: SEGMENT_HEAD.size])
        slots, digests, headers_at, digests_at = head[8:12]
        ranges.append(
            {
                "headers": Range(file, headers_at, slots * 512),
                "digest table": Range(file, digests_at, slots * digests * 8),
                "segment superblock": Range(file, 0, 512),
            }[region]
        )
    return ranges


class Flipper:
    """Flips random bits of some ranges, each bit at most once, in a copy of the folder that the ranges are of."""

    def __init__(self, folder: pathlib.Path, ranges: list[Range], seed: int) -> None:
        self.folder, self.ranges = folder, ranges
        self.ends = np.cumsum([r.bytes * 8 for r in ranges])
        self.chance = np.random.default_rng(seed)

    def flip(self, copy: pathlib.Path, bits: int) -> set[bytes]:
        """Flip `bits` bits; returns the keys of the pages that were hit."""
        places = self.chance.choice(self.ends[-1], size=min(bits, int(self.ends[-1])), replace=False)
        which = np.searchsorted(self.ends, places, side="right")
        hit: set[bytes] = set()
        by_file: dict[pathlib.Path, list[tuple[int, int]]] = {}
        for place, number in zip(places.tolist(), which.tolist(), strict=True):
            at = self.ranges[number]
            bit = place - (int(self.ends[number]) - at.bytes * 8)
            by_file.setdefault(at.file, []).append((at.first + bit // 8, bit % 8))
            if at.key:
                hit.add(at.key)
        for file, flips in by_file.items():
            data = np.memmap(copy / file.relative_to(self.folder), dtype=np.uint8, mode="r+")
            for byte, bit in flips:
                data[byte] ^= 1 << bit
            data.flush()
        return hit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--flips", type=int, help="bits in all (default 1,000,000; 30,000 with --quick)")
    parser.add_argument(
        "--folder", type=pathlib.Path, default=None, help="where the store is made (default: a temporary folder)"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    total = options.flips or (30_000 if options.quick else 1_000_000)
    parent = options.folder or pathlib.Path(tempfile.gettempdir())
    work = pathlib.Path(tempfile.mkdtemp(prefix="tardis-corruption-", dir=parent))
    whole, damaged = work / "whole", work / "damaged"
    report = Report(options.json, machine_facts(parent))
    broken = flipped = 0
    try:
        pages = Pages()
        pages.store(whole)
        if pages.load(whole) != (set(), set()):
            raise SystemExit("the undamaged store does not give its pages back")
        rows = [(region, round(total * share), a_round, True) for region, (share, a_round) in REGIONS.items()]
        rows.append(("payload", CONTROL_ROUNDS * 1500, 1500, False))
        for number, (region, share, a_round, verify) in enumerate(rows):
            flipper = Flipper(whole, ranges_of(whole, region), options.seed * 100 + number)
            wrong = refused = missed = lost = rounds = 0
            for first in range(0, share, a_round):
                # A fresh copy: what a round quarantines is written to the store.
                shutil.rmtree(damaged, ignore_errors=True)
                shutil.copytree(whole, damaged)
                hit = flipper.flip(damaged, min(a_round, share - first))
                bad, missing = pages.load(damaged, verify)
                rounds += 1
                wrong += len(bad)
                refused += len(missing)
                if region == "payload":
                    missed += len(hit - missing if verify else hit - bad)
                    lost += len(missing - hit)
            broken += (wrong if verify else 0) + missed + lost
            flipped += share if verify else 0
            report.add(
                f"bit flips, {region}{'' if verify else ', not verified'}",
                f"sync on {file_system(parent)}",
                share,
                wrong,
                "wrong pages",
                expected="0" if verify else "every page that was hit: negative control",
                pages_refused=refused,
                hit_pages_not_noticed=missed,
                whole_pages_refused=lost,
                pages_loaded=rounds * len(pages.keys),
                rounds=rounds,
            )
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(f"{flipped} bits flipped, {broken} broken promises")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
