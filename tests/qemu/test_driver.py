# SPDX-License-Identifier: Apache-2.0
"""All cases of `tardis_nvme_guest` that need no particular machine, on QEMU's controller through vfio-pci."""

from __future__ import annotations

import re

import pytest
from guest import Machine
from guest_drives import Controller, Namespace
from scenarios import passed, run

SMALL_BLOCKS, LARGE_BLOCKS = Namespace(block_bytes=512), Namespace(block_bytes=4096)
# Cases look at the first controller, of which the first namespace; one of them gives the second controller to the
# kernel's driver and takes it back.
MACHINES = {
    "512": Machine((Controller((SMALL_BLOCKS, LARGE_BLOCKS)), Controller()), kernel_driver=True),
    "4096": Machine((Controller((LARGE_BLOCKS, SMALL_BLOCKS)), Controller()), kernel_driver=True),
}
# These have machines of their own: test_faults.py, test_removal.py, test_power_cut.py, test_refusals.py.
ELSEWHERE = ("Scenario*", "GuestSlow.*", "GuestUnplug.*")
LEAST_CASES = 40

# Cases that an IOMMU could go wrong with.
IOMMUS = {
    "caching": ("intel-iommu,intremap=on,caching-mode=on,aw-bits=48,device-iotlb=on",),
}


def note(lab, outcome):
    good, skipped = outcome.cases("OK"), outcome.cases("SKIPPED")
    lab.notes.append(f"{len(good)} cases passed, {len(skipped)} skipped, {outcome.seconds:.1f} s")
    return good, skipped


@pytest.mark.parametrize("machine", MACHINES)
def test_every_case(lab, machine):
    outcome = passed(lab, MACHINES[machine], run("-" + ":".join(ELSEWHERE)), seconds=150)
    good, skipped = note(lab, outcome)
    assert len(good) >= LEAST_CASES, outcome.log
    assert not skipped, outcome.log


@pytest.mark.parametrize("iommu", IOMMUS)
def test_other_iommus(lab, iommu):
    machine = Machine((Controller((LARGE_BLOCKS, SMALL_BLOCKS)),), iommu=IOMMUS[iommu])
    with lab.boot(machine, run("GuestBringUp.*:GuestMemory.*:GuestStore.*")) as guest:
        outcome = guest.passed()
    good, skipped = note(lab, outcome)
    assert len(good) >= 10 and not skipped, outcome.log


def test_transfers_of_any_length(lab):
    """Several MiB with chains of lists, on a controller that bounds none."""
    machine = Machine((Controller((SMALL_BLOCKS, LARGE_BLOCKS), options=("mdts=0",)),))
    with lab.boot(machine, run("GuestVectors.Prp*")) as guest:
        outcome = guest.passed()
    note(lab, outcome)
    assert sorted(outcome.cases("OK")) == ["GuestVectors.Prp", "GuestVectors.PrpTable"], outcome.log
    moved = re.findall(r"(\d+) PRP vectors moved", outcome.log)
    assert len(moved) == 2 and all(int(count) >= 24 for count in moved), outcome.log
