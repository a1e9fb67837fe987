# SPDX-License-Identifier: Apache-2.0
"""Scattered pages between pinned memory and HBM: the movers, beside copy calls a page, after the limits of the link.

Drives `tardis_gpu_gio_bandwidth_bench` (cpp/tests): calls of 1,024 pages of one size, in order or from all over pools
of 2 GiB, each call with other pages. *in* is host to HBM, *out* HBM to host. First come the rig's limits in the same
run: copy engines, and plain 16-byte loads by SMs; `ratio` is a rate over the latter, the limit of anything on SMs.

mover N               `tardis_gpu_move` on N SMs; its first run's pages are compared word for word
mover with digests N  `tardis_gpu_move_digested`: every page's digest made on the way and compared
cudaMemcpyAsync       one call a page
cudaMemcpyBatchAsync  one call for the 1,024

"pages" are calls back to back (256 MB and more), "pages, one call" single ones, start of the kernel included. Medians
of seven. No drive takes part. SGLang's own transfer kernels are in sglang_transfer.py.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any

from common import Report, add_common_arguments, add_program_argument, machine_facts, required_program, run_program

NAME = "tardis_gpu_gio_bandwidth_bench"
SKIPPED = 77
FLOOR = 0.97
FLOOR_FROM = 32 << 10
# What one piece (a page of 16 tokens, K or V of a layer, on one rank) has in the settings of the paper's figure 1a:
# KV heads a rank, head size, bytes an element.
SETTINGS = {
    "Llama-3.1-8B bf16": 16 * 8 * 128 * 2,
    "Llama-3.1-8B fp8": 16 * 8 * 128,
    "Llama-3.1-8B bf16, TP 4": 16 * 2 * 128 * 2,
    "Yi-6B bf16": 16 * 4 * 128 * 2,
    "Yi-6B fp8": 16 * 4 * 128,
    "Yi-6B fp8, TP 2": 16 * 2 * 128,
}


def label(size: int) -> str:
    """A size in KiB or MiB."""
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def system_of(row: dict[str, Any]) -> str:
    """The row's system with its number of SMs, where that was chosen."""
    return f"{row['system']} {row['ctas']}" if row["ctas"] and row["case"] != "limit" else row["system"]


def add_row(report: Report, row: dict[str, Any]) -> None:
    """One line of the program as a row of the report."""
    if row["case"] == "limit":
        system = f"{row['system']}, {row['ctas']} CTAs" if row["ctas"] else row["system"]
        report.add(f"limit {row['way']}", system, row["size"], row["value"], "GB/s")
        return
    case = f"{row['case']} {row['way']}, {row['order']}"
    report.add(case, system_of(row), row["size"], row["value"], "GB/s", row["limit"] or None)


def verdict(report: Report) -> list[str]:
    """Which page sizes from 32 KiB up miss 0.97 of the limit with at most 4 SMs, digests or not."""
    best: dict[tuple[str, str, int], float] = {}
    for row in report.rows.values():
        system = row["system"].rstrip("0123456789 ")
        if row["case"].startswith("pages ") and system.startswith("mover") and row["size"] >= FLOOR_FROM:
            key = row["case"], system, row["size"]
            best[key] = max(best.get(key, 0.0), row["ratio"])
    return [f"{case}, {system}, {label(size)}: {x}" for (case, system, size), x in best.items() if x < FLOOR]


def draw(content: dict[str, Any], folder: pathlib.Path) -> list[str]:
    """Rate over page size (the paper's figure 3) and by setting (figure 1a), as PNG files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    rows = [row for row in content["rows"] if row["case"].startswith("pages ")]
    systems = ["mover 4", "mover with digests 4", "cudaMemcpyBatchAsync", "cudaMemcpyAsync a page"]
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8), sharex=True, sharey=True)
    for row_axes, way in zip(axes, ("in", "out"), strict=True):
        for axis, order in zip(row_axes, ("sequential", "random"), strict=True):
            mine = [row for row in rows if row["case"] == f"pages {way}, {order}"]
            for system in systems:
                points = sorted((int(row["size"]), row["value"]) for row in mine if row["system"] == system)
                axis.plot([p[0] for p in points], [p[1] for p in points], marker="o", label=system)
            if mine:
                axis.axhline(mine[0]["limit"], linestyle="--", color="grey", label="limit (plain loads)")
            axis.set_xscale("log", base=2)
            axis.set_title(f"{'host to HBM' if way == 'in' else 'HBM to host'}, {order} pages")
            axis.grid(alpha=0.3)
    sizes = sorted({int(row["size"]) for row in rows})
    for axis in axes[1]:
        axis.set_xticks(sizes, [label(size) for size in sizes], rotation=45)
        axis.set_xlabel("page")
    for axis in axes[:, 0]:
        axis.set_ylabel("GB/s")
        axis.set_ylim(bottom=0)
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(folder / "bandwidth_by_page.png", dpi=120)
    pyplot.close(figure)

    figure, axis = pyplot.subplots(figsize=(9, 4.5))
    width = 0.8 / len(systems)
    for number, system in enumerate(systems):
        rate = {int(r["size"]): r["value"] for r in rows if r["case"] == "pages in, random" and r["system"] == system}
        axis.bar(
            [x + number * width for x in range(len(SETTINGS))],
            [rate.get(size, 0.0) for size in SETTINGS.values()],
            width,
            label=system,
        )
    names = [f"{name}\n{label(size)}" for name, size in SETTINGS.items()]
    axis.set_xticks([x + 1.5 * width for x in range(len(SETTINGS))], names, fontsize=7)
    axis.set_ylabel("GB/s, host to HBM, random")
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(folder / "bandwidth_by_setting.png", dpi=120)
    pyplot.close(figure)
    return ["bandwidth_by_page.png", "bandwidth_by_setting.png"]


def run(program: pathlib.Path, options: list[str], report: Report) -> int:
    """Run the program, adding its rows as they come; its exit status."""
    command = [str(program.absolute()), *options]
    return run_program(command, lambda row: add_row(report, row))


def main() -> int:
    """Measure, or draw what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    add_program_argument(parser, NAME)
    parser.add_argument("--pool", type=int, default=2048, metavar="MIB", help="size of each pool (default 2048)")
    parser.add_argument("--movers", action="store_true", help="only the movers, on 2 and 4 SMs, and the limits")
    parser.add_argument("--plots", type=pathlib.Path, metavar="FOLDER", help="draw the figures there (matplotlib)")
    parser.add_argument("--render", type=pathlib.Path, metavar="JSON", help="only draw, from an earlier result")
    arguments = parser.parse_args()
    if arguments.render:
        if not arguments.plots:
            parser.error("--render needs --plots")
        content = json.loads(arguments.render.read_text(encoding="utf-8"))
        print("\n".join(draw(content, arguments.plots)))
        return 0
    program = required_program(parser, arguments.program, NAME)
    report = Report(arguments.json, machine_facts())
    options = ["--pool", str(arguments.pool)]
    options += ["--quick"] if arguments.quick else []
    options += ["--movers"] if arguments.movers else []
    status = run(program, options, report)
    if status == SKIPPED:
        return SKIPPED
    for missed in verdict(report):
        print(f"below {FLOOR} of the limit: {missed}")
    if arguments.plots:
        content = {"rows": list(report.rows.values())}
        print("\n".join(draw(content, arguments.plots)))
    return status


if __name__ == "__main__":
    sys.exit(main())
