# SPDX-License-Identifier: Apache-2.0
"""Baselines beside rings and movers: figures from the kept results, scripts that end well without a GPU, and what they
make of the lines of their programs."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import gio_file
import gio_plots
import pytest
from common import Report

BENCH = pathlib.Path(__file__).resolve().parents[1] / "bench"


def test_figures_are_drawn_from_the_kept_results(tmp_path):
    pytest.importorskip("matplotlib")
    names = gio_plots.draw(gio_plots.Results(gio_plots.RESULTS), tmp_path)
    assert len(names) == 4
    assert all((tmp_path / name).stat().st_size > 10_000 for name in names)


def test_a_figure_without_its_rows_is_refused(tmp_path):
    (tmp_path / "some.json").write_text(json.dumps({"rows": []}), encoding="utf-8")
    with pytest.raises(KeyError, match="expected rows"):
        gio_plots.Results(tmp_path).points(("some", "pages in, random", "mover 4", "mover"))


def program(folder: pathlib.Path, name: str, lines: list[str], status: int = 0) -> pathlib.Path:
    """A program that prints what the real one prints."""
    file = folder / name
    body = "\n".join(f"print({line!r})" for line in lines)
    file.write_text(f"#!{sys.executable}\n{body}\nraise SystemExit({status})\n", encoding="utf-8")
    file.chmod(0o755)
    return file


def line(system: str, size: int, value: float, limit: float | None = None) -> str:
    row = {"case": "file, random read", "system": system, "size": size, "value": value, "unit": "GB/s", "limit": limit}
    return json.dumps(row | {"ratio": None, "direct": False, "wrong_words": 0})


def test_fio_is_the_limit_of_rings(tmp_path, monkeypatch):
    ring = program(tmp_path, "ring", [line(gio_file.RING_SYSTEM, size, 1.5) for size in gio_file.SIZES])
    monkeypatch.setattr(gio_file, "fio_rate", lambda *_: 2.0)
    report = Report(None, {})
    assert gio_file.measure_rings(report, ring, "fio", tmp_path / "file", 1, 1, 2) == 0
    for size in gio_file.SIZES:
        row = report.rows["file, random read", gio_file.RING_SYSTEM, str(size)]
        assert (row["value"], row["limit"], row["ratio"], row["samples"]) == (1.5, 2.0, 0.75, [1.5, 1.5])


def test_what_cufile_says_is_kept(tmp_path):
    said = ["cuFile: compatibility mode (no nvidia-fs module)", line("cuFileRead, 16 threads", 65536, 3.0, 6.0)]
    cufile = program(tmp_path, "cufile", said, status=1)
    report = Report(None, {})
    assert gio_file.measure_cufile(report, cufile, tmp_path / "file", 1, 1) == 1
    assert report.extra["cufile_mode"].startswith("compatibility mode")
    assert report.rows["file, random read", "cuFileRead, 16 threads", "65536"]["ratio"] == 0.5


@pytest.mark.parametrize("script", ["sglang_transfer.py", "lmcache_disk.py"])
def test_without_a_gpu_a_script_says_so(script, tmp_path):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: a run takes half a minute")
    more = ["--folder", str(tmp_path)] if script == "lmcache_disk.py" else []
    done = subprocess.run([sys.executable, str(BENCH / script), *more], capture_output=True, text=True, check=False)
    assert done.returncode == 77, done.stderr
    assert done.stdout.startswith("skipped: ")
