# SPDX-License-Identifier: Apache-2.0
"""bench/gio.py: lines of the program become rows, none of which takes the place of another."""

from __future__ import annotations

import json
from typing import Any

import gio
from common import Report


def line(case: str, **more: Any) -> dict[str, Any]:
    """A line as the program prints it."""
    row = {"case": case, "system": "ring", "size": 4096, "value": 2.0, "unit": "GB/s", "limit": 4.0, "ratio": 0.5}
    return row | more


def test_rows_differ_in_what_was_measured(tmp_path):
    path = {"queues": 4, "controller_threads": 4, "commands_in_flight": 8, "namespace_mib": 64, "iocbs_at_once": 1}
    lines = [line("rig: host copies alone", limit=None, threads=threads) for threads in (1, 2)]
    lines += [line("whole path, read", ctas=ctas, **path) for ctas in (1, 2, 4)]
    for change in ({}, {"controller_threads": 2}, {"namespace_mib": 2048}, {"iocbs_at_once": 2}):
        lines.append(line("commands of 4 KiB", ctas=4, **(path | change)))
    for flight in (1, 2):
        lines.append(line("depth sweep", ctas=1, p50_us=7.0, **(path | {"commands_in_flight": flight})))
    report = Report(tmp_path / "ring.json", {})
    for each in lines:
        gio.add_row(report, each)
    rows = json.loads((tmp_path / "ring.json").read_text(encoding="utf-8"))["rows"]
    assert len(rows) == len(lines)
    assert [row["value"] for row in rows] == [2.0] * len(lines)
    assert {row["ratio"] for row in rows} == {None, 0.5}
    assert [row["p50_us"] for row in rows if row["case"].startswith("depth")] == [7.0, 7.0]
