# SPDX-License-Identifier: Apache-2.0
"""Decode attention over KV in pinned host memory and in HBM: checked first, then timed.

First tardis_gpu_attention_check, whose failures are the first row: every shape that was built against fp64, with
lengths around the edges of pages and tiles, windows, several query tokens, pages of both kinds of memory, and NaN in
every slot that is no token. Then tardis_gpu_attention_bench, a row for each line, GB/s of K and V:

limit       plain 16-byte loads and bulk copies by all SMs over the same pools, one run of bytes
decode      one layer's attention, in a graph of up to 32 calls over pages of their own, so that nothing is found in L2;
            by context, batch, shape, splits, and by how tensor copies ask for the pages
copies      tensor copies alone, by box

Decode in host memory has the best limit of the link as its limit, in HBM that of HBM.
"""

from __future__ import annotations

import argparse
import sys

from common import (
    Report,
    add_common_arguments,
    add_program_argument,
    add_program_row,
    machine_facts,
    required_program,
    run_check,
    run_program,
)

BENCH, CHECK = "tardis_gpu_attention_bench", "tardis_gpu_attention_check"
SKIPPED = 77


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    add_program_argument(parser, BENCH)
    arguments = parser.parse_args()
    program = required_program(parser, arguments.program, BENCH)
    report = Report(arguments.json, machine_facts())
    status = run_check(report, "decode attention", "cases", "rounds", program.with_name(CHECK), "1")
    parts, megabytes = ("lh", "128") if arguments.quick else ("lchdvst", "512")
    status = status or run_program([program, parts, megabytes], lambda row: add_row(report, row))
    if status == SKIPPED:
        print("no GPU here: nothing was measured")
    return status


def add_row(report: Report, row: dict) -> None:
    """A line of the program: the kind of memory belongs to the case."""
    case = f"{row['case']}, {row['memory']}"
    add_program_row(report, {**row, "case": case})


if __name__ == "__main__":
    sys.exit(main())
