# SPDX-License-Identifier: Apache-2.0
"""The software NVMe controller with the driver on it: commands from memory, files beside fio, a store beside io_uring.

All of it one after the other in one run; what is compared takes turns within each repetition, and each is first in
every second one, so that what else the machine does meets them alike. Rows are medians.

commands   reads of one block, 256 in flight on one queue pair, from a namespace in memory. The value is what a core of
           the controller serves: commands by the processor time of its thread; `per_second` is the rate on the clock.
           The limit is what a core does of the copies alone, of the same blocks from the same memory
latency    the same, one in flight: median and 99th percentile
file       every block of one file in order through driver, controller and file medium, depth 64; a write ends with a
           flush. The limit is fio on the same file: io_uring, O_DIRECT, same blocks and depth, `--end_fsync=1`
store      the store on a volume of a namespace on one file: pages into an empty store (fill), read back with digests
           verified after the store was opened anew (get), and stored over old ones (set); a flush is inside fill and
           set. The limit is the same store with its segments in files on io_uring, on the same file system

Bytes that were read are compared with those written. Each row has the processor seconds for a GB, the controller's
threads included; `target_ratio` is what is asked for, where something is. On tmpfs there is no O_DIRECT and no drive:
fio gets --direct=0, and the file says so (`medium`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from common import (
    Report,
    add_common_arguments,
    add_program_argument,
    is_memory,
    machine_facts,
    required_program,
)

PROGRAM = "tardis_nvme_bench"
DEPTH = 64
COMMANDS_DEPTH = 256
BLOCKS_KIB = (4, 32, 128, 1024)
TARGET_BLOCK_KIB = 128  # from there on a file behind the controller is to keep up with fio
PAGES_KIB = (128, 1024, 8192)
TARGET = 0.9
TIMEOUT_S = 600


@dataclasses.dataclass
class Sample:
    """One measured run: GB/s, and processor seconds per GB."""

    rate: float
    cpu: float | None  # None: not known


class Bench:
    """The native program and fio in one folder."""

    def __init__(self, program: pathlib.Path, folder: pathlib.Path, total: int) -> None:
        self.program, self.folder, self.total = program, folder, total
        self.direct = int(not is_memory(folder))
        self.fio = shutil.which("fio")
        self.wrong = 0

    def run(self, **arguments: Any) -> list[dict[str, Any]]:
        """The program's lines; RuntimeError if it failed for another reason than wrong bytes."""
        command = [str(self.program), *(f"{name}={value}" for name, value in arguments.items())]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        wrong = sum(line.get("wrong_bytes", 0) for line in lines)
        if not lines or (done.returncode and not wrong):
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
        self.wrong += wrong
        return lines

    def file(self, operation: str, block_kib: int) -> Sample:
        """One pass over the file through driver and controller."""
        (line,) = self.run(
            case="file",
            folder=self.folder,
            op=operation,
            block_kib=block_kib,
            depth=DEPTH,
            size_mib=self.total >> 20,
        )
        return Sample(line["gb_per_second"], line["cpu_seconds_per_gb"])

    def fio_file(self, operation: str, block_kib: int) -> Sample | None:
        """The same by fio; None where it is not installed or cannot run."""
        if self.fio is None:
            return None
        command = [
            self.fio,
            "--name=file",
            f"--filename={self.folder / 'tardis-nvme-bench.data'}",
            f"--rw={operation}",
            f"--bs={block_kib}k",
            f"--size={self.total}",
            "--ioengine=io_uring",
            f"--iodepth={DEPTH}",
            f"--direct={self.direct}",
            "--end_fsync=1",
            "--output-format=json",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
        if done.returncode:
            print(f"fio: {done.stderr.strip()[:300]}", file=sys.stderr)
            return None
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        part = job[operation]
        if part["io_bytes"] != self.total:
            print(f"fio moved {part['io_bytes']} of {self.total} bytes", file=sys.stderr)
            return None
        cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * part["runtime"] / 1e3
        # Without O_DIRECT the kernel's own io_uring threads copy, and fio does not count those.
        return Sample(part["bw_bytes"] / 1e9, cpu / self.total * 1e9 if self.direct else None)

    def store(self, device: str, page_kib: int) -> dict[str, Sample]:
        """One store from empty to full: rates of fill, get and set."""
        batch = max(1, min(128, (64 << 10) // page_kib))  # of at most 64 MiB
        lines = self.run(
            case="store",
            folder=self.folder,
            device=device,
            page_kib=page_kib,
            size_mib=self.total >> 20,
            batch=batch,
        )
        return {line["op"]: Sample(line["gb_per_second"], line["cpu_seconds_per_gb"]) for line in lines}


def add_pair(
    report: Report, case: str, size: str, own: tuple[str, list[Sample]], peer: tuple[str, list[Sample]], target: bool
) -> None:
    """Both systems of a comparison; the second one is the limit of the first."""
    limit = statistics.median(s.rate for s in peer[1]) if peer[1] else None
    for name, samples, bound in ((*peer, None), (*own, limit)):
        if not samples:
            continue
        known = [s.cpu for s in samples if s.cpu is not None]
        report.add(
            case,
            name,
            size,
            statistics.median(s.rate for s in samples),
            "GB/s",
            bound,
            cpu_seconds_per_gb=round(statistics.median(known), 4) if known else None,
            target_ratio=TARGET if target and name == own[0] else None,
            samples=[round(s.rate, 3) for s in samples],
        )


def measure_commands(report: Report, bench: Bench, repetitions: int, seconds: int) -> None:
    """Rates at depth 256 and times at depth 1 from memory."""
    for block in (4096, 512):
        size = "4KiB" if block == 4096 else "512B"
        lines = [
            bench.run(case="commands", block=block, depth=COMMANDS_DEPTH, seconds=seconds)[0]
            for _ in range(repetitions)
        ]

        def median(name: str, of: list[dict[str, Any]] = lines) -> float:
            return statistics.median(line[name] for line in of)

        report.add(
            "commands",
            "one controller core",
            size,
            median("per_controller_core_second"),
            "1/s",
            median("copies_per_core_second"),
            per_second=round(median("per_second")),
            per_client_core_second=round(median("per_client_core_second")),
            samples=[line["per_controller_core_second"] for line in lines],
        )
    lines = [bench.run(case="commands", depth=1, seconds=seconds)[0] for _ in range(repetitions)]
    for name in ("p50_us", "p99_us"):
        report.add("latency", f"{name[:3]}, depth 1", "4KiB", statistics.median(line[name] for line in lines), "us")


def take_turns(repetitions: int, first: Callable[[], None], second: Callable[[], None]) -> None:
    """Both, as often as that, in changing order."""
    for repetition in range(repetitions):
        for run in (second, first) if repetition % 2 else (first, second):
            run()


def measure_files(report: Report, bench: Bench, repetitions: int) -> None:
    """One file behind the controller beside fio."""
    for block_kib in BLOCKS_KIB:
        for operation in ("read", "write"):
            own: list[Sample] = []
            peer: list[Sample] = []

            def run_own(to: list[Sample] = own, operation: str = operation, block_kib: int = block_kib) -> None:
                to.append(bench.file(operation, block_kib))

            def run_peer(to: list[Sample] = peer, operation: str = operation, block_kib: int = block_kib) -> None:
                if (sample := bench.fio_file(operation, block_kib)) is not None:
                    to.append(sample)

            bench.file("write", 1024)  # the file is there, and really written, for whoever comes first
            take_turns(repetitions, run_own, run_peer)
            target = block_kib >= TARGET_BLOCK_KIB
            names = ("soft NVMe on a file", "fio")
            add_pair(report, f"file {operation}", f"{block_kib}KiB", (names[0], own), (names[1], peer), target)


def measure_stores(report: Report, bench: Bench, repetitions: int) -> None:
    """The store on a soft namespace beside the same store on files."""
    for page_kib in PAGES_KIB:
        found: dict[str, list[dict[str, Sample]]] = {"nvme": [], "io_uring": []}

        def run(device: str, to: dict[str, list[dict[str, Sample]]] = found, page_kib: int = page_kib) -> None:
            to[device].append(bench.store(device, page_kib))

        take_turns(repetitions, lambda run=run: run("nvme"), lambda run=run: run("io_uring"))
        for operation in ("fill", "get", "set"):
            own, peer = ([samples[operation] for samples in found[device]] for device in ("nvme", "io_uring"))
            names = ("store on soft NVMe", "store on io_uring")
            add_pair(
                report,
                f"store {operation}",
                f"{page_kib}KiB",
                (names[0], own),
                (names[1], peer),
                operation != "fill",
            )


def main() -> int:
    """Measure; 1 if a byte came back wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    add_program_argument(parser, PROGRAM)
    parser.add_argument(
        "--folder", type=pathlib.Path, required=True, help="an existing folder on the file system to measure"
    )
    parser.add_argument("--mib", type=int, help="bytes a case moves (default 1024 MiB, with --quick 64)")
    parser.add_argument("--repetitions", type=int, help="the median of that many (default 5, with --quick 1)")
    arguments = parser.parse_args()
    program = required_program(parser, arguments.program, PROGRAM)
    if not arguments.folder.is_dir():
        parser.error(f"--folder: {arguments.folder} is not an existing folder")
    total = (arguments.mib or (64 if arguments.quick else 1024)) << 20
    repetitions = arguments.repetitions or (1 if arguments.quick else 5)
    folder = arguments.folder / f"nvme-bench.{os.getpid()}"
    medium = "tmpfs (memory, no drive)" if is_memory(arguments.folder) else "drive, O_DIRECT"
    report = Report(
        arguments.json, machine_facts(arguments.folder), medium=medium, depth=DEPTH, load_before=os.getloadavg()
    )
    print(f"{arguments.folder}: {medium}; {total >> 20} MiB a case, median of {repetitions}")
    folder.mkdir()
    bench = Bench(program, folder, total)
    try:
        measure_commands(report, bench, repetitions, 1 if arguments.quick else 3)
        measure_files(report, bench, repetitions)
        measure_stores(report, bench, repetitions)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if bench.fio is None:
        report.note(fio="not installed: files have no limit")
    report.note(wrong_bytes=bench.wrong, load_after=os.getloadavg())
    print(f"{bench.wrong} wrong bytes read back")
    return 1 if bench.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
