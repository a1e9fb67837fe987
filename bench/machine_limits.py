# SPDX-License-Identifier: Apache-2.0
"""Rates that bound a restore on this machine, as JSON: memory copy, file reads into memory, host to GPU.

`python bench/machine_limits.py --folder /dev/shm`: every number is the best of three passes, bytes per second / 1e9.
The first read of what was just written stands beside it: on a tmpfs of small pages the kernel then moves each of them
to its list of pages in use.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import pathlib
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

MIB = 1 << 20


def _best(size: int, work: Callable[[], object], passes: int = 3) -> float:
    best = 0.0
    for _ in range(passes):
        started = time.perf_counter()
        work()
        best = max(best, size / (time.perf_counter() - started) / 1e9)
    return round(best, 2)


def memory_copy(size: int, threads: int) -> float:
    """Rate of memcpy with `threads` threads, between two private areas."""
    source, target = (mmap.mmap(-1, size) for _ in range(2))
    source_at, target_at = (ctypes.addressof(ctypes.c_char.from_buffer(x)) for x in (source, target))
    for area in (source_at, target_at):
        ctypes.memset(area, 1, size)
    step = 8 * MIB
    with ThreadPoolExecutor(threads) as pool:
        rate = _best(
            size,
            lambda: list(
                pool.map(
                    lambda at: ctypes.memmove(target_at + at, source_at + at, min(step, size - at)),
                    range(0, size, step),
                )
            ),
        )
    return rate


def file_read(folder: pathlib.Path, size: int, threads: int, step: int = 8 * MIB) -> tuple[float, float]:
    """Rates of preadv of one file into memory with `threads` threads: the first after it was written, and the best of
    three more. On a disk this may come from the page cache.
    """
    path = folder / f"limit.{os.getpid()}"
    target = mmap.mmap(-1, size)
    view = memoryview(target)
    try:
        view[::4096] = bytes(-(-size // 4096))  # or the first read would wait for this memory, too
        with open(path, "wb", buffering=0) as file:
            block = os.urandom(MIB) * 8
            for at in range(0, size, len(block)):
                file.write(block[: size - at])
        descriptor = os.open(path, os.O_RDONLY)
        try:
            with ThreadPoolExecutor(threads) as pool:

                def read() -> None:
                    list(pool.map(lambda at: os.preadv(descriptor, [view[at : at + step]], at), range(0, size, step)))

                return _best(size, read, passes=1), _best(size, read)
        finally:
            os.close(descriptor)
    finally:
        path.unlink(missing_ok=True)


def host_to_gpu(size: int) -> float:
    """One copy from pinned memory to the GPU."""
    import torch

    host = torch.empty(size, dtype=torch.uint8, pin_memory=True).fill_(1)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")

    def copy() -> None:
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()

    copy()
    return _best(size, copy)


def main() -> int:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="folder whose reads are measured")
    parser.add_argument("--mib", type=int, default=2048, help="bytes per measurement (default 2048 MiB)")
    parser.add_argument("--gpu", action="store_true", help="also copy to the GPU (imports torch)")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    size, cores = arguments.mib * MIB, min(16, len(os.sched_getaffinity(0)))
    result: dict[str, float | int] = {
        "threads": cores,
        "memcpy_gbps": memory_copy(size, cores),
        "memcpy_1_thread_gbps": memory_copy(min(size, 512 * MIB), 1),
    }
    result["file_first_read_gbps"], result["file_read_gbps"] = file_read(arguments.folder, size, cores)
    _, result["file_read_8_threads_gbps"] = file_read(arguments.folder, size, 8)
    if arguments.gpu:
        result["host_to_gpu_gbps"] = host_to_gpu(min(size, 1024 * MIB))
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
