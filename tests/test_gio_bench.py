# SPDX-License-Identifier: Apache-2.0
"""bench/bandwidth.py, bench/link.py and bench/mover_corun.py: what they say of the results that are kept, and that they
end well without a GPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import bandwidth
import link
import pytest
from common import Report

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "bench" / "results"
LINK_FLOWS = {
    "write-behind out, mover",
    "load-back in, mover",
    "write-behind out, copy engine, host paced",
    "load-back in, copy engine, host paced",
    "write-behind out and load-back in, movers",
}
LINK_BUDGETS = {"budgets of 1.0 GB/s", "budgets of 2.0 GB/s"}


def kept(name: str) -> dict:
    return json.loads((RESULTS / name).read_text("utf-8"))


def report_of(content: dict) -> Report:
    report = Report(None, content["machine"])
    report.rows = {(row["case"], row["system"], str(row["size"])): row for row in content["rows"]}
    return report


def test_kept_rates_reach_their_floor():
    """With digests and without."""
    assert bandwidth.verdict(report_of(kept("h200_gio_bandwidth.json"))) == []


def test_a_rate_below_the_floor_is_named():
    content = kept("h200_gio_bandwidth.json")
    slow = [row for row in content["rows"] if row["case"] == "pages in, random" and row["size"] == 64 << 10]
    for row in slow:
        row["ratio"] = min(row["ratio"], 0.5)
    assert any("pages in, random, mover, 64 KiB" in line for line in bandwidth.verdict(report_of(content)))


def test_rows_of_the_program_become_rows_of_the_report():
    report = Report(None, {})
    row = {"case": "pages", "system": "mover", "way": "in", "order": "random", "size": 32768, "value": 50.0}
    bandwidth.add_row(report, {**row, "limit": 51.0, "ctas": 2})
    bandwidth.add_row(report, {**row, "case": "limit", "system": "plain loads", "limit": 0.0, "ctas": 16})
    assert report.rows["pages in, random", "mover 2", "32768"]["ratio"] == 0.98
    assert report.rows["limit in", "plain loads, 16 CTAs", "32768"]["limit"] is None


def test_figures_are_drawn_from_a_result(tmp_path):
    pytest.importorskip("matplotlib")
    command = [sys.executable, str(REPOSITORY / "bench" / "bandwidth.py")]
    command += ["--render", str(RESULTS / "h200_gio_bandwidth.json"), "--plots", str(tmp_path)]
    drawn = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert drawn
    assert all((tmp_path / name).stat().st_size > 10_000 for name in drawn)


def test_kept_products_beside_movers_are_within_what_is_allowed():
    """In with 7 chunks, out with all; with more in they are not, as docs/gio.md says."""
    rows = report_of(kept("h200_mover_corun_in_flight.json")).rows
    told = "green 2, told"
    for way, system in (("in", f"{told}, 7 chunks"), ("out", told), ("out", f"{told}, 4 chunks")):
        mean = rows[f"products beside movers {way}, graph", system, "mean"]
        assert mean["value"] <= mean["allowed"]
        assert rows[f"movers beside products {way}, graph", system, "all"]["ratio"] >= 0.96


def test_a_restore_keeps_its_rate_with_the_arbiter_and_not_without():
    report = report_of(kept("h200_gio_link.json"))
    movers = [row for row in report.rows.values() if row["size"] in LINK_FLOWS]
    assert {row["size"] for row in movers} == LINK_FLOWS
    for row in movers:
        if row["system"] == "without arbiter":
            assert row["ratio"] < link.KEPT
        elif row["system"] in LINK_BUDGETS:
            assert row["ratio"] >= link.KEPT, row


def test_a_restore_that_lost_its_rate_is_named():
    content = kept("h200_gio_link.json")
    slow = [row for row in content["rows"] if row["system"] == "budgets of 1.0 GB/s"]
    for row in slow:
        row["ratio"] = 0.89
    missed = "\n".join(link.missed(report_of(content)))
    assert slow
    assert all(row["size"] in missed for row in slow)


def test_without_a_gpu_the_products_are_skipped():
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU: a run takes minutes")
    command = [sys.executable, str(REPOSITORY / "bench" / "mover_corun.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (77, "skipped: no CUDA device"), done.stderr
