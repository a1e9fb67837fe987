# SPDX-License-Identifier: Apache-2.0
"""Drives that are taken out while they work."""

from __future__ import annotations

import pytest
from guest import Machine
from guest_drives import Controller, Namespace, pci_addresses
from scenarios import check, run, run_without_waiting

DRIVE = Controller((Namespace(block_bytes=4096),), hot_plug=True)


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
    """Also a drive that its driver is asked for, and gets back."""
    machine = Machine((Controller(), DRIVE), native_hot_plug=True)
    environment = {"TARDIS_GUEST_UNPLUG": pci_addresses(machine.controllers)[1]}
    with lab.boot(machine, run_without_waiting("GuestUnplug.*"), environment=environment) as guest:
        outcome = guest.passed()
    check(lab, outcome, "GuestUnplug.KernelAsksForIt", "GuestUnplug.PulledInTheMiddleOfItsWork")


def test_one_of_two_drives(lab):
    """Of two that one process drives; the store on the other works on."""
    other = Controller((Namespace(block_bytes=512),))
    machine = Machine((DRIVE, other), native_hot_plug=True)
    with lab.boot(machine, run_without_waiting("ScenarioTwo.*")) as guest:
        outcome = guest.passed()
    check(lab, outcome, "ScenarioTwo.OneThatGoesIsNothingToTheOther")


def test_the_drive_of_a_broker(lab):
    with lab.boot(Machine((DRIVE,), native_hot_plug=True), run_without_waiting("ScenarioBrokerLoss.*")) as guest:
        outcome = guest.passed()
    check(lab, outcome, "ScenarioBrokerLoss.ADriveThatIsPulledEndsItsClientsAndTheBroker")
