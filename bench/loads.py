# SPDX-License-Identifier: Apache-2.0
"""Loads and offloads of KV pages by the GPU, all layers in one call of the host: checked first, then timed.

First tardis_gpu_load_check, whose failures are the first row: loads from pinned memory, from a live store's files and
from both, every word of the pools compared. Then tardis_gpu_load_bench, a row for each line:

copy engine, mover      the limits of the link in the same run, one run of bytes; and half of it by each at once
load from ...           from the call to behind the last layer and the first one; how long the call itself took; with
                        files, how long until the loader had looked up the objects and proven their digests
pread                   of the same files by threads of the host alone
... threads and queues  files with other numbers of controller threads and of commands in flight; also while other
                        threads keep cores busy
offload                 by 1, 2 and 4 CTAs
beside a forward        a load while a stream waits for each layer, then does what a model does for a hit but for 64
                        tokens; when that has ended
beside kernels          a load while kernels fill every SM, on a stream of the highest priority and of theirs; how much
                        of the load's time the kernels lose
small copy      when one of another stream, behind a load by copy engines, is there: what a forward's inputs meet

No drive takes part: the store's files lie in --shared (a tmpfs, unless told otherwise), and threads of the host (the
software controller's) work for every command, which with a drive none would.
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

BENCH, CHECK, SMALL = "tardis_gpu_load_bench", "tardis_gpu_load_check", "tardis_gpu_small_copy_bench"
SKIPPED = 77


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    add_program_argument(parser, BENCH)
    add_store_arguments(parser, "load")
    arguments = parser.parse_args()
    program = required_program(parser, arguments.program, BENCH)
    pages = arguments.pages or (128 if arguments.quick else 512)
    loads, repetitions = (12, 5) if arguments.quick else (80, 9)
    report = Report(arguments.json, machine_facts(arguments.shared))

    shared, counts = str(arguments.shared), (str(pages), str(repetitions), str(arguments.threads))
    status = run_check(
        report, "loads and offloads", "words compared", "loads", program.with_name(CHECK), str(loads), shared
    )
    for command in ([program, shared, *counts], [program.with_name(SMALL)]):
        status = status or run_program(command, lambda row: add_program_row(report, row))
    if status == SKIPPED:
        print("no GPU here: nothing was measured")
    return status


if __name__ == "__main__":
    sys.exit(main())
