# SPDX-License-Identifier: Apache-2.0
"""A store over several drives: its rate over that of the drives one by one.

`--folder` is given once for each drive. The same pages are written, flushed and read back (in batches of 128, page
cache dropped) by a store on each folder alone, and by one store over all of them, with whole objects on the drives and
with layers striped over them. The limit of a rate over several drives is the sum of what the store reached on each
alone. Bytes read are compared with those written.

On a machine with one drive the folders may be loop devices that the kernel slows down: see "Several drives" in
bench/README.md. Such numbers show that the drives work at the same time, and nothing else.
"""

from __future__ import annotations

import argparse
import pathlib
import shutil
import statistics
import sys
from functools import partial

import numpy as np
from common import Report, add_common_arguments, machine_facts
from sglang_tardis.store import Store, StoreOptions
from store_throughput import MIB, Memory, bench_space, drop_page_cache, page_layout, read_pages, timed, write_pages

BATCH = 128


def run_store(
    folders: list[pathlib.Path], placement: str, page_bytes: int, source: Memory, target: Memory
) -> tuple[float, float]:
    """GB/s of writing all pages with a flush, and of reading them back; RuntimeError if a byte is wrong."""
    own, *more = [folder / "paths-bench" for folder in folders]
    layout = page_layout(page_bytes)
    pages = source.bytes.size // page_bytes
    options = StoreOptions(
        capacity_bytes=source.bytes.size * 5 // 4 + 64 * MIB,
        object_bytes_hint=page_bytes,
        free_space_floor=0,
        more_paths=more,
        placement=placement,
    )
    hashes = np.random.default_rng(7).integers(0, 256, (pages, 32), dtype=np.uint8)
    target.bytes[:] = 0
    try:
        with Store(own, options) as store:
            space = bench_space(store, layout)
            written = timed(source.bytes.size, partial(write_pages, store, space, hashes, source, BATCH))
            drop_page_cache()
            read = timed(source.bytes.size, partial(read_pages, space, hashes, target, BATCH))
    finally:
        for folder in (own, *more):
            shutil.rmtree(folder, ignore_errors=True)
    if not np.array_equal(source.bytes, target.bytes):
        raise RuntimeError("wrong bytes were read back")
    return written, read


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument(
        "--folder", type=pathlib.Path, action="append", required=True, help="on one drive; give one for each drive"
    )
    parser.add_argument("--mib", type=int, help="payload of a run (default 512; 128 with --quick)")
    parser.add_argument("--repetitions", type=int, default=3, help="runs, of which the median counts (default 3)")
    parser.add_argument("--note", help="what the folders are, for the result file")
    options = parser.parse_args()
    total = (options.mib or (128 if options.quick else 512)) * MIB
    report = Report(options.json, machine_facts(*options.folder), batch=BATCH, folders=options.note)
    for page_bytes in (128 << 10, MIB):
        source, target = Memory(total // page_bytes, page_bytes, True), Memory(total // page_bytes, page_bytes, False)
        sums = [0.0, 0.0]
        settings = [([folder], "objects") for folder in options.folder]
        settings += [(options.folder, placement) for placement in ("objects", "layers")]
        for folders, placement in settings:
            runs = [run_store(folders, placement, page_bytes, source, target) for _ in range(options.repetitions)]
            rates = [statistics.median(rate) for rate in zip(*runs, strict=True)]
            alone = len(folders) == 1
            system = f"drive {options.folder.index(folders[0]) + 1} alone" if alone else f"all drives, {placement}"
            for i, case in enumerate(("write", "read")):
                limit = None if alone else sums[i]
                report.add(case, system, f"{page_bytes >> 10}KiB", rates[i], "GB/s", limit)
                if alone:
                    sums[i] += rates[i]
    return 0


if __name__ == "__main__":
    sys.exit(main())
