# SPDX-License-Identifier: Apache-2.0
"""SGLang 0.5.16, the other supported release, from a folder that holds its wheel (README.md says how it is made)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SITE = os.environ.get("TARDIS_SGLANG16_SITE", "")
CHECKS = Path(__file__).with_name("sglang16_checks.py")
NAMES = re.findall(r"^def (check_\w+)", CHECKS.read_text(), re.MULTILINE)

pytestmark = pytest.mark.skipif(
    not (SITE and Path(SITE, "sglang").is_dir()),
    reason="TARDIS_SGLANG16_SITE names no folder with SGLang 0.5.16 (tests/sglang/README.md); `make test` makes one",
)


@pytest.fixture(scope="module")
def results():
    """All checks run in one process: importing SGLang is what takes the time."""
    import sglang_tardis

    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([SITE, str(Path(sglang_tardis.__file__).parents[1])]))
    done = subprocess.run(
        [sys.executable, str(CHECKS)],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
        cwd=CHECKS.parent.parent,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    assert lines, f"the checks did not run to their end (exit {done.returncode}):\n{done.stderr[-4000:]}"
    return json.loads(lines[-1].removeprefix("RESULTS "))


@pytest.mark.parametrize("name", NAMES)
def test_sglang16(results, name):
    assert name in results
    if results[name] is not None:
        pytest.fail(results[name], pytrace=False)
