# SPDX-License-Identifier: Apache-2.0
"""What `tardis nvme` does to a drive: looking at it, releasing it, formatting it, giving it back."""

from __future__ import annotations

from guest import Machine
from guest_drives import Controller, Namespace
from scenarios import check, run

CASES = (
    "ADriveIsReleased",
    "AReleasedDriveIsDescribed",
    "ANamespaceIsFormattedForAStore",
    "ADriveIsGivenBack",
)
SCRIPT = f"""
mke2fs -F /dev/nvme0n1 >/dev/null && mkdir -p /mnt && mount -t ext2 /dev/nvme0n1 /mnt || exit 1
{run("ScenarioCli.ADriveInUseStays")} || exit 1
umount /mnt || exit 1
{run(":".join(f"ScenarioCli.{case}" for case in CASES))} || exit 1
"""


def test_a_drive_from_the_kernel_and_back(lab):
    machine = Machine((Controller((Namespace(mib=64),)),), kernel_driver=True, vfio=False)
    with lab.boot(machine, SCRIPT) as guest:
        outcome = guest.passed()
    check(lab, outcome, "ScenarioCli.ADriveInUseStays", *(f"ScenarioCli.{case}" for case in CASES))
