# SPDX-License-Identifier: Apache-2.0
"""Short versions of the campaigns `bench/kill_campaign.py`, `crash_campaign.py` and `corruption_campaign.py`."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent


def native_program(name):
    build = os.environ.get("TARDIS_BUILD_DIR") or ROOT / "build" / "native"
    program = pathlib.Path(build) / "cpp" / "tests" / name
    if not program.exists():
        pytest.skip(f"{name} was not built: make test builds it (TARDIS_BUILD_DIR names another build folder)")
    return program


def run_campaign(script, tmp_path, *arguments):
    result = tmp_path / "result.json"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, ROOT / "bench" / script, "--json", result, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(result.read_text())["rows"]


def test_killed_at_random_moments(tmp_path):
    """One process and several in a store, on a disk and in memory, for two minutes."""
    program = native_program("tardis_torture")
    folders = [tmp_path] + [folder for folder in ("/dev/shm",) if os.path.isdir(folder)]
    rows = run_campaign(
        "kill_campaign.py",
        tmp_path,
        *("--rounds", 100_000, "--seconds", 110, "--processes", 1, "--processes", 3, "--jobs", 2),
        *("--program", program, *(part for folder in folders for part in ("--folder", folder))),
    )
    assert sum(row["size"] for row in rows) > 200
    assert all(row["value"] == 0 for row in rows)
    assert sum(row["pages_checked"] for row in rows) > 0


def test_random_bit_flips(tmp_path):
    # In memory where there is such a folder: every round writes a copy of the store.
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else tmp_path
    rows = run_campaign("corruption_campaign.py", tmp_path, "--quick", "--folder", folder)
    checked = [row for row in rows if "not verified" not in row["case"]]
    assert sum(row["size"] for row in checked) == 30_000
    assert all(row["value"] == 0 for row in checked)


def test_crash_states_notice_a_drive_that_does_not_flush():
    program = native_program("tardis_tests")
    environment = {**os.environ, "TARDIS_CRASH_LYING_DRIVE": "1", "TARDIS_CRASH_STATES": "300"}
    command = [program, "--gtest_filter=*StoreCrashStates*Keep"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1 and "was flushed and is lost" in done.stdout


def test_torture_notices_a_broken_promise(tmp_path):
    """The kill campaign's check can fail: pages that were acknowledged are not there."""
    program = native_program("tardis_torture")
    environment = {**os.environ, "TORTURE_SECONDS": "0.7"}
    for seed in range(1, 10):  # a writer may end just after it has cleared the store
        store = tmp_path / f"store{seed}"
        arguments = [store, str(seed), "sync", tmp_path / f"log{seed}", "keep"]
        subprocess.run([program, "write", *arguments], check=True, timeout=60, env=environment)
        whole = subprocess.run([program, "check", *arguments], capture_output=True, text=True, check=False, timeout=60)
        assert whole.returncode == 0, whole.stdout + whole.stderr
        counts = json.loads(whole.stdout)
        if counts["flushed"] > 0:
            break
    assert counts["flushed"] > 0
    for segment in (store / "segments").iterdir():
        segment.unlink()
    broken = subprocess.run([program, "check", *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert broken.returncode == 1
    assert json.loads(broken.stdout)["missing"] == counts["flushed"]
