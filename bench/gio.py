# SPDX-License-Identifier: Apache-2.0
"""Rings on a GPU against the software controller, after the limits of the machine.

Drives `tardis_gpu_gio_bench` (cpp/tests). The GPU submits NVMe commands and retires them itself; threads of the host
play the controller and copy between a namespace in ordinary memory and pinned bounce slots; SMs carry the bytes on to
scattered pages in HBM, K and V of a page with one command. No drive takes part, and threads of the host work for every
command, which with a drive none would. Every size is compared word for word once before it is measured.

rig: ...            what this machine can do in the same run: 4 SMs over the link, a doorbell's way to a host thread
                    and back, copies by host threads alone and while the GPU reads what they write
whole path          12 queue pairs and 12 controller threads (fewer on smaller machines) on 1, 2 or 4 CTAs, a row of
                    IOCBs from the first kernel's start to the last flag; the limit is the link, or the copies of as
                    many host threads, of the same size to as much memory as the bounce slots, while the GPU reads it;
                    with digests: read chunks are compared with digests in HBM, those of written chunks are made
commands of 4 KiB   commands a second of 1, 2 and 4 controller threads; namespaces that fit the host's caches (64 MiB)
                    or not; one IOCB after the other, or two beside each other on queue pairs of their own
1,024 in flight     on 16 queue pairs, in order or at random, 32 KiB to 2 MiB (only with --sweeps)
depth sweep         one controller thread, times of single commands from submission to landed; one queue pair, and more
                    from 1,024 in flight on
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Any

from common import Report, add_common_arguments, add_program_argument, machine_facts, required_program, run_program

NAME = "tardis_gpu_gio_bench"
SKIPPED = 77
KNOWN = frozenset({"case", "system", "size", "value", "unit", "limit", "ratio"})


def add_row(report: Report, row: dict[str, Any]) -> None:
    """One line of the program as a row of the report; what tells rows apart becomes part of their case."""
    more = {key: value for key, value in row.items() if key not in KNOWN}
    case = row["case"]
    if "threads" in more:
        case += f", {more['threads']} threads"
    if case == "commands of 4 KiB":
        case += f", {more['controller_threads']} controller threads, {more['iocbs_at_once']} IOCBs at once"
        case += f", {more['namespace_mib']} MiB"
    elif case == "depth sweep":
        case += f", {more['commands_in_flight']} in flight"
    elif case.startswith("whole path"):
        case += f", {more['ctas']} CTAs{', digests' if more.get('digests') else ''}"
    report.add(case, row["system"], row["size"], row["value"], row["unit"], row["limit"], **more)


def draw(rows: list[dict[str, Any]], file: pathlib.Path) -> None:
    """Times and rates over the commands in flight, as one PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (rates, times) = pyplot.subplots(1, 2, figsize=(11, 4.5))
    mine = [row for row in rows if row["case"].startswith("depth sweep")]
    for size in sorted({int(row["size"]) for row in mine}):
        points = sorted((row["commands_in_flight"], row) for row in mine if int(row["size"]) == size)
        depths = [depth for depth, _ in points]
        rates.plot(depths, [row["value"] for _, row in points], marker="o", label=f"{size >> 10} KiB")
        for name in ("p50_us", "p99_us"):
            times.plot(depths, [row[name] for _, row in points], marker="o", label=f"{size >> 10} KiB, {name[:3]}")
    for axis, text in ((rates, "GB/s"), (times, "microseconds, submission to landed")):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("commands in flight (one controller thread)")
        axis.set_ylabel(text)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    times.set_yscale("log")
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> int:
    """Run the program, adding its rows as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    add_program_argument(parser, NAME)
    parser.add_argument("--digests", action="store_true", help="only the whole path, without and with digests")
    parser.add_argument("--sweeps", action="store_true", help="only the limits, 1,024 in flight, and the depth sweep")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE", help="draw the depth sweep there (matplotlib)")
    arguments = parser.parse_args()
    program = required_program(parser, arguments.program, NAME)
    report = Report(arguments.json, machine_facts())
    options = [f"--{name}" for name in ("quick", "digests", "sweeps") if getattr(arguments, name)]
    command = [str(program.absolute()), *options]
    status = run_program(command, lambda row: add_row(report, row))
    if status == 0 and arguments.plot and not arguments.digests:
        draw(list(report.rows.values()), arguments.plot)
    return status


if __name__ == "__main__":
    sys.exit(main())
