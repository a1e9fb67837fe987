# SPDX-License-Identifier: Apache-2.0
"""The hash index in GPU memory beside the store's index on the CPU, over the same entries (needs an NVIDIA GPU).

First tardis_gpu_gstore_check, _blocks_check and _restore_check, whose failures are the first rows, then
tardis_gpu_gstore_bench and tardis_gpu_gstore_blocks_bench, a row for each line:

lookup             keys a second by batch: keys in HBM, in host memory that kernels read, and copied from there by the
                   copy engine; as launches and as nodes of a CUDA graph; limits measured in the same run
launch to result   from before the launch until the host sees the report in mapped memory, one batch at a time
insert, erase      on the GPU by batch, and on one core of the store's index
batch              the store's index: one core, and all cores on slices of one batch (threads that spin until asked)
crossover batch    from which batch on the GPU's launch to result is shorter than the CPU's batch

The limit of a lookup is what random reads of as many bytes, or reads of host memory, reach in the same run; that of a
time from launch to result is the same of a kernel that only reports.
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys

from common import (
    Report,
    add_common_arguments,
    add_program_argument,
    add_program_row,
    machine_facts,
    required_program,
    run_program,
)

BENCH, BLOCKS_BENCH = "tardis_gpu_gstore_bench", "tardis_gpu_gstore_blocks_bench"
CHECK, BLOCKS_CHECK = "tardis_gpu_gstore_check", "tardis_gpu_gstore_blocks_check"
RESTORE_CHECK = "tardis_gpu_gstore_restore_check"


def check(report: Report, system: str, size: str, *command: str | pathlib.Path) -> int:
    """Run a check; its failures become a row."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, sep="", end="", flush=True)
    lines = done.stdout.splitlines()
    if done.returncode in (0, 1) and lines and lines[-1].endswith("failures"):
        report.add("against a model", system, size, int(lines[-1].split()[0]), "wrong", None, output=lines)
    return done.returncode


def bench(report: Report, *command: str | pathlib.Path) -> int:
    """Run a benchmark, a row for each of its lines."""
    return run_program(command, lambda row: add_program_row(report, row))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    add_program_argument(parser, BENCH)
    parser.add_argument("--shared", type=pathlib.Path, default="/dev/shm", help="a tmpfs, for the store's index")
    parser.add_argument("--entries", type=int, help="default: 16 Mi, with --quick 1 Mi")
    parser.add_argument("--millions", type=int, help="lookups of the check; default: 100, with --quick 2")
    arguments = parser.parse_args()
    program = required_program(parser, arguments.program, BENCH)
    entries = arguments.entries or (1 << 20 if arguments.quick else 16 << 20)
    millions = (2 if arguments.quick else 100) if arguments.millions is None else arguments.millions
    changes, seconds = (100_000, 10) if arguments.quick else (1_000_000, 60)
    report = Report(arguments.json, machine_facts(arguments.shared))
    lookups = f"{millions}e6 lookups, {changes} changes"
    return (
        check(report, "GPU index", lookups, program.with_name(CHECK), str(millions), str(changes))
        or check(report, "GPU block table", f"{changes} changes", program.with_name(BLOCKS_CHECK), str(changes))
        or check(report, "GPU index and block table", "300 graph replays", program.with_name(RESTORE_CHECK))
        or bench(report, program, str(arguments.shared), str(entries), str(seconds))
        or bench(report, program.with_name(BLOCKS_BENCH))
    )


if __name__ == "__main__":
    sys.exit(main())
