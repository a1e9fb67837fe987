# SPDX-License-Identifier: Apache-2.0
"""VFIO's character device with iommufd, and VFIO without an IOMMU, on a kernel that has them.

The distribution's has neither: ``TARDIS_VFIO_KERNEL`` names a folder that scripts/build-vfio-kernel made, and without
it these are skipped. `make soak ARGS=qemu` runs them where it is set.
"""

from __future__ import annotations

import pytest
from guest import Machine
from guest_drives import Controller, Namespace, pci_addresses
from guest_image import Kernel, MissingError
from guest_lab import PROGRAM
from scenarios import BROKER, check, passed, run, run_without_waiting
from test_driver import ELSEWHERE, LEAST_CASES, MACHINES, note
from test_power_cut import kill_and_look
from test_removal import DRIVE as DRIVE_IN_A_SLOT

SMALL_BLOCKS, LARGE_BLOCKS = Namespace(block_bytes=512), Namespace(block_bytes=4096)
DRIVE = Controller((LARGE_BLOCKS, SMALL_BLOCKS))
# 2 MiB each; a drive takes one for each of its queues.
WITHOUT_IOMMU = {"iommu": (), "kernel_options": "vfio.enable_unsafe_noiommu_mode=1 hugepages=64"}
NO_GROUPS = "rm /dev/vfio/[0-9]* || exit 1"
OTHER_WAYS = "GuestRefusals.WaysThatThisKernelLacks"
# Without an IOMMU only huge pages can be named to a drive, nothing is pinned, and there are no interrupts.
NEEDS_IOMMU = {
    OTHER_WAYS,
    "GuestDevice.InterruptsReachTheProcess",
    "GuestIo.LargeRequestsAreCutWhereTheControllerSays",
    "GuestIo.WhatIsWrongIsRefusedByTheController",
    "GuestMemory.MemlockLimitIsReachedAndNamed",
    "GuestMemory.MoreThanAnIommuPageTable",
    "GuestMemory.SelfTestOfHostMemory",
    "GuestMemory.TooLowALimitForTheQueuesIsSaidBeforeAnythingRuns",
    "GuestQueues.OwnersOutsideWorkBesideTheDriver",
    "GuestQueues.TheyAreGrantedClosedAndEndedByAReset",
    "GuestRecovery.FatalStatusEndsInAReset",
    "GuestRefusals.QueuesOfOthers",
    "GuestRefusals.SelfTestOfReads",
    "GuestRefusals.TablesOfScatteredGranules",
    "GuestStore.RegisteredPoolIsReadWithoutCopies",
    "GuestVectors.Prp",
    "GuestVectors.PrpTable",
    "GuestVectors.Sgl",
}


def kernel_of_all_ways() -> Kernel:
    try:
        return Kernel.of_other_ways(PROGRAM)
    except MissingError as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("machine", MACHINES)
def test_every_case_on_the_device_file(lab, machine):
    kernel, environment = kernel_of_all_ways(), {"TARDIS_GUEST_WAY": "device-file"}
    script = run("-" + ":".join(ELSEWHERE))
    outcome = passed(lab, MACHINES[machine], script, seconds=150, environment=environment, kernel=kernel)
    good, skipped = note(lab, outcome)
    assert len(good) >= LEAST_CASES - 1 and skipped == [OTHER_WAYS], outcome.log


def test_the_device_file_where_there_are_no_groups(lab):
    """What takes it by itself, what the tools say of it, and a broker on it."""
    script = f"{NO_GROUPS}\n{run('ScenarioDeviceFile.*:ScenarioBroker.*')}"
    with lab.boot(Machine((DRIVE,)), script, kernel=kernel_of_all_ways()) as guest:
        outcome = guest.passed()
    check(
        lab,
        outcome,
        *BROKER,
        "ScenarioDeviceFile.IsTakenWhereThereAreNoGroups",
        "ScenarioDeviceFile.IsWhatTheToolsName",
        "ScenarioDeviceFile.NeedsNoRootOnceItsFilesAreGiven",
    )


@pytest.mark.parametrize("machine", MACHINES)
def test_every_case_without_an_iommu(lab, machine):
    kernel, environment = kernel_of_all_ways(), {"TARDIS_GUEST_WAY": "without-iommu"}
    machine = Machine(MACHINES[machine].controllers, kernel_driver=True, **WITHOUT_IOMMU)
    script = run("-" + ":".join(ELSEWHERE))
    outcome = passed(lab, machine, script, seconds=150, environment=environment, kernel=kernel)
    good, skipped = note(lab, outcome)
    assert len(good) >= 30 and set(skipped) == NEEDS_IOMMU, outcome.log


def test_what_is_particular_without_an_iommu(lab):
    machine = Machine((DRIVE,), **WITHOUT_IOMMU)
    with lab.boot(machine, run("ScenarioWithoutIommu.*"), kernel=kernel_of_all_ways()) as guest:
        outcome = guest.passed()
    check(
        lab,
        outcome,
        "ScenarioWithoutIommu.AForkedChildChangesNoAddress",
        "ScenarioWithoutIommu.IsTakenOnlyIfAskedFor",
        "ScenarioWithoutIommu.IsWhatTheToolsWarnOf",
        "ScenarioWithoutIommu.NeedsHugePages",
        "ScenarioWithoutIommu.NeedsRoot",
    )
    lab.notes += [line for line in outcome.log.splitlines() if line.startswith("refused: ")]


MACHINE_OF_WAY = {"device-file": {}, "without-iommu": WITHOUT_IOMMU}


@pytest.mark.parametrize("way", MACHINE_OF_WAY)
def test_kill_9(lab, way):
    """What the kernel takes back from a process that is killed is another thing in each way."""
    machine = Machine((Controller((Namespace(mib=128, block_bytes=4096),)),), **MACHINE_OF_WAY[way])
    kill_and_look(lab, machine, environment={"TARDIS_GUEST_WAY": way}, kernel=kernel_of_all_ways())


@pytest.mark.parametrize("way", MACHINE_OF_WAY)
def test_removal(lab, way):
    """A drive that is asked for, and one that is pulled in mid-I/O."""
    machine = Machine((Controller(), DRIVE_IN_A_SLOT), native_hot_plug=True, **MACHINE_OF_WAY[way])
    environment = {"TARDIS_GUEST_UNPLUG": pci_addresses(machine.controllers)[1], "TARDIS_GUEST_WAY": way}
    script = run_without_waiting("GuestUnplug.*")
    with lab.boot(machine, script, environment=environment, kernel=kernel_of_all_ways()) as guest:
        outcome = guest.passed()
    check(lab, outcome, "GuestUnplug.KernelAsksForIt", "GuestUnplug.PulledInTheMiddleOfItsWork")
