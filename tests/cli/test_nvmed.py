# SPDX-License-Identifier: Apache-2.0
"""`tardis nvmed` as far as it goes without a drive; tests/qemu/test_broker.py has the rest."""

import os
import signal
import socket
import subprocess
import sys

import pytest
from command_line import failure, needs_core
from sglang_tardis.cli.nvmed import notify


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "nonsense"], ["PCI", "nonsense"]),
        (["--device", "0000:ff:1f.7"], ["0000:ff:1f.7"]),
        (["--device", "0000:00:04.0", "--user", "nobody-of-this-name"], ["--user", "nobody-of-this-name"]),
        (["--device", "0000:00:04.0", "--group", "no-group-of-this-name"], ["--group", "no-group-of-this-name"]),
        (["--device", "0000:00:04.0", "--client-bytes", "much"], ["--client-bytes", "much"]),
    ],
)
def test_refusals_name_what_is_wrong(capsys, tmp_path, arguments, words):
    needs_core()
    text = failure(capsys, "nvmed", "--socket", tmp_path / "nvmed", *arguments)
    assert all(word in text for word in words), text
    assert not (tmp_path / "nvmed").exists()
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.parametrize("abstract", [False, True])
def test_the_service_manager_is_told(monkeypatch, tmp_path, abstract):
    name = f"tardis-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name}" if abstract else name)
        manager.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}" if abstract else name)
        notify("READY=1")
        assert manager.recv(100) == b"READY=1"
    notify("READY=1")  # nobody listens any more: no error


@pytest.mark.skipif(os.geteuid() != 0, reason="dropping privileges needs root")
def test_privileges_are_dropped_for_good():
    needs_core()
    program = """
import os
from sglang_tardis.nvmed_abi import drop_privileges
drop_privileges(65534, 65534, 4321)
assert os.getresuid() == (65534,) * 3 and os.getresgid() == (65534,) * 3, os.getresuid()
assert sorted(os.getgroups()) == [4321, 65534], os.getgroups()
facts = dict(line.split(":\\t") for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
assert int(facts["CapEff"], 16) == int(facts["CapPrm"], 16) == 0 and facts["NoNewPrivs"] == "1", facts
try:
    os.setuid(0)
except PermissionError:
    print("dropped")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "dropped\n", done.stderr
