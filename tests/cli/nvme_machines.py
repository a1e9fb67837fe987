# SPDX-License-Identifier: Apache-2.0
"""Machines of files: what sysfs, procfs and /dev show of NVMe controllers and of VFIO."""

from __future__ import annotations

from pathlib import Path

DRIVE = "0000:81:00.0"


class NvmeMachine:
    """A folder with sys, proc and dev. No driver acts here: what is written stays as it is."""

    def __init__(self, folder: Path):
        self.root = folder
        self.write("proc/self/mountinfo", "22 1 0:20 / / rw - tmpfs tmpfs rw\n")
        self.write("proc/self/status", "Name:\tdoctor\nCapEff:\t0000000000000000\n")
        self.write("proc/swaps", "Filename Type Size Used Priority\n")
        self.write("sys/bus/pci/drivers_probe", "")
        (folder / "sys/bus/pci/devices").mkdir(parents=True)
        (folder / "dev").mkdir()

    def write(self, file: str, text: str) -> None:
        path = self.root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def read(self, file: str) -> str:
        return (self.root / file).read_text()

    def add_driver(self, name: str) -> None:
        self.write(f"sys/bus/pci/drivers/{name}/unbind", "")

    def add_vfio(self) -> None:
        self.add_driver("vfio-pci")
        self.write("dev/vfio/vfio", "")
        (self.root / "sys/module/vfio_iommu_type1").mkdir(parents=True)

    def add_function(
        self, address: str = DRIVE, *, driver: str = "", group: str = "", class_code: str = "0x010802"
    ) -> Path:
        at = self.root / "sys/bus/pci/devices" / address
        for name, text in {
            "class": class_code,
            "vendor": "0x144d",
            "device": "0xa80a",
            "numa_node": "1",
            "driver_override": "(null)",
            "resource": "0x00000000fe000000 0x00000000fe003fff 0x0000000000140204",
            "current_link_speed": "16.0 GT/s PCIe",
            "max_link_speed": "32.0 GT/s PCIe",
            "current_link_width": "4",
            "max_link_width": "4",
        }.items():
            self.write(f"sys/bus/pci/devices/{address}/{name}", f"{text}\n")
        if driver:
            self.add_driver(driver)
            (at / "driver").symlink_to(self.root / "sys/bus/pci/drivers" / driver)
        if group:
            members = self.root / "sys/kernel/iommu_groups" / group / "devices"
            members.mkdir(parents=True, exist_ok=True)
            (members / address).symlink_to(at)
            (at / "iommu_group").symlink_to(members.parent)
            (self.root / "sys/class/iommu/dmar0").mkdir(parents=True, exist_ok=True)
        return at

    def add_kernel_drive(self, *, group: str = "17") -> None:
        """Of the kernel's driver, with one namespace, which is a swap."""
        self.add_function(driver="nvme", group=group)
        controller = f"sys/bus/pci/devices/{DRIVE}/nvme/nvme0"
        for name, text in {
            "model": "Fast Drive 9000          ",
            "serial": "S123 ",
            "firmware_rev": "FW1",
            "queue_count": "33",
        }.items():
            self.write(f"{controller}/{name}", f"{text}\n")
        (self.root / controller / "nvme0n1").mkdir()
        self.write("dev/nvme0n1", "")
        for name, text in {
            "dev": "259:0",
            "size": "4194304",
            "metadata_bytes": "0",
            "queue/logical_block_size": "512",
            "queue/max_hw_sectors_kb": "256",
            "queue/write_cache": "write back",
            "queue/atomic_write_max_bytes": "4096",
        }.items():
            self.write(f"sys/block/nvme0n1/{name}", f"{text}\n")

    def use(self) -> None:
        self.write("proc/swaps", "Filename Type Size Used Priority\n/dev/nvme0n1 partition 1 0 -2\n")
