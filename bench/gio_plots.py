# SPDX-License-Identifier: Apache-2.0
"""Draw what bandwidth.py, gio.py, gio_file.py, sglang_transfer.py and lmcache_disk.py measured, from results/.

python bench/gio_plots.py --out FOLDER

bandwidth_by_object.png  host to HBM at random by object size, as the paper's figure 1a: movers, copy calls, SGLang's
                         kernels, the whole path; dashed: from files on tmpfs (rings, LMCache)
parallel_requests.png    1,024 requests in flight, in order and at random, as the paper's figure 3: movers and rings
depth_sweep.png          rates and times of single commands by how many are in flight
file_reads.png           scattered records of a file into HBM beside fio and preads, on a drive and on tmpfs

Numbers of one figure may come from several runs on machines of one kind; the files' own `machine` says which.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any

import gio
from bandwidth import label

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
RING = "gio ring, software controller in memory"
FILE_RING = "gio ring, software controller over a file"
Line = tuple[str, str, str, str]  # file, case, system, legend

MEMORY_LINES: tuple[Line, ...] = (
    ("h200_gio_bandwidth", "pages in, random", "mover 4", "mover, 4 SMs"),
    ("h200_gio_bandwidth", "pages in, random", "cudaMemcpyAsync a page", "cudaMemcpyAsync a page"),
    ("h200_gio_bandwidth", "pages in, random", "cudaMemcpyBatchAsync", "cudaMemcpyBatchAsync"),
    ("h200_sglang_transfer", "pages in, random", "sgl_kernel transfer_kv", "SGLang, sgl_kernel"),
    ("h200_sglang_transfer", "pages in, random", "sgl_kernel transfer_kv_direct", "SGLang, direct"),
    ("h200_sglang_transfer", "pages in, random", "SGLang JIT, registers", "SGLang, JIT registers"),
    ("h200_sglang_transfer", "pages in, random", "SGLang JIT, TMA", "SGLang, JIT TMA"),
    ("h200_gio_ring", "whole path, read, 4 CTAs", RING, "whole path (ring), memory"),
)


def file_lines(where: str) -> tuple[Line, ...]:
    """Systems that read a file: `where` is disk or tmpfs. cuFile takes no files on tmpfs."""
    case, file = "file, random read", f"h200_gio_file_{where}"
    lines = (
        (file, case, FILE_RING, f"ring over a file, {where}"),
        (file, case, "fio", f"fio, to host memory, {where}"),
        (f"h200_lmcache_{where}", case, "LMCache local disk", f"LMCache local disk, {where}"),
    )
    if where == "tmpfs":
        return lines
    return (
        *lines,
        (file, case, "pread, 16 threads, to host memory only", f"pread, to host memory, {where}"),
        (file, case, "cuFileRead, 16 threads", f"cuFileRead (compatibility), {where}"),
    )


class Results:
    """The rows of result files, read once each."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.files: dict[str, list[dict[str, Any]]] = {}

    def rows(self, name: str) -> list[dict[str, Any]]:
        """All rows of a file; FileNotFoundError if it is not there."""
        if name not in self.files:
            content = json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))
            self.files[name] = content["rows"]
        return self.files[name]

    def points(self, line: Line) -> list[tuple[int, float]]:
        """Value by size of one system; KeyError if the file has no such rows."""
        name, case, system, _ = line
        found = [(int(r["size"]), r["value"]) for r in self.rows(name) if (r["case"], r["system"]) == (case, system)]
        if not found:
            raise KeyError(f"{name}.json: expected rows of {system!r} in {case!r}, found none")
        return sorted(found)


def by_size(axes: Any, results: Results, lines: tuple[Line, ...], style: str = "-") -> None:
    """One curve a line."""
    for line in lines:
        sizes, values = zip(*results.points(line), strict=True)
        axes.plot(sizes, values, style, marker="o", markersize=3, label=line[3])


def finish(axes: Any, title: str) -> None:
    """Axes of sizes and rates."""
    axes.set_xscale("log", base=2)
    ticks = [1 << k for k in range(12, 22)]
    axes.set_xticks(ticks, [label(tick) for tick in ticks], rotation=45)
    axes.set(xlabel="object", ylabel="GB/s", title=title, ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


def draw(results: Results, folder: pathlib.Path) -> list[str]:
    """Draw every figure into `folder`; the names of the files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)

    def save(figure: Any, name: str) -> str:
        figure.savefig(folder / name, dpi=120)
        pyplot.close(figure)
        return name

    figure, axes = pyplot.subplots(figsize=(9, 6), layout="constrained")
    by_size(axes, results, MEMORY_LINES)
    files = [line for line in file_lines("tmpfs") if "to host memory" not in line[3]]
    by_size(axes, results, tuple(files), "--")
    finish(axes, "host to HBM, random, by object size")
    names = [save(figure, "bandwidth_by_object.png")]

    figure, both = pyplot.subplots(1, 2, figsize=(11, 5), sharey=True, layout="constrained")
    for axes, order in zip(both, ("sequential", "random"), strict=True):
        lines = (
            ("h200_gio_bandwidth", f"pages in, {order}", "mover 4", "mover, 4 SMs"),
            ("h200_gio_bandwidth", f"pages in, {order}", "cudaMemcpyAsync a page", "cudaMemcpyAsync a page"),
            ("h200_gio_bandwidth", f"pages in, {order}", "cudaMemcpyBatchAsync", "cudaMemcpyBatchAsync"),
            ("h200_gio_sweeps", f"1,024 in flight, {order}", RING, "whole path (ring), memory"),
        )
        by_size(axes, results, lines)
        finish(axes, f"1,024 requests, {order}")
    names.append(save(figure, "parallel_requests.png"))

    figure, both = pyplot.subplots(1, 2, figsize=(11, 5), layout="constrained")
    for axes, where in zip(both, ("disk", "tmpfs"), strict=True):
        by_size(axes, results, file_lines(where))
        finish(axes, f"records of a file into HBM, random, {where}")
    names.append(save(figure, "file_reads.png"))

    gio.draw(results.rows("h200_gio_sweeps"), folder / "depth_sweep.png")
    return [*names, "depth_sweep.png"]


def main() -> int:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for the figures")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder of the JSON files")
    arguments = parser.parse_args()
    print("\n".join(draw(Results(arguments.results), arguments.out)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
