# SPDX-License-Identifier: Apache-2.0
"""What the tests of the commands start from."""

from pathlib import Path

import pytest
from command_line import fill, needs_core


@pytest.fixture(autouse=True)
def no_configuration(monkeypatch):
    monkeypatch.delenv("TARDIS_CONFIG", raising=False)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    needs_core()
    folder = tmp_path / "store"
    fill(folder, "llama", 5, 1)
    fill(folder, "qwen\x1b[31m", 3, 2)
    return folder
