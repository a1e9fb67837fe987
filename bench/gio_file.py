# SPDX-License-Identifier: Apache-2.0
"""Scattered records of a file into HBM: rings over a file beside fio, and cuFile beside preads of as many threads.

Every record of one file once, in random order, into scattered places in HBM; the bytes are compared once for each size
before it is measured, after what was there was poisoned.

gio ring ...     `tardis_gpu_gio_file_bench`: the GPU submits, the software controller reads the file (io_uring,
                 O_DIRECT), SMs land; 256 commands in flight on 4 queue pairs. The limit is fio on the same file in the
                 same run: random reads by 4 jobs, io_uring, O_DIRECT, 256 in flight, into memory of the host
cuFileRead, ...  `tardis_gpu_cufile_bench`: cuFile, by 16 threads, and in batches by one. `cufile_mode` says whether
                 the kernel module took part; without it, cuFile is in its compatibility mode: it reads into host memory
                 and copies. The limit is what 16 threads read with pread into host memory, which does not reach HBM

Medians. On tmpfs there is no drive, and no O_DIRECT on older kernels; `medium` and `direct` say so.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
from typing import Any

from common import Report, add_common_arguments, is_memory, machine_facts

RING, CUFILE = "tardis_gpu_gio_file_bench", "tardis_gpu_cufile_bench"
RING_SYSTEM = "gio ring, software controller over a file"
SIZES = (64 << 10, 256 << 10, 1 << 20)  # of the ring's records
JOBS, DEPTH = 4, 64  # of fio; the ring has as many queue pairs and commands
SKIPPED = 77
TIMEOUT_S = 300


def lines(command: list[str], rows: list[dict[str, Any]], said: list[str]) -> int:
    """Runs a program that prints a JSON object a line; other lines are printed and kept. Returns its exit status."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=TIMEOUT_S)
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            rows.append(json.loads(line))
        else:
            print(line, flush=True)
            said.append(line)
    return done.returncode


def fio_rate(fio: str, file: pathlib.Path, size: int, total: int, direct: bool) -> float:
    """GB/s of random reads of the whole file, each record once; RuntimeError with what fio says."""
    command = [
        fio,
        "--name=file",
        f"--filename={file}",
        "--rw=randread",
        f"--bs={size}",
        f"--size={total // JOBS}",
        f"--offset_increment={total // JOBS}",
        f"--numjobs={JOBS}",
        "--group_reporting",
        "--ioengine=io_uring",
        f"--iodepth={DEPTH}",
        f"--direct={int(direct)}",
        "--output-format=json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"fio: {done.stderr.strip()[:300] or done.returncode}")
    part = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]
    if part["io_bytes"] != total:
        raise RuntimeError(f"fio: expected {total} bytes read, found {part['io_bytes']}")
    return part["bw_bytes"] / 1e9


def add(report: Report, row: dict[str, Any], limit: float | None, **more: Any) -> None:
    """A line of a program as a row."""
    known = {"case", "system", "size", "value", "unit", "limit", "ratio"}
    more |= {key: value for key, value in row.items() if key not in known}
    report.add(row["case"], row["system"], row["size"], row["value"], row["unit"], limit, **more)


def measure_rings(
    report: Report, program: pathlib.Path, fio: str | None, file: pathlib.Path, mib: int, passes: int, rounds: int
) -> int:
    """Rings and fio on one file, in turn, each first in every second round."""
    rings: dict[int, list[dict[str, Any]]] = {size: [] for size in SIZES}
    peers: dict[int, list[float]] = {size: [] for size in SIZES}

    def run_ring() -> int:
        rows: list[dict[str, Any]] = []
        status = lines([str(program), str(file), str(mib), str(passes)], rows, [])
        for row in rows:
            rings[row["size"]].append(row)
        return status

    def run_fio() -> None:
        direct = rings[SIZES[0]][0]["direct"]
        try:
            for size in SIZES if fio is not None else ():
                peers[size].append(fio_rate(fio, file, size, mib << 20, direct))
        except RuntimeError as error:
            print(error)
            report.note(fio=str(error))

    status = run_ring()  # makes the file; its rates do not count
    if any(not found for found in rings.values()):
        return status
    for index in range(rounds):
        if index % 2:
            status = run_ring() or status
            run_fio()
        else:
            run_fio()
            status = run_ring() or status
    for size, rows in rings.items():
        samples = [row["value"] for row in rows[1:]]
        limit = statistics.median(peers[size]) if peers[size] else None
        if limit is not None:
            report.add("file, random read", "fio", size, limit, "GB/s", samples=[round(x, 3) for x in peers[size]])
        if samples:
            wrong = sum(row["wrong_words"] for row in rows)
            row = rows[0] | {"value": statistics.median(samples), "wrong_words": wrong}
            add(report, row, limit, samples=samples)
    return status


def measure_cufile(report: Report, program: pathlib.Path, file: pathlib.Path, mib: int, n: int) -> int:
    """Measure cuFile and preads on one file."""
    rows: list[dict[str, Any]] = []
    said: list[str] = []
    status = lines([str(program), str(file), str(mib), str(n)], rows, said)
    mode = next((line.removeprefix("cuFile: ") for line in said if line.startswith("cuFile: ")), None)
    report.note(cufile_mode=mode, cufile_said=[line for line in said if not line.startswith("cuFile: ")])
    for row in rows:
        add(report, row, row["limit"])
    return status


def main() -> int:
    """Measure; 1 if a byte came wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    root = pathlib.Path(
        os.environ.get("TARDIS_BUILD_DIR", pathlib.Path(__file__).resolve().parents[1] / "build/native")
    )
    parser.add_argument("--programs", type=pathlib.Path, default=root / "cpp/tests", help="folder of the two programs")
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="an existing folder on the file system")
    parser.add_argument("--label", help="what the result says for the folder (default: the folder itself)")
    parser.add_argument("--mib", type=int, help="size of the file (default 1024, with --quick 128)")
    parser.add_argument("--passes", type=int, help="over the file, of a program (default 3, with --quick 1)")
    parser.add_argument("--rounds", type=int, default=3, help="of rings and fio in turn (default 3)")
    arguments = parser.parse_args()
    if not arguments.folder.is_dir():
        parser.error(f"--folder: {arguments.folder} is not an existing folder")
    programs = [arguments.programs / name for name in (RING, CUFILE)]
    if missing := [program for program in programs if not program.exists()]:
        parser.error(
            f"{missing[0]} was not found: build with -DTARDIS_CUDA=ON -DTARDIS_TESTS=ON, name it in --programs"
        )
    mib, passes = arguments.mib or (128 if arguments.quick else 1024), arguments.passes or (1 if arguments.quick else 3)
    memory = is_memory(arguments.folder)
    fio = shutil.which("fio")
    report = Report(
        arguments.json,
        machine_facts(arguments.folder),
        medium="tmpfs (memory, no drive)" if memory else "drive",
        file_mib=mib,
        passes=passes,
        rounds=arguments.rounds,
    )
    if fio is None:
        report.note(fio="not installed: rings have no limit")
    if arguments.label:
        report.machine["file_systems"] = {arguments.label: report.machine["file_systems"][str(arguments.folder)]}
        report.command = report.command.replace(str(arguments.folder), arguments.label)
        report.save()
    file = arguments.folder / f"gio-file-bench.{os.getpid()}"
    try:
        statuses = [
            measure_rings(report, programs[0].absolute(), fio, file, mib, passes, arguments.rounds),
            measure_cufile(report, programs[1].absolute(), file, mib, max(passes, arguments.rounds)),
        ]
    finally:
        file.unlink(missing_ok=True)
    if all(status == SKIPPED for status in statuses):
        return SKIPPED
    return int(any(status not in (0, SKIPPED) for status in statuses))


if __name__ == "__main__":
    sys.exit(main())
