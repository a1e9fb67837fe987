# SPDX-License-Identifier: Apache-2.0
"""The C++ tests, one case each, and the builds that an ordinary installation does not make.

The test program comes from the build in ``TARDIS_BUILD_DIR`` (default: ``build/native``, where ``make test`` builds).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
BUILD = Path(os.environ.get("TARDIS_BUILD_DIR", REPOSITORY / "build" / "native"))
PROGRAM = BUILD / "cpp" / "tests" / "tardis_tests"


def _cases() -> list[str]:
    """Full names of all cases, from ``--gtest_list_tests``: suites at the margin, their cases indented."""
    if not PROGRAM.exists():
        return []
    listing = subprocess.run([PROGRAM, "--gtest_list_tests"], capture_output=True, text=True, check=True).stdout
    names, suite = [], ""
    for line in listing.splitlines():
        name = line.split("#")[0].rstrip()
        if name.startswith(" "):
            names.append(suite + name.strip())
        elif name.endswith("."):
            suite = name
    return [name for name in names if "DISABLED_" not in name]


CASES = _cases()
# Campaigns that go on for as long as they are told; by themselves they end after a few seconds.
CAMPAIGN_SECONDS = {
    "StoreProcesses.ReadersNeverWaitForAWriter": "120",
    "StoreProcesses.LongChurnStaysWithinItsBounds": "10",
}


def test_native_tests_are_built():
    """Without this a missing build would pass in silence."""
    if not PROGRAM.exists() and os.environ.get("CI") != "true":
        pytest.skip(f"{PROGRAM} is not built; `make test` builds it")
    assert CASES, f"{PROGRAM} is missing or lists no test"


@pytest.mark.parametrize("name", CASES)
def test_native(name):
    environment = {**os.environ, "TARDIS_CAMPAIGN_SECONDS": CAMPAIGN_SECONDS.get(name, "3")}
    result = subprocess.run(
        [PROGRAM, f"--gtest_filter={name}", "--gtest_color=no"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    output = result.stdout + result.stderr
    if "[  SKIPPED ]" in result.stdout:
        pytest.skip(_skip_reason(result.stdout))
    assert result.returncode == 0, output
    assert "1 test from 1 test suite ran" in result.stdout, output


def _skip_reason(output: str) -> str:
    """GoogleTest prints ``file:line: Skipped`` and the reason in the next lines."""
    lines = output.splitlines()
    where = next((number for number, line in enumerate(lines) if line.endswith(": Skipped")), None)
    return lines[where + 1].strip() if where is not None and where + 1 < len(lines) else "the test skipped itself"


def test_the_benchmark_of_the_software_nvme_controller(tmp_path: Path):
    program = BUILD / "cpp" / "tests" / "tardis_nvme_bench"
    if not program.exists() and os.environ.get("CI") != "true":
        pytest.skip(f"{program} is not built; `make test` builds it")
    result = tmp_path / "result.json"
    command = [sys.executable, REPOSITORY / "bench" / "nvme.py", "--quick", "--mib", "16", "--folder", tmp_path]
    done = subprocess.run(
        [*command, "--program", program, "--json", result], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(result.read_text())
    assert report["wrong_bytes"] == 0
    # Whatever else the machine does: each of them moved, and what has a peer was set beside it.
    assert all(row["value"] > 0 for row in report["rows"])
    stores = [row for row in report["rows"] if row["system"] == "store on soft NVMe"]
    assert len(stores) == 9 and all(row["ratio"] for row in stores)
    assert len([row for row in report["rows"] if row["system"] == "soft NVMe on a file"]) == 8
    assert not list(tmp_path.glob("nvme-bench.*"))


def _configure(build: Path, *definitions: str, **environment: str) -> str:
    command = ["cmake", "-S", str(REPOSITORY), "-B", str(build), "-G", "Ninja", *definitions]
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_build_without_cuda_names_its_choice(tmp_path):
    assert "CUDA off" in _configure(tmp_path, "-DTARDIS_CUDA=OFF")


def test_wrong_cuda_choice_is_refused_by_name(tmp_path):
    command = ["cmake", "-S", str(REPOSITORY), "-B", str(tmp_path), "-DTARDIS_CUDA=MAYBE"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert 'TARDIS_CUDA: expected ON, OFF or AUTO, found "MAYBE"' in " ".join(result.stderr.split())
