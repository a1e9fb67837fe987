# SPDX-License-Identifier: Apache-2.0
"""Where the guests' kernel is not to be had, that is said, and neither an error nor a silence."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from guest_image import REPOSITORY, Kernel, MissingError

SCRIPT = REPOSITORY / "scripts" / "install-guest-kernel"


def install(folder, programs):
    environment = {**os.environ, "PATH": str(programs)}
    command = [sys.executable, SCRIPT, folder]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def program(folder, name, text):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("programs", "reason"),
    [
        ({}, "dpkg is not there: not Debian or Ubuntu?"),
        ({"dpkg": "echo arm64"}, "guests are x86-64 machines"),
        ({"dpkg": "echo amd64", "apt-cache": "exit 100"}, "apt knows none of linux-image-cloud-amd64"),
        (
            {
                "dpkg": "echo amd64",
                "apt-cache": '[ "$2" != linux-image-cloud-amd64 ] || echo "  Depends: linux-image-9"',
                "apt-get": "echo E: No network. >&2; exit 100",
            },
            "apt-get -qq download linux-image-9: E: No network.",
        ),
    ],
)
def test_the_reason_is_kept(tmp_path, monkeypatch, programs, reason):
    (tmp_path / "bin").mkdir()
    for name, text in {"sudo": "exit 1", **programs}.items():
        program(tmp_path / "bin", name, text)
    folder = tmp_path / "guest"
    done = install(folder, tmp_path / "bin")
    assert done.returncode == 0 and reason in done.stderr
    assert [file.name for file in folder.iterdir()] == ["why-not"]
    monkeypatch.setenv("TARDIS_GUEST_KERNEL", str(folder))
    with pytest.raises(MissingError, match="no guest kernel"):
        Kernel.find()


def test_folders_of_others_are_left_alone(tmp_path):
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "letters").write_text("dear")
    done = install(folder, tmp_path / "bin")
    assert done.returncode == 2 and "found something else" in done.stderr
    assert (folder / "letters").read_text() == "dear"
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "empty")
    (tmp_path / "empty").mkdir()
    assert install(link, tmp_path / "bin").returncode == 2


def test_what_was_there_is_replaced(tmp_path):
    folder = tmp_path / "guest"
    (folder / "modules").mkdir(parents=True)
    (folder / "vmlinuz").write_bytes(b"old")
    program(tmp_path / "bin", "dpkg", "echo arm64")
    assert install(folder, tmp_path / "bin").returncode == 0
    assert [file.name for file in folder.iterdir()] == ["why-not"]
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith("guest.")] == []
