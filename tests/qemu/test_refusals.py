# SPDX-License-Identifier: Apache-2.0
"""Drives that somebody uses, or that have something on them, are left alone."""

from __future__ import annotations

from guest import Machine
from guest_drives import Controller, Namespace, Slow
from scenarios import check, run

SCRIPT = """
mke2fs -F /dev/nvme0n1 >/dev/null && mkdir -p /mnt && mount -t ext2 /dev/nvme0n1 /mnt || exit 1
echo precious >/mnt/file
mkswap /dev/nvme1n1 >/dev/null && swapon /dev/nvme1n1 || exit 1
{in_use} || exit 1
umount /mnt && swapoff /dev/nvme1n1 || exit 1
{elsewhere} || exit 1
{of_the_kernel} || exit 1
for address in $(echo $TARDIS_GUEST_NVME | tr , ' '); do
  echo vfio-pci >/sys/bus/pci/devices/$address/driver_override
  echo $address >/sys/bus/pci/devices/$address/driver/unbind
  echo $address >/sys/bus/pci/drivers_probe
done
{released} || exit 1
# The kernel's driver finds the file as it was.
address=${{TARDIS_GUEST_NVME%%,*}}
echo >/sys/bus/pci/devices/$address/driver_override
echo $address >/sys/bus/pci/devices/$address/driver/unbind
echo $address >/sys/bus/pci/drivers/nvme/bind
until [ -b /dev/nvme0n1 ]; do usleep 20000; done
mount -t ext2 /dev/nvme0n1 /mnt && grep -q precious /mnt/file
"""
CASES = {
    "in_use": "DrivesInUseAreRefused",
    "elsewhere": "DrivesOpenElsewhereAreRefused",
    "of_the_kernel": "DrivesOfTheKernelAreRefused",
    "released": "WhatIsOnThemIsNotLost",
}


def test_drives_of_the_kernel(lab):
    drive = Controller((Namespace(mib=32),))
    machine = Machine((drive, drive), kernel_driver=True, vfio=False)
    script = SCRIPT.format(**{name: run(f"ScenarioKernel.{case}") for name, case in CASES.items()})
    with lab.boot(machine, script) as guest:
        outcome = guest.passed()
    check(lab, outcome, *(f"ScenarioKernel.{case}" for case in CASES.values()))
    lab.notes += [line for line in outcome.log.splitlines() if line.startswith("refused: ")]


def test_formats_and_neighbours(lab):
    """Namespaces that the driver cannot use, and controllers that are not alone in their IOMMU group."""
    formats = Controller(
        (
            Namespace(mib=32),
            Namespace(mib=32, options=("ms=8",)),
            Namespace(mib=32, options=("ms=8", "pi=1")),
            Namespace(mib=32, block_bytes=2048),
            Namespace(mib=32, options=("zoned=on", "zoned.zone_size=4M")),
        )
    )
    drive = Controller((Namespace(mib=32, medium=Slow(0)),))
    machine = Machine((formats, drive, Controller((Namespace(mib=32),), beside=True)), kernel_driver=True)
    with lab.boot(machine, run("ScenarioFormats.*")) as guest:
        outcome = guest.passed()
    check(lab, outcome, "ScenarioFormats.WhatCannotBeDrivenIsLeftOut", "ScenarioFormats.NeighboursOfAnIommuGroup")
    lab.notes += [line for line in outcome.log.splitlines() if line.startswith("refused: ")]
