# SPDX-License-Identifier: Apache-2.0
"""All cases of `tardis_nvme_guest` that need no particular machine, on QEMU's controller through vfio-pci."""

from __future__ import annotations

import pytest
from guest import Machine
from guest_drives import Controller, Namespace

BOTH_FORMATS = Controller((Namespace(block_bytes=512), Namespace(block_bytes=4096)))
LARGE_BLOCKS_FIRST = Controller((Namespace(block_bytes=4096), Namespace(block_bytes=512)))
# What QEMU's controller cannot do, or its machine has not. Any other skip would hide a case.
KNOWN_SKIPS: dict[str, str] = {}
LEAST_CASES = 4

MACHINES = {
    "512": Machine((BOTH_FORMATS,)),
    "4096": Machine((LARGE_BLOCKS_FIRST,)),
}
# Cases that an IOMMU could go wrong with.
IOMMUS = {
    "caching": ("intel-iommu,intremap=on,caching-mode=on,aw-bits=48,device-iotlb=on",),
}


def note(lab, outcome):
    passed, skipped = outcome.cases("OK"), outcome.cases("SKIPPED")
    lab.notes.append(f"{len(passed)} cases passed, {len(skipped)} skipped, {outcome.seconds:.1f} s")
    return passed, skipped


@pytest.mark.parametrize("machine", MACHINES)
def test_every_case(lab, machine):
    with lab.boot(MACHINES[machine], "tardis_nvme_guest --gtest_filter=-Scenario*", seconds=150) as guest:
        outcome = guest.passed()
    passed, skipped = note(lab, outcome)
    assert len(passed) >= LEAST_CASES and not outcome.cases("FAILED"), outcome.log
    assert set(skipped) <= set(KNOWN_SKIPS), outcome.log


@pytest.mark.parametrize("iommu", IOMMUS)
def test_other_iommus(lab, iommu):
    machine = Machine((BOTH_FORMATS,), iommu=IOMMUS[iommu])
    with lab.boot(machine, "tardis_nvme_guest --gtest_filter=GuestBringUp*:GuestData*") as guest:
        outcome = guest.passed()
    passed, _ = note(lab, outcome)
    assert len(passed) >= LEAST_CASES, outcome.log
