# SPDX-License-Identifier: Apache-2.0
"""What a guest can come to is told apart: a harness that calls everything a pass would be worse than none."""

from __future__ import annotations

import signal
import time

import pytest
from guest import GuestError, Machine, Outcome, QemuCrashedError
from guest_lab import PATIENCE
from scenarios import CRASHES, passed


def test_a_program_that_fails(lab):
    with lab.boot(Machine(), "echo here; exit 3") as guest:
        guest.wait_for("^here$")
        assert not guest.outcome().passed
    with pytest.raises(GuestError, match="failed"):
        guest.passed()


def test_a_kernel_that_panics(lab):
    with lab.boot(Machine(), "echo 1 >/proc/sys/kernel/sysrq; echo c >/proc/sysrq-trigger") as guest:
        with pytest.raises(GuestError, match=r"exit status is 0: its kernel panicked[\s\S]*sysrq triggered crash"):
            guest.outcome()


def test_a_program_that_hangs(lab):
    started = time.monotonic()
    with lab.boot(Machine(), "echo waiting; sleep 1000", seconds=15) as guest:
        with pytest.raises(GuestError, match=r"no verdict within \d+ s[\s\S]*waiting"):
            guest.outcome()
    assert time.monotonic() - started < 15 * PATIENCE + 7


def test_a_qemu_that_does_not_start(lab):
    with lab.boot(Machine(iommu=("no-such-device",)), "true") as guest:
        with pytest.raises(GuestError, match=r"QEMU did not start[\s\S]*no-such-device"):
            guest.outcome()


@pytest.mark.parametrize("case", [CRASHES, "GuestIo.Other"])
def test_a_qemu_that_crashes(lab, case):
    """In the case in which it is known to, it costs a second guest, and that is said; elsewhere it is a failure."""
    crashed = []

    def crash_once(guest, _):
        if not crashed:
            crashed.append(guest.name)
            guest.signal(signal.SIGSEGV)

    script = f'echo "[ RUN      ] {case}"; sleep 0.1; echo "crash" >&3; head -n 1 <&3 >/dev/null'
    if case == CRASHES:
        assert passed(lab, Machine(), script, actions={"crash": crash_once}).passed
        assert lab.notes == [f"QEMU itself crashed in {CRASHES}; a second guest was started"]
        assert lab.qemu_crashes == 1
        lab.qemu_crashes = 0  # nothing for the summary: it was killed
    else:
        with pytest.raises(QemuCrashedError, match="QEMU itself crashed"):
            passed(lab, Machine(), script, actions={"crash": crash_once})
        assert lab.notes == []
    assert crashed == ["guest0"]


def test_a_request_that_cannot_be_met(lab):
    with lab.boot(Machine(), 'echo "fly away" >&3; head -n 1 <&3', actions={"walk": lambda *_: None}) as guest:
        with pytest.raises(GuestError, match=r"asked for 'fly away', which failed: expected one of \['walk'\]"):
            guest.outcome()
    assert guest.asked == ["fly away"]
    assert "failed GuestError" in guest.log


def test_what_a_program_says_of_its_cases():
    log = """[ RUN      ] Suite.Good
[       OK ] Suite.Good (12 ms)
[  FAILED  ] All/Suite.Bad/3, where GetParam() = 4-byte object <00-00 00-00> (3 ms)
[  SKIPPED ] Suite.Left (0 ms)
[  FAILED  ] 1 test, listed below:
[  FAILED  ] All/Suite.Bad/3, where GetParam() = 4-byte object <00-00 00-00>
answer: 42
"""
    outcome = Outcome(False, log, 1.0)
    assert outcome.cases("OK") == ["Suite.Good"]
    assert outcome.cases("FAILED") == ["All/Suite.Bad/3"]
    assert outcome.cases("SKIPPED") == ["Suite.Left"]
    assert outcome.value("answer") == "42"
    with pytest.raises(AssertionError, match="said nothing of question"):
        outcome.value("question")
