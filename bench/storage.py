# SPDX-License-Identifier: Apache-2.0
"""The store against the drive it lies on: reads, writes and processor time, beside fio and SGLang's `file` backend.

Objects of 128 KiB, 1 MiB and 8 MiB move in batches of 128 through the Python face of the store, as SGLang's pages do.
Everything runs one after the other on one folder, the store and fio in turn within each repetition and each of them
first in every second one, so that what else the machine does meets them alike; rows are medians.

read      every object once, with digests verified; the page cache is dropped before each repetition
write     new objects into a full store, over evicted ones, with one fdatasync for every 128 objects (in the background,
          as fio's: `--fdatasync=128`), and a last flush inside the measured time; fio writes over its file
fill      the same into an empty folder, so that the store makes its segments on the way; fio writes a file that it has
          reserved but never written

tardis    this store
fio       io_uring, O_DIRECT, blocks of the object's size, depth 64
file      sglang.srt.mem_cache.hicache_storage.HiCacheFile, one thread, as SGLang uses it: through the page cache, and
          its writes are not flushed, so that its write rows are no measure of the drive

Each row has the processor seconds that the system took for a GB, its threads and the kernel's work for them included
(fio: of its job, and null where it does not count the kernel's threads). `ratio` is the rate over fio's in the same
run; where fio is not installed there is no limit and no ratio. On tmpfs there is no drive and no O_DIRECT: fio gets
--direct=0, every row is labelled, and the store is read with 4 and 8 copy threads (io_workers). Bytes read are compared
with those written.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from common import Report, is_memory, machine_facts
from sglang_tardis.store import Store, StoreOptions
from store_throughput import (
    LAYOUTS,
    MIB,
    Memory,
    bench_space,
    direct_flag,
    drop_page_cache,
    measured_folder,
    page_layout,
    read_pages,
    write_pages,
)

BATCH = 128
DEPTH = 64
FLOOR_READ = {128 << 10: 0.90, 1 << 20: 0.95, 8 << 20: 0.95}
FLOOR_WRITE, CPU_LIMIT = 0.95, 0.15
COPY_THREADS = (4, 8)


@dataclasses.dataclass
class Sample:
    """One measured run: GB/s, and processor seconds per GB."""

    rate: float
    cpu: float | None  # None: not known


def processor_seconds() -> float:
    """User and system time of this process so far, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measured(size: int, work: Callable[[], None]) -> Sample:
    """One run of `work`, which moves `size` bytes."""
    cpu, started = processor_seconds(), time.perf_counter()
    work()
    elapsed = time.perf_counter() - started
    return Sample(size / elapsed / 1e9, (processor_seconds() - cpu) / size * 1e9)


def medians(samples: list[Sample]) -> Sample:
    """The median of each number by itself."""
    known = [s.cpu for s in samples if s.cpu is not None]
    return Sample(statistics.median(s.rate for s in samples), statistics.median(known) if known else None)


class Fio:
    """fio on one file in `folder`; `run` gives None where it is not installed or cannot run."""

    def __init__(self, folder: pathlib.Path, page_bytes: int, total: int) -> None:
        self.file = folder / "fio.bin"
        self.page_bytes, self.total = page_bytes, total
        self.direct = int(direct_flag(folder) != 0)
        self.command = shutil.which("fio")

    def run(self, operation: str, *extra: str) -> Sample | None:
        """One job over the whole file."""
        if self.command is None:
            return None
        command = [
            self.command,
            "--name=object",
            f"--filename={self.file}",
            f"--rw={operation}",
            f"--bs={self.page_bytes}",
            f"--size={self.total}",
            "--ioengine=io_uring",
            f"--iodepth={DEPTH}",
            f"--direct={self.direct}",
            "--output-format=json",
            *extra,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"fio: {done.stderr.strip()[:300]}", file=sys.stderr)
            return None
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        part = job["read" if operation == "read" else "write"]
        if part["io_bytes"] != self.total:
            print(f"fio moved {part['io_bytes']} of {self.total} bytes", file=sys.stderr)
            return None
        # Percent of the job's own run time, which does not hold the making of its file.
        cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * part["runtime"] / 1e3
        # Without O_DIRECT the kernel's own io_uring threads copy, and fio does not count those.
        return Sample(part["bw_bytes"] / 1e9, cpu / self.total * 1e9 if self.direct else None)

    def write(self, reused: bool) -> Sample | None:
        """One fdatasync for every 128 blocks; the whole written before the job ends."""
        if not reused:
            self.file.unlink(missing_ok=True)
        return self.run("write", f"--fdatasync={BATCH}", "--end_fsync=1")

    def read(self) -> Sample | None:
        """From the drive: the file is not in the page cache, since O_DIRECT wrote it and the cache was dropped."""
        drop_page_cache()
        return self.run("read")


class FileBackend:
    """SGLang's `file` backend in `folder`, one file a page."""

    def __init__(self, folder: pathlib.Path, source: Memory, target: Memory) -> None:
        import torch
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

        os.environ.pop("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", None)
        self.folder = folder / "file"
        config = HiCacheStorageConfig(
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=False,
            enable_storage_metrics=False,
            is_page_first_layout=True,
            model_name="bench",
            extra_config={"file_storage_path": str(self.folder)},
        )
        self.backend = HiCacheFile(config)
        self.pages = source.bytes.size // source.page_bytes
        self.total = source.bytes.size
        self.source = list(torch.from_numpy(source.bytes).view(self.pages, -1))
        self.target = list(torch.from_numpy(target.bytes).view(self.pages, -1))

    def _keys(self, repetition: int) -> list[str]:
        return [f"{repetition:04x}{page:060x}" for page in range(self.pages)]

    def write(self, repetition: int) -> Sample:
        """All pages under new keys, in batches."""
        keys = self._keys(repetition)

        def work() -> None:
            for at in range(0, self.pages, BATCH):
                if not self.backend.batch_set(keys[at : at + BATCH], self.source[at : at + BATCH]):
                    raise RuntimeError("the file backend did not take a page")

        return measured(self.total, work)

    def read(self, repetition: int) -> Sample:
        """All pages of that repetition, in batches, from a cold page cache."""
        keys = self._keys(repetition)
        drop_page_cache()

        def work() -> None:
            for at in range(0, self.pages, BATCH):
                found = self.backend.batch_get(keys[at : at + BATCH], self.target[at : at + BATCH])
                if any(page is None for page in found):
                    raise RuntimeError("the file backend lost a page")

        return measured(self.total, work)

    def forget(self) -> None:
        """Delete the files, so that every repetition needs the same room."""
        for path in self.folder.iterdir():
            path.unlink()


class Tardis:
    """The store in `folder`, made anew with each object size."""

    def __init__(self, folder: pathlib.Path, page_bytes: int, source: Memory, target: Memory, workers: int) -> None:
        self.place, self.workers = folder / "store", workers
        self.source, self.target, self.page_bytes = source, target, page_bytes
        self.layout = page_layout(page_bytes)
        self.pages = source.bytes.size // page_bytes
        self.store: Store | None = None

    def open(self, verify: bool = True) -> None:
        """An empty store with room for the pages and a quarter more."""
        self.close()
        shutil.rmtree(self.place, ignore_errors=True)
        options = StoreOptions(
            capacity_bytes=self.source.bytes.size * 5 // 4 + 64 * MIB,
            object_bytes_hint=self.page_bytes,
            free_space_floor=0,
            flush_bytes=BATCH * self.page_bytes,  # one fdatasync for every 128 objects
            io_workers=self.workers,
            verify_reads=verify,
        )
        self.store = Store(self.place, options)
        self.space = bench_space(self.store, self.layout)
        for memory in (self.source, self.target):  # as SGLang's host pool is, once
            self.store.register_memory(memory.bytes.ctypes.data, memory.bytes.size)

    def _hashes(self, repetition: int) -> np.ndarray:
        return np.random.default_rng(1000 + repetition).integers(0, 256, (self.pages, 32), dtype=np.uint8)

    def write(self, repetition: int) -> Sample:
        """New objects in batches, and a flush."""
        work = partial(write_pages, self.store, self.space, self._hashes(repetition), self.source, BATCH)
        return measured(self.source.bytes.size, work)

    def read(self, repetition: int) -> Sample:
        """The objects of that repetition in batches, from a cold page cache."""
        work = partial(read_pages, self.space, self._hashes(repetition), self.target, BATCH)
        drop_page_cache()
        return measured(self.source.bytes.size, work)

    def close(self) -> None:
        """Close the store, if one is open."""
        if self.store is not None:
            self.store.close()
            self.store = None


def add_rows(report: Report, case: str, size: str, floor: float, found: dict[str, list[Sample]], medium: str) -> None:
    """The rows of one case: every system beside fio."""
    peer = medians(found["fio"]) if found.get("fio") else None
    for system, samples in found.items():
        if system == "fio" and not samples:
            report.note(fio="not installed or could not run: no limits")
            continue
        value = medians(samples)
        limit = peer.rate if peer and system != "fio" else None
        report.add(
            case,
            system,
            size,
            value.rate,
            "GB/s",
            limit,
            cpu_seconds_per_gb=None if value.cpu is None else round(value.cpu, 4),
            target_ratio=floor if system.startswith("tardis") else None,
            target_cpu=CPU_LIMIT if case == "read" and system.startswith("tardis") else None,
            samples=[round(s.rate, 3) for s in samples],
            cpu_samples=[None if s.cpu is None else round(s.cpu, 4) for s in samples],
            medium=medium,
        )
        if value.cpu is not None:
            print(f"{'':28s} {system:24s} {'':8s} {value.cpu:10.3f} CPU s/GB")


def measure(
    report: Report, folder: pathlib.Path, page_bytes: int, total: int, repetitions: int, medium: str
) -> tuple[int, dict]:
    """All rows of one object size; wrong bytes read back, and the store's path report."""
    pages = total // page_bytes
    source, target = Memory(pages, page_bytes, True), Memory(pages, page_bytes, False)
    memory = is_memory(folder)
    stores = {
        f"tardis, {workers} threads" if workers else "tardis": Tardis(
            folder / f"w{workers}", page_bytes, source, target, workers
        )
        for workers in (COPY_THREADS if memory else (0,))
    }
    for store in stores.values():
        store.place.parent.mkdir(exist_ok=True)
    fio = Fio(folder, page_bytes, total)
    backend = FileBackend(folder, source, target)
    systems = ["fio", *stores, "file"]
    rows: dict[str, dict[str, list[Sample]]] = {case: {s: [] for s in systems} for case in ("fill", "write", "read")}
    del rows["fill"]["file"]  # for it, a fill is a write
    wrong, path = 0, {}

    def check() -> None:
        nonlocal wrong
        wrong += int(np.count_nonzero(source.bytes != target.bytes))
        target.bytes[:] = 0

    def compare(case: str, name: str, own: Callable[[], Sample], peer: Callable[[], Sample | None], swap: bool) -> None:
        """The store and fio one after the other; who is first changes with the repetition."""
        for system, run in ((name, own), ("fio", peer)) if swap else (("fio", peer), (name, own)):
            if (sample := run()) is not None:
                rows[case][system].append(sample)

    for repetition in range(repetitions):
        swap = repetition % 2 == 1
        key = 4 * repetition
        for name, store in stores.items():
            store.open()
            path = store.store.path_report()
            compare("fill", name, partial(store.write, key), partial(fio.write, reused=False), swap)
            compare("read", name, partial(store.read, key), fio.read, swap)
            check()
            store.write(key + 1)  # takes the rest of the room: what comes next goes over old objects
            compare("write", name, partial(store.write, key + 2), partial(fio.write, reused=True), swap)
            store.close()
            shutil.rmtree(store.place)
        rows["write"]["file"].append(backend.write(repetition))
        rows["read"]["file"].append(backend.read(repetition))
        check()
        backend.forget()
    fio.file.unlink(missing_ok=True)
    size = f"{page_bytes >> 10}KiB"
    for case, found in rows.items():
        floor = FLOOR_READ[page_bytes] if case == "read" else FLOOR_WRITE
        add_rows(report, case, size, floor, found, medium)
    return wrong, path


def main() -> int:
    """Measure; 1 if a byte came back wrong."""
    arguments = measured_folder(__doc__, "storage-bench", 5)
    folder, total, repetitions = arguments.folder, arguments.total, arguments.repetitions
    medium = "tmpfs (memory, no drive)" if is_memory(folder) else "drive, page cache dropped"
    report = Report(arguments.json, machine_facts(folder), medium=medium, depth=DEPTH, batch=BATCH)
    print(f"{folder}: {medium}; {total // MIB} MiB a size, median of {repetitions}")
    wrong = 0
    try:
        for page_bytes in LAYOUTS:
            bad, path = measure(report, folder, page_bytes, total, repetitions, medium)
            wrong += bad
            report.note(path=path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.note(wrong_bytes=wrong)
    print(f"{wrong} wrong bytes read back")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
