# SPDX-License-Identifier: Apache-2.0
"""`tardis bench` on a real folder: what it prints, that it leaves nothing behind, and what it refuses."""

import shutil
from pathlib import Path

import pytest
from cli_stores import LLAMA, PAGE, answer, fill, stored
from command_line import failure, needs_core, run
from sglang_tardis.cli import bench

SMALL = ["--bytes", "4MiB"]


@pytest.fixture(autouse=True)
def one_round_in_little_space(monkeypatch):
    needs_core()
    monkeypatch.setenv("TARDIS_CONFIG", '{"free_space_floor": 0}')
    monkeypatch.setattr(bench, "_ROUNDS", 1)


def test_bench_in_a_store(tmp_path: Path, capsys):
    fill(tmp_path, LLAMA, 0, 5)
    before = sorted(path.name for path in tmp_path.iterdir())
    result = answer(capsys, "bench", tmp_path, *SMALL)
    assert result["page_bytes"] == PAGE, "the store's own page size"
    assert (result["bytes"], result["rounds"]) == (4 << 20, 1) and result["store_path"]["engine"] in (
        "io_uring",
        "sync",
    )
    assert [row["case"] for row in result["rows"]] == ["write", "read"]
    for row in result["rows"]:
        assert row["value"] > 0 and row["unit"] == "GB/s"
        if result["fio"] == "ran":
            assert row["ratio"] == pytest.approx(row["value"] / row["limit"])
        else:
            assert row["limit"] is None and row["ratio"] is None
    assert sorted(path.name for path in tmp_path.iterdir()) == before, "everything is removed"
    assert stored(tmp_path, LLAMA) == {0, 1, 2, 3, 4}


def test_bench_without_fio_in_words(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    status, out, _ = run(capsys, "bench", tmp_path, *SMALL, "--page", "72KiB")
    assert status == 0 and "fio is not installed" in out and "pages of 72.0 KiB" in out
    rows = {line.split()[0]: line.split()[-1] for line in out.splitlines()[2:]}
    assert rows == {"write": "-", "read": "-"}
    assert list(tmp_path.iterdir()) == []


def test_bench_cleans_up_after_an_interrupt(tmp_path: Path, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "_forget_cached", interrupted)
    status, _, err = run(capsys, "bench", tmp_path, *SMALL)
    assert status == 130 and err.endswith("tardis bench: interrupted\n")
    assert list(tmp_path.iterdir()) == []


def test_bench_refuses(tmp_path: Path, capsys, monkeypatch):
    assert "no folder" in failure(capsys, "bench", tmp_path / "none")
    assert "expected a multiple of 4096" in failure(capsys, "bench", tmp_path, "--page", "5000")
    assert "size such as" in failure(capsys, "bench", tmp_path, "--page", "1M")
    assert "at least one page" in failure(capsys, "bench", tmp_path, "--bytes", "4096")
    assert "are free. Give a smaller --bytes" in failure(capsys, "bench", tmp_path, "--bytes", "900TiB")
    monkeypatch.setenv("TARDIS_CONFIG", '{"free_space_floor": "4000PiB"}')
    assert "free_space_floor keeps 4000.0 PiB free" in failure(capsys, "bench", tmp_path, *SMALL)
    assert list(tmp_path.iterdir()) == []
