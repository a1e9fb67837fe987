# SPDX-License-Identifier: Apache-2.0
"""Reads of what was just written, the first time and then again, in each folder that is named.

On a tmpfs of small pages the first read of a page moves it to the kernel's list of pages in use, under a lock that all
readers share; with huge pages (`mount -o huge=always`) that is done once for 512 times as much. A drive that is read
with direct I/O knows no such thing. Threads read pieces of 1 MiB into buffers of their own, which stay in the caches,
as the software controller's do.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pathlib
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from common import Report, add_common_arguments, file_system_facts, machine_facts

MIB = 1 << 20


def read(descriptor: int, size: int, pool: ThreadPoolExecutor, threads: int) -> float:
    """GB/s of reading the file once."""
    pieces = itertools.count(0, MIB)  # handed out under the GIL

    def work() -> None:
        buffer = bytearray(MIB)
        while (at := next(pieces)) < size:
            if os.preadv(descriptor, [buffer], at) != MIB:
                raise OSError(f"expected {MIB} bytes at {at}, found less")

    began = time.perf_counter()
    for done in [pool.submit(work) for _ in range(threads)]:
        done.result()
    return size / (time.perf_counter() - began) / 1e9


def measure(folder: pathlib.Path, size: int, threads: int, repetitions: int) -> tuple[list[float], list[float]]:
    """Rates of first and of second reads, GB/s; each pair of a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    path, block = folder / f"first-reads.{os.getpid()}", os.urandom(MIB) * 8
    first, again = [], []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repetitions):
            try:
                with open(path, "wb+", buffering=0) as file:
                    for at in range(0, size, len(block)):
                        file.write(block[: size - at])
                    first.append(read(file.fileno(), size, pool, threads))
                    again.append(read(file.fileno(), size, pool, threads))
            finally:
                path.unlink(missing_ok=True)
    return first, again


def main() -> int:
    """Measure every folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("folders", nargs="+", type=pathlib.Path, metavar="FOLDER")
    parser.add_argument("--threads", type=int, default=min(12, len(os.sched_getaffinity(0))))
    arguments = parser.parse_args()
    size, repetitions = (256 * MIB, 3) if arguments.quick else (4096 * MIB, 5)
    report = Report(arguments.json, machine_facts(*arguments.folders))
    for folder in arguments.folders:
        first, again = measure(folder, size, arguments.threads, repetitions)
        system, named = file_system_facts(folder), f"{arguments.threads} threads, {size // MIB} MiB"
        limit = statistics.median(again)
        report.add("read again", system, named, limit, "GB/s")
        report.add("first read", system, named, statistics.median(first), "GB/s", limit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
