# SPDX-License-Identifier: Apache-2.0
"""Restores that the GPU drives by itself from a live store: checked first, then timed by where the pages are.

First tardis_gpu_restore_check and tardis_gpu_restore_raw_check, whose failures are the first rows: one CUDA graph,
replayed with other keys, beside a store that drops, replaces and damages objects, or over a namespace in memory that
rings write; every page is compared word for word with what its key stands for. Then tardis_gpu_restore_bench, a row
for each line:

copy engine             the limit of the link in the same run, pinned memory to HBM
pread                   a thread for each core reads the store's files
nodes                   of a restore's graph
begin and end           of hits in HBM, without the kernels of the layers
restore from ...        from before the graph's first kernel to behind its last one, for 64 and all pages; us, and GB/s

No drive takes part: it is a namespace in memory, or a store's files in --shared (a tmpfs, unless told otherwise), and
threads of the host (the software controller's) work for every command, which with a drive none would.
"""

from __future__ import annotations

import argparse
import sys

from common import (
    Report,
    add_common_arguments,
    add_program_argument,
    add_program_row,
    add_store_arguments,
    machine_facts,
    required_program,
    run_check,
    run_program,
)

BENCH = "tardis_gpu_restore_bench"
CHECK, RAW_CHECK = "tardis_gpu_restore_check", "tardis_gpu_restore_raw_check"
SKIPPED = 77
CASE = "against a model"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    add_program_argument(parser, BENCH)
    add_store_arguments(parser, "restore")
    arguments = parser.parse_args()
    program = required_program(parser, arguments.program, BENCH)
    pages = arguments.pages or (128 if arguments.quick else 512)
    replays, repetitions = (60, 5) if arguments.quick else (300, 15)
    report = Report(arguments.json, machine_facts(arguments.shared))

    shared, counts = str(arguments.shared), (str(pages), str(repetitions), str(arguments.threads))
    status = run_check(report, CASE, "restores by the GPU", "replays", program.with_name(CHECK), str(replays), shared)
    status = status or run_check(
        report, CASE, "the same, raw namespace", "replays", program.with_name(RAW_CHECK), str(replays)
    )
    if status == 0:
        status = run_program([program, shared, *counts], lambda row: add_program_row(report, row))
    if status == SKIPPED:
        print("no GPU here: nothing was measured")
    return status


if __name__ == "__main__":
    sys.exit(main())
