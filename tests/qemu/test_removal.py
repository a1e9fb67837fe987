# SPDX-License-Identifier: Apache-2.0
"""Drives that are taken out while they work."""

from __future__ import annotations

import pytest
from guest import Machine
from guest_drives import Controller, Namespace
from scenarios import check, run

DRIVE = Controller((Namespace(block_bytes=4096),), hot_plug=True)
# The kernel waits for more than a minute for the reset of a function that is gone, and the end of the process with it:
# so the verdict is what the program printed.
RUN_WITHOUT_WAITING = """
{run} >/tmp/log 2>&1 &
until grep -qE '^\\[  (PASSED|FAILED)  \\]' /tmp/log; do sleep 0.1; done
sleep 0.5
cat /tmp/log
! grep -q '^\\[  FAILED  \\]' /tmp/log
"""


def unplug(guest, number):
    guest.unplug(int(number))


def gone(guest, number):
    guest.wait_event("DEVICE_DELETED", 20)


@pytest.mark.parametrize("hot_plug", ["acpi", "native"])
def test_a_removal_that_is_asked_for(lab, hot_plug):
    machine = Machine((DRIVE,), native_hot_plug=hot_plug == "native")
    actions = {"unplug": unplug, "gone": gone}
    with lab.boot(machine, run("ScenarioRemoval.AskedForWhileItWorks"), actions=actions) as guest:
        outcome = guest.passed()
    check(lab, outcome, "ScenarioRemoval.AskedForWhileItWorks")
    assert guest.asked == ["unplug 0", "gone 0"]
    lab.notes.append(f"told after {outcome.value('asked after')}")


def test_power_off(lab):
    machine = Machine((DRIVE,), native_hot_plug=True)
    script = RUN_WITHOUT_WAITING.format(run=run("ScenarioRemoval.PowerOffWhileItWorks"))
    with lab.boot(machine, script) as guest:
        outcome = guest.passed()
    check(lab, outcome, "ScenarioRemoval.PowerOffWhileItWorks")
    lab.notes += [f"{name}: {outcome.value(name)}" for name in ("longest request", "closed after")]
