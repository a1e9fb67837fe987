# SPDX-License-Identifier: Apache-2.0
"""bench/gio_direct.py: lines of the program become rows, none of which takes the place of another."""

from __future__ import annotations

import json
from typing import Any

import gio_direct
from common import Report


def line(case: str, **more: Any) -> dict[str, Any]:
    """A line as the program prints it."""
    row = {"case": case, "system": "direct", "size": 65536, "value": 2.0, "unit": "GB/s", "limit": 4.0, "ratio": 0.5}
    return row | more


def test_rows_differ_in_what_was_measured(tmp_path):
    batches = "copy engines of GPU 0 (cudaMemcpyBatchAsync)"
    lines = [line("rig: one copy, host to HBM", limit=None)]
    for threads in (4, 12):
        lines.append(line("direct, read", controller_threads=threads, engine=batches))
        lines.append(line("bounce, read", controller_threads=threads))
    lines.append(line("direct, read", controller_threads=4, engine="copy engines of GPU 0 (cudaMemcpyAsync a piece)"))
    for ctas in (4, 16):
        lines.append(line("direct, read, digests behind it", controller_threads=4, verifying_ctas=ctas))
    report = Report(tmp_path / "direct.json", {})
    for each in lines:
        gio_direct.add_row(report, each)
    rows = json.loads((tmp_path / "direct.json").read_text(encoding="utf-8"))["rows"]
    assert len(rows) == len(lines)
    assert [row["ratio"] for row in rows] == [None] + [0.5] * (len(lines) - 1)
