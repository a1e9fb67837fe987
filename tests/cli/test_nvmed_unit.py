# SPDX-License-Identifier: Apache-2.0
"""packaging/tardis-nvmed@.service says what `tardis nvmed` understands, and what systemd does."""

import argparse
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from sglang_tardis.cli import nvmed

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "packaging" / "tardis-nvmed@.service"
INSTANCE = "0000:81:00.0"


def values(key: str) -> list[str]:
    found = [line.removeprefix(f"{key}=") for line in UNIT.read_text().splitlines() if line.startswith(f"{key}=")]
    return [value.replace("%i", INSTANCE) for value in found]


def test_the_command_is_understood():
    (command,) = values("ExecStart")
    program, name, *arguments = shlex.split(command)
    scripts = re.search(r"^\[project\.scripts\]\n((?:\w.*\n)+)", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert re.search(rf"^{Path(program).name} = ", scripts[1], re.MULTILINE)
    parser = argparse.ArgumentParser()
    nvmed.add_parser(parser.add_subparsers())
    options = parser.parse_args([name, *arguments])
    assert options.run is nvmed.run and options.device == INSTANCE
    # The socket lies where the service manager makes a folder for it, and nobody but the unit's group reaches it.
    (folder,) = values("RuntimeDirectory")
    assert Path(options.socket).parent == Path("/run") / folder
    assert [options.group] == values("Group") and options.user is None


def test_every_file_that_vfio_opens_is_allowed():
    allowed = {value.removesuffix(" rw") for value in values("DeviceAllow")}
    # /dev/vfio/<group> and /dev/vfio/devices/* by the names that they have in /proc/devices.
    assert allowed == {"char-vfio", "char-vfio-dev", "/dev/vfio/vfio", "/dev/iommu"}
    assert values("DevicePolicy") == ["closed"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze, of the package systemd")
def test_systemd_understands_it(tmp_path):
    """Every key and value; not whether a program is installed in /usr/local/bin on this machine."""
    text = re.sub(r"^ExecStart=\S+", f"ExecStart={shutil.which('true')}", UNIT.read_text(), flags=re.MULTILINE)

    def complaints(text: str) -> list[str]:
        unit = tmp_path / UNIT.name
        unit.write_text(text)
        command = ["systemd-analyze", "verify", "--man=no", unit]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        # Units of this machine, on which every unit depends, may have faults of their own.
        return [line for line in done.stderr.splitlines() if UNIT.stem in line]

    assert complaints(text) == []
    (complaint,) = complaints(text.replace("RestrictRealtime", "RestrictRealtme"))
    assert "Unknown key" in complaint and "RestrictRealtme" in complaint
    assert complaints(text.replace("LimitMEMLOCK=infinity", "LimitMEMLOCK=much")) != []
