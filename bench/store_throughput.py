# SPDX-License-Identifier: Apache-2.0
"""Throughput of the native store from Python, beside plain preadv/pwritev and fio on the same folder in the same run.

Batches of pages, as SGLang hands them over (at most 128 pages and 256 MiB a call), are written, flushed, and read back
with and without verification, for pages of 128 KiB, 1 MiB and 8 MiB. The store's own path report says which engine and
whether O_DIRECT was in use. The limits:

preadv   the same bytes in the same batches by 8 threads, one file, O_DIRECT where the folder takes it
fio      (if installed) io_uring, O_DIRECT where the folder takes it, the page size as block size, 32 requests in flight

The ratio of a row is its rate over the better of the two. On tmpfs every number is a memory number, and labelled so.
After a read the memory is compared with what was written.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import mmap
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from common import Report, add_common_arguments, is_memory, machine_facts
from sglang_tardis.store import Namespace, ObjectLayout, Store, StoreOptions

KIB, MIB = 1 << 10, 1 << 20
# Page bytes -> parts (layers) of two regions (K, V) of equal size.
LAYOUTS = {128 * KIB: 4, MIB: 16, 8 * MIB: 32}
BATCH_PAGES, BATCH_BYTES = 128, 256 * MIB
IOV_MAX = 1024


class Memory:
    """A page-aligned area that holds `pages` pages, filled with random bytes."""

    def __init__(self, pages: int, page_bytes: int, fill: bool) -> None:
        self.area = mmap.mmap(-1, pages * page_bytes)
        self.bytes = np.frombuffer(self.area, dtype=np.uint8)
        self.view = memoryview(self.area)
        self.page_bytes = page_bytes
        if fill:
            random = np.random.default_rng(1)
            for at in range(0, self.bytes.size, 64 * MIB):
                part = self.bytes[at : at + 64 * MIB]
                part[:] = np.frombuffer(random.bytes(part.size), dtype=np.uint8)
        else:
            self.bytes[:] = 0  # touched, so that the first read does not pay for it

    def pieces(self, layout: ObjectLayout, first: int, count: int) -> np.ndarray:
        """Addresses of `count` pages from page `first`, shape (count, parts * regions), uint64."""
        offsets = np.concatenate([[0], np.cumsum(np.tile(layout.region_bytes, layout.parts))[:-1]]).astype(np.uint64)
        pages = np.uint64(self.bytes.ctypes.data) + np.arange(first, first + count, dtype=np.uint64) * np.uint64(
            self.page_bytes
        )
        return np.ascontiguousarray(pages[:, None] + offsets[None, :])


def timed(size: int, work: Callable[[], None]) -> float:
    """GB/s of one run of `work`."""
    started = time.perf_counter()
    work()
    return size / (time.perf_counter() - started) / 1e9


def drop_page_cache() -> None:
    """Forget cached file pages, where we may."""
    os.sync()
    try:
        pathlib.Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")
    except OSError:
        pass


def direct_flag(folder: pathlib.Path) -> int:
    """O_DIRECT if files in `folder` can be opened with it, else 0."""
    path = folder / "direct.probe"
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o600))
        return 0 if is_memory(folder) else os.O_DIRECT
    except OSError:
        return 0
    finally:
        path.unlink(missing_ok=True)


def page_layout(page_bytes: int) -> ObjectLayout:
    """Of a page of one of the sizes of LAYOUTS."""
    parts = LAYOUTS[page_bytes]
    return ObjectLayout(parts, (page_bytes // parts // 2,) * 2)


def bench_space(store: Store, layout: ObjectLayout) -> Namespace:
    """The namespace of the pages that are measured."""
    return store.namespace(bytes(16), json.dumps({"bench": layout.object_bytes}), layout)


def write_pages(store: Store, space: Namespace, hashes: np.ndarray, source: Memory, batch: int) -> None:
    """Store the pages of `source` in batches, and flush; RuntimeError unless all are stored."""
    for at in range(0, len(hashes), batch):
        keys = hashes[at : at + batch]
        parent = hashes[at - 1].tobytes() if at else None
        if not space.set(keys, source.pieces(space.layout, at, len(keys)), parent).all():
            raise RuntimeError(f"the store did not take pages {at} ... {at + len(keys)}: {store.last_problem}")
    store.flush()


def read_pages(space: Namespace, hashes: np.ndarray, target: Memory, batch: int) -> None:
    """Read the pages back in batches; RuntimeError if one is missing."""
    for at in range(0, len(hashes), batch):
        keys = hashes[at : at + batch]
        if not space.get(keys, target.pieces(space.layout, at, len(keys))).all():
            raise RuntimeError(f"pages {at} ... {at + len(keys)} were written but not read back")


def plain_files(folder: pathlib.Path, source: Memory, target: Memory, repetitions: int) -> tuple[float, float]:
    """GB/s of pwritev + fsync and of preadv: 8 threads, one page a call, one preallocated file."""
    path, step, total = folder / "plain.bin", source.page_bytes, source.bytes.size
    flags = direct_flag(folder)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, total)
        with concurrent.futures.ThreadPoolExecutor(8) as threads:

            def write() -> None:
                for done in threads.map(
                    lambda at: os.pwritev(descriptor, [source.view[at : at + step]], at), range(0, total, step)
                ):
                    if done != step:
                        raise OSError(f"{path}: short write of {done} of {step} bytes")
                os.fdatasync(descriptor)

            def read() -> None:
                for done in threads.map(
                    lambda at: os.preadv(descriptor, [target.view[at : at + step]], at), range(0, total, step)
                ):
                    if done != step:
                        raise OSError(f"{path}: short read of {done} of {step} bytes")

            writes = [timed(total, write) for _ in range(repetitions)]
            reads = []
            for _ in range(repetitions):
                drop_page_cache()
                reads.append(timed(total, read))
    finally:
        os.close(descriptor)
        path.unlink()
    return statistics.median(writes), statistics.median(reads)


def fio(folder: pathlib.Path, page_bytes: int, total: int, operation: str) -> float | None:
    """GB/s of fio, or None where it is not installed or cannot run there."""
    if shutil.which("fio") is None:
        return None
    direct = int(direct_flag(folder) != 0)
    command = [
        "fio",
        "--name=page",
        f"--directory={folder}",
        "--filename=fio.bin",
        f"--rw={operation}",
        f"--bs={page_bytes}",
        f"--size={total}",
        "--ioengine=io_uring",
        "--iodepth=32",
        f"--direct={direct}",
        "--end_fsync=1",
        "--output-format=json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"fio: {done.stderr.strip()[:200]}", file=sys.stderr)
        return None
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return job["write" if "write" in operation else "read"]["bw_bytes"] / 1e9


def store_rates(
    folder: pathlib.Path, layout: ObjectLayout, source: Memory, target: Memory, repetitions: int
) -> tuple[dict[str, float], dict, int]:
    """Median GB/s of write (with flush), verified read, unverified read; the path report; wrong bytes read back."""
    pages = source.bytes.size // source.page_bytes
    batch = max(1, min(BATCH_PAGES, BATCH_BYTES // source.page_bytes))
    rates: dict[str, list[float]] = {"write": [], "read, verified": [], "read, not verified": []}
    wrong, path = 0, {}
    for repetition in range(repetitions):
        hashes = np.random.default_rng(100 + repetition).integers(0, 256, (pages, 32), dtype=np.uint8)
        place = folder / "store"
        shutil.rmtree(place, ignore_errors=True)
        capacity = source.bytes.size * 2 + 256 * MIB
        for verify in (True, False):
            options = StoreOptions(
                capacity_bytes=capacity, object_bytes_hint=source.page_bytes, free_space_floor=0, verify_reads=verify
            )
            store = Store(place, options)
            space = bench_space(store, layout)
            if verify:
                path = store.path_report()
                write = partial(write_pages, store, space, hashes, source, batch)
                rates["write"].append(timed(source.bytes.size, write))
            drop_page_cache()
            target.bytes[:] = 0
            read = partial(read_pages, space, hashes, target, batch)
            rates["read, verified" if verify else "read, not verified"].append(timed(source.bytes.size, read))
            wrong += int(np.count_nonzero(source.bytes != target.bytes))
            store.close()
        shutil.rmtree(place, ignore_errors=True)
    return {name: statistics.median(values) for name, values in rates.items()}, path, wrong


def measured_folder(description: str | None, name: str, repetitions: int) -> argparse.Namespace:
    """The arguments of a script that measures a folder; `folder` is a new one in it, `total` the bytes a size."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument(
        "--folder", type=pathlib.Path, required=True, help="an existing folder on the file system to measure"
    )
    parser.add_argument("--mib", type=int, help="bytes per page size (default 2048 MiB, with --quick 256)")
    parser.add_argument(
        "--repetitions", type=int, help=f"the median of that many (default {repetitions}, with --quick 1)"
    )
    arguments = parser.parse_args()
    if not arguments.folder.is_dir():
        parser.error(f"--folder: {arguments.folder} is not an existing folder")
    arguments.folder = arguments.folder / f"{name}.{os.getpid()}"
    arguments.folder.mkdir()
    arguments.total = (arguments.mib or (256 if arguments.quick else 2048)) * MIB
    arguments.repetitions = arguments.repetitions or (1 if arguments.quick else repetitions)
    return arguments


def main() -> int:
    """Measure; 1 if a byte came back wrong."""
    arguments = measured_folder(__doc__, "store-throughput", 3)
    folder, total, repetitions = arguments.folder, arguments.total, arguments.repetitions
    medium = "tmpfs (memory, no disk)" if is_memory(folder) else "disk, page cache dropped"
    report = Report(arguments.json, machine_facts(folder), medium=medium, o_direct=bool(direct_flag(folder)))
    print(f"{folder}: {medium}; {total // MIB} MiB a size, median of {repetitions}")
    wrong = 0
    try:
        for page_bytes in LAYOUTS:
            layout = page_layout(page_bytes)
            source, target = (
                Memory(total // page_bytes, page_bytes, True),
                Memory(total // page_bytes, page_bytes, False),
            )
            plain_write, plain_read = plain_files(folder, source, target, repetitions)
            fio_write, fio_read = (fio(folder, page_bytes, total, operation) for operation in ("write", "randread"))
            (folder / "fio.bin").unlink(missing_ok=True)
            rates, path, bad = store_rates(folder, layout, source, target, repetitions)
            wrong += bad
            size = f"{page_bytes // KIB}KiB"
            limits = {"write": max(plain_write, fio_write or 0), "read": max(plain_read, fio_read or 0)}
            for name, rate in rates.items():
                report.add(name, "tardis", size, rate, "GB/s", limits[name.split(",")[0]], medium=medium)
            for name, plain, peer in (("write", plain_write, fio_write), ("read", plain_read, fio_read)):
                report.add(name, "preadv/pwritev", size, plain, "GB/s", medium=medium)
                if peer is not None:
                    report.add(name, "fio", size, peer, "GB/s", medium=medium)
            report.note(path=path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.note(wrong_bytes=wrong)
    print(f"path in use: {json.dumps(path)}")
    print(f"{wrong} wrong bytes read back")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
