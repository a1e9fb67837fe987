# SPDX-License-Identifier: Apache-2.0
"""Print the README's performance tables from the JSON files in bench/results.

python bench/tables.py          prints them
python bench/tables.py --check  exits 1 unless README.md contains them
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


def rows(name: str) -> dict[tuple[str, str, str], dict]:
    report = json.loads((RESULTS / name).read_text("utf-8"))
    return {(row["case"], row["system"], str(row["size"])): row for row in report["rows"]}


def heading(title: str, columns: Iterable[str]) -> list[str]:
    """The first two lines of a table."""
    names = [title, *columns]
    return ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]


def ttft_table() -> list[str]:
    """Time to first token by tier: one column a layout and prompt length."""
    found = rows("h200_serving_ttft.json")
    layouts = ("page_first", "page_first_direct")
    sizes = ("8192", "32768")
    systems = {
        "recompute": "recompute",
        "device": "device hit",
        "host": "DRAM hit (HiCache)",
        "tardis": "**tardis**, verified",
        "tardis restart": "**tardis**, verified, first hit after a server restart",
        "tardis-unverified": "tardis, verification off",
        "readv": "plain readv backend, 8 threads, no checks",
        "file": "SGLang's `file` backend",
    }
    lines = heading("TTFT, ms", (f"{layout}, {int(size) // 1024}K" for layout in layouts for size in sizes))
    for system, title in systems.items():
        cells = []
        for layout in layouts:
            for size in sizes:
                row = found.get((f"ttft {layout}", system, size))
                cells.append(f"{row['value']:.0f}" if row else "-")
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return lines


def direct_table() -> list[str]:
    """Time to first token of the direct door beside HiCache-DRAM in its two layouts."""
    found = rows("h200_direct.json")
    sizes = ("8192", "32768", "65536")
    lines = heading("TTFT, ms", (f"{int(size) // 1024}K" for size in sizes))
    titles = {
        ("recompute", "direct"): "recompute",
        ("device", "direct"): "device hit",
        ("dram", "hicache"): "HiCache-DRAM, default (page_first, kernel)",
        ("dram", "hicache-direct"): "HiCache-DRAM, page_first_direct, direct",
        ("dram", "direct"): "**tardis direct**, from DRAM",
        ("files", "direct"): "**tardis direct**, from files on tmpfs, verified",
        ("first hit after restart", "restart"): "**tardis direct**, the same, first hit after a server restart",
    }
    for (case, system), title in titles.items():
        cells = [found.get((case, system, size)) for size in sizes]
        lines.append(f"| {title} | " + " | ".join(f"{cell['value']:.0f}" if cell else "-" for cell in cells) + " |")
    return lines


def attention_table() -> list[str]:
    """Decode steps and prefills of a server with KV in host memory, beside one with KV in HBM."""
    found = rows("h200_attention_serving.json")
    sizes = ("1024", "8192", "32768")
    lines = heading("ms, one request", (f"{int(size) // 1024}K" for size in sizes))
    cases = {
        "context: between tokens": "between tokens",
        "context: recompute, TTFT": "prompt computed, TTFT",
        "context: prefix hit, TTFT": "prefix hit, TTFT",
    }
    systems = {"host": "**KV in host memory**", "resident": "KV in HBM, FlashAttention-3"}
    for case, name in cases.items():
        for system, title in systems.items():
            values = [f"{found[(case, system, size)]['value']:.1f}" for size in sizes]
            lines.append(f"| {name}, {title} | " + " | ".join(values) + " |")
    return lines


def store_table() -> list[str]:
    """Native store beside plain preadv/pwritev of the same bytes in the same run."""
    lines = ["| GB/s | 128 KiB | 1 MiB | 8 MiB |", "|---|---|---|---|"]
    places = {"h200_store_throughput_disk.json": "virtual disk, O_DIRECT", "h200_store_throughput_tmpfs.json": "tmpfs"}
    cases = (
        ("read, verified", "tardis"),
        ("read", "preadv/pwritev"),
        ("write", "tardis"),
        ("write", "preadv/pwritev"),
    )
    for name, place in places.items():
        found = rows(name)
        for case, system in cases:
            values = [found[(case, system, size)]["value"] for size in ("128KiB", "1024KiB", "8192KiB")]
            lines.append(f"| {place}: {case}, {system} | " + " | ".join(f"{value:.2f}" for value in values) + " |")
    return lines


def fio_table() -> list[str]:
    """The store's share of fio's rate on one drive, and over two drives its share of what they give one by one."""
    one, two = rows("storage_vm_disk.json"), rows("paths_vm_throttled.json")
    sizes = ("128KiB", "1024KiB", "8192KiB")
    lines = ["| of the limit | 128 KiB | 1 MiB | 8 MiB |", "|---|---|---|---|"]
    names = {"read": "read, verified", "write": "write over old pages", "fill": "write to new segments"}
    for case, name in names.items():
        values = [f"{one[(case, 'tardis', size)]['ratio']:.2f}" for size in sizes]
        lines.append(f"| {name}, of fio | " + " | ".join(values) + " |")
    for placement in ("objects", "layers"):
        for case in ("read", "write"):
            values = [f"{two[(case, f'all drives, {placement}', size)]['ratio']:.2f}" for size in sizes[:2]]
            lines.append(
                f"| {case}, two drives, {placement}, of both one by one | " + " | ".join([*values, "-"]) + " |"
            )
    return lines


def serving_table() -> list[str]:
    """Mean time to first token under load, by tier."""
    found = rows("h200_serving.json")
    workloads = {
        "a LV-Eval-like, one at a time": "6 prompts of 46-56 K sharing 10 K",
        "a LV-Eval-like, 1 req/s": "the same, 1 request/s",
        "d fixed hit rate, one at a time": "32 K, hit rates 50 to 99 %",
        "e working set over DRAM, one at a time": "16 K, working set 4 x DRAM",
        "e working set over DRAM, 1 req/s": "the same, 1 request/s",
        "e working set over DRAM, 4 req/s": "the same, 4 requests/s",
    }
    tiers = {"recompute": "recompute", "dram": "HiCache-DRAM", "tardis": "**tardis**", "file": "`file`"}
    lines = heading("mean TTFT, ms", tiers.values())
    for workload, title in workloads.items():
        values = {
            system: row["value"] for (case, system, _), row in found.items() if case == f"{workload}: mean_ttft_ms"
        }
        lines.append(f"| {title} | " + " | ".join(f"{values[tier]:.0f}" for tier in tiers) + " |")
    return lines


TABLES = (direct_table, attention_table, ttft_table, serving_table, fio_table, store_table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    tables = ["\n".join(table()) for table in TABLES]
    if not arguments.check:
        print("\n\n".join(tables))
        return 0
    readme = (ROOT / "README.md").read_text("utf-8")
    missing = [table for table in tables if table not in readme]
    for table in missing:
        print("README.md does not contain this table:\n" + table)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
