#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Flip random bits in a closed store and read everything back: no page may arrive with a wrong byte.

Each round copies a whole store, flips 1 to 8 bits of one region of its segment files - payload of stored pages, slot
headers, digest table, segment superblock, or anywhere - opens it, loads every page and compares the bytes with what was
stored.

Counted per region: pages with a wrong byte (must be 0), pages refused, and rounds in which a page was refused (for
payload: all of them). Flips in padding, free slots and the digest table harm no page. The last row is the negative
control: with `verify_reads` off, flipped payload must arrive as wrong bytes, or the comparison could not fail.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import shutil
import struct
import sys
import tempfile
from typing import NamedTuple

import msgspec
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from common import Report, add_common_arguments, file_system, machine_facts
from corrupt import SEGMENT_HEAD, stored_pages
from sglang_tardis.store import ObjectLayout, Store, StoreOptions

LAYOUT = ObjectLayout(parts=4, region_bytes=(6000, 10_384))
PAGES = 100
OPTIONS = StoreOptions(
    capacity_bytes=(16 << 20) + (1 << 20), segment_bytes=4 << 20, free_space_floor=0, engine="sync", io_workers=2
)
REGIONS = ("payload", "headers", "digest table", "segment superblock", "anywhere")


class Range(NamedTuple):
    file: pathlib.Path
    first: int
    bytes: int


class Pages:
    """The pages of the test: keys, expected bytes, and memory to load into."""

    def __init__(self) -> None:
        source = np.random.default_rng(1)
        self.hashes = source.integers(0, 256, (PAGES, 32), dtype=np.uint8)
        self.expected = source.integers(0, 256, (PAGES, LAYOUT.object_bytes), dtype=np.uint8)
        self.memory = np.zeros_like(self.expected)

    def addresses(self, array: np.ndarray) -> np.ndarray:
        offsets, at = [], 0
        for _ in range(LAYOUT.parts):
            for region in LAYOUT.region_bytes:
                offsets.append(at)
                at += region
        starts = array.ctypes.data + np.arange(PAGES, dtype=np.uint64) * np.uint64(array.strides[0])
        return np.ascontiguousarray(starts[:, None] + np.array(offsets, dtype=np.uint64)[None, :])

    def store(self, folder: pathlib.Path) -> None:
        with Store(folder, OPTIONS) as store:
            space = store.namespace(b"corruption-tests", "{}", LAYOUT)
            if not space.set(self.hashes, self.addresses(self.expected)).all():
                raise SystemExit(f"storing failed: {store.last_problem}")

    def load(self, folder: pathlib.Path, verify: bool = True) -> tuple[int, int]:
        """Load every page by itself; returns how many had a wrong byte, and how many were refused."""
        self.memory.fill(0x5A)
        with Store(folder, msgspec.structs.replace(OPTIONS, verify_reads=verify)) as store:
            space = store.namespace(b"corruption-tests", "{}", LAYOUT)
            pieces = self.addresses(self.memory)
            ok = np.array([space.get(self.hashes[i : i + 1], pieces[i : i + 1])[0] for i in range(PAGES)])
        wrong = int((self.memory[ok] != self.expected[ok]).any(axis=1).sum())
        return wrong, int((~ok).sum())


def ranges_of(folder: pathlib.Path, region: str) -> list[Range]:
    """Where a region lies in the segment files."""
    if region == "payload":
        return [
            Range(page.file, page.offset + part * page.part_stride, page.part_bytes)
            for page in stored_pages(folder).values()
            for part in range(page.parts)
        ]
    ranges = []
    for file in sorted((folder / "segments").iterdir()):
        head = SEGMENT_HEAD.unpack(file.read_bytes()[: SEGMENT_HEAD.size])
        slots, digests, headers_at, digests_at = head[8:12]
        used = min(slots, PAGES)
        ranges.append(
            {
                "headers": Range(file, headers_at, used * 512),
                "digest table": Range(file, digests_at, used * digests * 8),
                "segment superblock": Range(file, 0, 512),
                "anywhere": Range(file, 0, file.stat().st_size),
            }[region]
        )
    return ranges


def flip(bits: set[tuple[pathlib.Path, int, int]]) -> None:
    for file, byte, bit in bits:
        with open(file, "r+b", buffering=0) as handle:
            handle.seek(byte)
            old = handle.read(1)
            handle.seek(byte)
            handle.write(struct.pack("B", old[0] ^ (1 << bit)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--rounds", type=int, help="rounds in all (default 1200; 120 with --quick)")
    parser.add_argument(
        "--folder", type=pathlib.Path, default=None, help="where the store is made (default: a temporary folder)"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rounds = options.rounds or (120 if options.quick else 1200)
    parent = options.folder or pathlib.Path(tempfile.gettempdir())
    work = pathlib.Path(tempfile.mkdtemp(prefix="tardis-corruption-", dir=parent))
    whole, damaged = work / "whole", work / "damaged"
    report = Report(options.json, machine_facts(parent))
    chance = random.Random(options.seed)
    broken = 0
    try:
        pages = Pages()
        pages.store(whole)
        if pages.load(whole) != (0, 0):
            raise SystemExit("the undamaged store does not give its pages back")
        rows = [(region, True) for region in REGIONS] + [("payload", False)]
        for number, (region, verify) in enumerate(rows):
            share = rounds // len(rows) + (number < rounds % len(rows))
            ranges = ranges_of(whole, region)
            wrong = refused = noticed = 0
            for _ in range(share):
                # A fresh copy: what a round quarantines is written to the store.
                shutil.rmtree(damaged, ignore_errors=True)
                shutil.copytree(whole, damaged)
                bits = set()
                for _ in range(chance.randint(1, 8)):
                    place = chance.choice(ranges)
                    file = damaged / place.file.relative_to(whole)
                    bits.add((file, place.first + chance.randrange(place.bytes), chance.randrange(8)))
                flip(bits)
                bad, missing = pages.load(damaged, verify)
                wrong += bad
                refused += missing
                noticed += missing > 0
            if verify:
                broken += wrong + (region == "payload") * (share - noticed)
            else:
                broken += wrong < share
            report.add(
                f"bit flips, {region}{'' if verify else ', not verified'}",
                f"sync on {file_system(parent)}",
                share,
                wrong,
                "wrong pages",
                expected="0" if verify else "1 or more a round: negative control",
                pages_refused=refused,
                rounds_with_a_refusal=noticed,
                pages_loaded=share * PAGES,
            )
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(f"{rounds} rounds, {broken} broken promises")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
