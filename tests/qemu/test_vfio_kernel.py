# SPDX-License-Identifier: Apache-2.0
"""scripts/build-vfio-kernel as far as it goes without a build: what it refuses, and that no option is lost."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from guest_image import REPOSITORY, Kernel, MissingError

SCRIPT = REPOSITORY / "scripts" / "build-vfio-kernel"
FRAGMENT = REPOSITORY / "tests" / "qemu" / "vfio-kernel.config"
# `make allnoconfig` of a kernel that knows each option, but for those that $LOST names.
MAKE = r"""
for word; do
  case $word in O=*) objects=${word#O=};; KCONFIG_ALLCONFIG=*) fragment=${word#*=};; esac
done
sed -E 's/^(CONFIG_.*)=n$/# \1 is not set/' "$fragment" | grep -v "^${LOST:-nothing}=" >"$objects/.config"
"""


@pytest.fixture
def programs(tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    texts = {name: "exit 0" for name in ("gcc", "flex", "bison", "bc", "xz")} | {"make": MAKE}
    for name, text in texts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


def source(tmp_path, release):
    tree = tmp_path / f"linux-{release}"
    tree.mkdir()
    numbers = zip(("VERSION", "PATCHLEVEL", "SUBLEVEL"), release.split("."), strict=True)
    (tree / "Makefile").write_text("".join(f"{name} = {number}\n" for name, number in numbers))
    return tree


def build(tmp_path, programs, *arguments, lost=""):
    environment = {**os.environ, "PATH": f"{programs}:/usr/bin:/bin", "LOST": lost}
    command = [sys.executable, SCRIPT, "--check", tmp_path / "kernel", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_no_option_is_lost(tmp_path, programs):
    tree = source(tmp_path, "6.12.3")
    done = build(tmp_path, programs, tree)
    assert (done.returncode, done.stderr) == (0, "") and "Linux 6.12.3: configuring" in done.stdout
    assert sorted(file.name for file in tree.iterdir()) == ["Makefile"], "the source tree is not written to"
    for lost in ("CONFIG_VFIO_NOIOMMU", "CONFIG_IOMMUFD"):
        assert f"{lost}=y\n" in FRAGMENT.read_text()
        done = build(tmp_path, programs, tree, lost=lost)
        assert done.returncode == 1 and f"has no {lost}=y: renamed" in done.stderr


def test_what_is_no_kernel_or_too_old(tmp_path, programs):
    assert "expected Linux 6.6 or later, found 6.1.90" in build(tmp_path, programs, source(tmp_path, "6.1.90")).stderr
    assert "expected a kernel's source tree, found none" in build(tmp_path, programs, programs).stderr
    assert "found nothing" in build(tmp_path, programs, tmp_path / "nowhere").stderr
    (programs / "gcc").write_text("#!/bin/sh\nexit 1\n")
    assert "found no libelf-dev: apt-get install" in build(tmp_path, programs, programs).stderr


def test_why_there_is_no_kernel_for_other_ways(tmp_path, monkeypatch):
    program = tmp_path / "program"
    program.write_bytes(b"VFIO type1")
    monkeypatch.delenv("TARDIS_VFIO_KERNEL", raising=False)
    with pytest.raises(MissingError, match=r"names no kernel .*: scripts/build-vfio-kernel makes one"):
        Kernel.of_other_ways(program)
    monkeypatch.setenv("TARDIS_VFIO_KERNEL", str(tmp_path))
    with pytest.raises(MissingError, match="no vmlinuz in"):
        Kernel.of_other_ways(program)
    (tmp_path / "vmlinuz").write_bytes(b"kernel")
    with pytest.raises(MissingError, match=r"older than Linux 6\.6: compile it with -DTARDIS_KERNEL_HEADERS="):
        Kernel.of_other_ways(program)
    program.write_bytes(b"\0VFIO with iommufd\0")
    assert Kernel.of_other_ways(program).modules == []
