# SPDX-License-Identifier: Apache-2.0
"""What `tardis doctor` says of drives and of VFIO, with and without each of the things that it looks at."""

import json
import os
import resource
from pathlib import Path

import pytest
from command_line import needs_core, run
from nvme_machines import DRIVE, NvmeMachine
from sglang_tardis.cli import doctor, doctor_nvme

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
NO_IOMMU = (
    "note     IOMMU: off, or hidden from here: no groups in /sys/kernel/iommu_groups. Only VFIO needs it (VT-d or "
    "AMD-Vi in the firmware, intel_iommu=on on the kernel's command line)"
)
NO_DRIVER = "the driver vfio-pci is not loaded (modprobe vfio-pci)"
ONLY = ". Only drives without a file system need it"
MEMLOCK = "ok       memlock: 64.0 MiB; a drive by VFIO takes 12.0 MiB"
NO_DRIVE = "ok       NVMe: no NVMe device here; a store lies on a file system"
IDENTIFY = f"LBA format, SGLS, MDTS, VWC, AWUPF and the queue grant: `tardis nvme identify {DRIVE}`, which resets it"
FUNCTION = "PCIe 16 GT/s x4 (of 32 GT/s x4), BAR0 of 16.0 KiB"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch) -> NvmeMachine:
    needs_core()
    limit(monkeypatch, 64 * MIB)
    return NvmeMachine(tmp_path / "machine")


def limit(monkeypatch, size: int) -> None:
    monkeypatch.setattr(doctor_nvme.resource, "getrlimit", lambda _: (size, size))


def lines(machine: NvmeMachine, pool_bytes: int = 0) -> list[str]:
    return [
        f"{one.status:8} {one.name}: {one.detail}" for one in doctor_nvme.examine_nvme(pool_bytes, str(machine.root))
    ]


def test_a_machine_with_nothing(machine):
    vfio = f"note     VFIO: {NO_DRIVER}; neither /dev/vfio/vfio nor /dev/iommu is there{ONLY}"
    assert lines(machine) == [NO_IOMMU, vfio, MEMLOCK, NO_DRIVE]


def test_a_drive_of_the_kernel(machine):
    machine.add_kernel_drive()
    machine.add_vfio()
    kernel = (
        f"ok       NVMe {DRIVE}: driver nvme, Fast Drive 9000, {FUNCTION}; 32 I/O queues granted; nvme0n1: 2.0 GiB in "
        "blocks of 512 bytes, VWC on, 256.0 KiB a command (MDTS or the kernel's bound), atomic writes of 4.0 KiB; the "
        "kernel does not show SGLS"
    )
    assert lines(machine) == [
        "ok       IOMMU: 1 groups (dmar0)",
        "ok       VFIO: vfio-pci is loaded, /dev/vfio/vfio can be opened",
        MEMLOCK,
        kernel,
    ]
    machine.use()
    assert lines(machine)[-1] == f"{kernel}; nvme0n1 is in use as swap"
    # An older kernel shows less.
    for name in ("metadata_bytes", "queue/atomic_write_max_bytes", "queue/write_cache", "queue/max_hw_sectors_kb"):
        (machine.root / "sys/block/nvme0n1" / name).unlink()
    (machine.root / f"sys/bus/pci/devices/{DRIVE}/nvme/nvme0/queue_count").unlink()
    assert lines(machine)[-1] == (
        f"ok       NVMe {DRIVE}: driver nvme, Fast Drive 9000, {FUNCTION}; nvme0n1: 2.0 GiB in blocks of 512 bytes; "
        "the kernel does not show SGLS; nvme0n1 is in use as swap"
    )
    machine.write("sys/block/nvme0n1/metadata_bytes", "8\n")
    assert "in blocks of 512 bytes and 8 of metadata" in lines(machine)[-1]


def test_a_drive_of_vfio(machine):
    machine.add_vfio()
    machine.add_function(driver="vfio-pci", group="5")
    name = f"NVMe {DRIVE}: driver vfio-pci, {FUNCTION}"
    assert lines(machine)[-1] == (
        f"note     {name}; {machine.root}/dev/vfio/5 may not be opened by this user, or is not there"
    )
    machine.write("dev/vfio/5", "")
    assert lines(machine)[-1] == f"ok       {name}; {IDENTIFY}"


def test_a_drive_of_vfio_without_an_iommu(machine):
    machine.add_vfio()
    machine.add_function(driver="vfio-pci", group="0")
    machine.write("sys/kernel/iommu_groups/0/name", "vfio-noiommu\n")
    machine.write("dev/vfio/noiommu-0", "")
    found = lines(machine)
    assert found[0] == (
        "note     IOMMU: off, and vfio-pci has a drive without one (vfio.enable_unsafe_noiommu_mode): it is not used, "
        "as it would reach all memory of the machine"
    )
    assert found[-1].startswith(f"note     NVMe {DRIVE}: ") and "expected an IOMMU, found none" in found[-1]
    machine.add_function("0000:82:00.0", driver="vfio-pci", group="3")
    assert lines(machine)[0] == "ok       IOMMU: 1 groups (dmar0)"


def test_drives_without_a_driver_or_a_link(machine):
    at = machine.add_function()
    (at / "current_link_speed").write_text("Unknown\n")
    machine.add_function("0000:82:00.0", driver="vfio-pci")
    found = lines(machine)[-2:]
    assert found[0].startswith(f"note     NVMe {DRIVE}: driver none, BAR0 of 16.0 KiB; ") and "found none" in found[0]
    assert found[1].startswith("note     NVMe 0000:82:00.0: ") and "the IOMMU is off" in found[1]


def test_vfio_piece_by_piece(machine, monkeypatch):
    def vfio() -> str:
        return lines(machine)[1].removeprefix("note     VFIO: ").removeprefix("ok       VFIO: ").removesuffix(ONLY)

    machine.add_driver("vfio-pci")
    assert vfio() == "neither /dev/vfio/vfio nor /dev/iommu is there"
    machine.write("dev/vfio/vfio", "")
    assert vfio() == "the module vfio_iommu_type1 is not loaded"
    (machine.root / "sys/module/vfio_iommu_type1").mkdir(parents=True)
    assert vfio() == "vfio-pci is loaded, /dev/vfio/vfio can be opened"
    machine.write("dev/iommu", "")
    assert vfio() == "vfio-pci is loaded, /dev/vfio/vfio and /dev/iommu can be opened"
    access = os.access
    monkeypatch.setattr(doctor_nvme.os, "access", lambda file, mode: file.name != "vfio" and access(file, mode))
    assert vfio() == "vfio-pci is loaded, /dev/iommu can be opened"
    monkeypatch.setattr(doctor_nvme.os, "access", lambda file, mode: False)
    assert vfio() == "this user may not open /dev/vfio/vfio or /dev/iommu"


def test_memlock_against_what_is_wanted(machine, monkeypatch):
    def memlock(pool: int = 0) -> str:
        return lines(machine, pool)[2]

    limit(monkeypatch, 8 * MIB)
    assert memlock() == (
        "note     memlock: 8.0 MiB, and a drive by VFIO takes 12.0 MiB: raise it (ulimit -l, LimitMEMLOCK=)"
    )
    limit(monkeypatch, GIB)
    assert memlock(4 * GIB) == (
        "note     memlock: 1.0 GiB, and a drive by VFIO takes 4.0 GiB, of which 4.0 GiB are dram: raise it (ulimit -l, "
        "LimitMEMLOCK=)"
    )
    limit(monkeypatch, 4 * GIB + 12 * MIB)
    assert memlock(4 * GIB).startswith("note "), "the table of what is registered counts"
    limit(monkeypatch, 4 * GIB + 12 * MIB + 4 * GIB // 400)
    assert memlock(4 * GIB).startswith("ok ")
    limit(monkeypatch, 8 * MIB)
    machine.write("proc/self/status", "CapEff:\t000001ffffffffff\n")
    assert memlock() == (
        "ok       memlock: 8.0 MiB, which this user is exempt from (CAP_IPC_LOCK); a drive by VFIO takes 12.0 MiB"
    )
    (machine.root / "proc/self/status").unlink()
    assert memlock().startswith("note ")
    limit(monkeypatch, resource.RLIM_INFINITY)
    assert memlock() == "ok       memlock: no limit; a drive by VFIO takes 12.0 MiB"


def test_without_the_core(machine, monkeypatch):
    import sglang_tardis.nvme
    from sglang_tardis.gio_abi import GioError

    def missing(_):
        raise GioError("libtardis.so: expected it, found none")

    monkeypatch.setattr(sglang_tardis.nvme, "drives", missing)
    assert lines(machine)[-1] == "note     NVMe: cannot be looked at: libtardis.so: expected it, found none"


def test_doctor_has_these_lines(tmp_path, capsys, monkeypatch):
    needs_core()
    monkeypatch.setattr(doctor, "_sglang", lambda: iter(()))
    monkeypatch.setenv("TARDIS_CONFIG", json.dumps({"path": str(tmp_path), "dram": "1GiB", "free_space_floor": 0}))
    status, out, _ = run(capsys, "doctor", "--json")
    found = {one["name"]: one for one in json.loads(out)["findings"]}
    assert status == 0 and {"IOMMU", "VFIO", "memlock"} <= set(found)
    assert "of which 1.0 GiB are dram" in found["memlock"]["detail"]
    assert any(name.startswith("NVMe") for name in found)
