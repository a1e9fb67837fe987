# SPDX-License-Identifier: Apache-2.0
"""`tardis nvme`, on machines of files. What it does to a real controller: tests/qemu/test_cli.py."""

import json
import os
import types
from pathlib import Path

import pytest
from command_line import failure, needs_core, run
from nvme_machines import DRIVE, NvmeMachine
from sglang_tardis.cli import nvme, nvme_text


@pytest.fixture
def machine(tmp_path: Path) -> NvmeMachine:
    needs_core()
    return NvmeMachine(tmp_path / "machine")


def answer(capsys, machine: NvmeMachine, *argv: object, status: int = 0) -> dict:
    found, out, err = run(capsys, "nvme", *argv, "--json", "--root", machine.root)
    assert (found, err) == (status, "")
    return json.loads(out)


def test_list_without_a_drive(machine, capsys):
    assert run(capsys, "nvme", "list", "--root", machine.root) == (0, "no NVMe device here\n", "")
    assert answer(capsys, machine, "list") == {"drives": []}
    machine.add_function("0000:00:1f.0", class_code="0x060100")
    assert answer(capsys, machine, "list") == {"drives": []}
    assert answer(capsys, NvmeMachine(machine.root / "without"), "list") == {"drives": []}


def test_list_of_this_machine_needs_no_device(capsys):
    needs_core()
    status, out, err = run(capsys, "nvme", "list", "--json")
    assert status == 0 and err == "" and isinstance(json.loads(out)["drives"], list)


def test_list_shows_who_has_a_drive_and_what_for(machine, capsys):
    machine.add_kernel_drive()
    machine.add_function("0000:81:01.0", driver="e1000e", group="17", class_code="0x020000")
    machine.use()
    (drive,) = answer(capsys, machine, "list")["drives"]
    assert drive["model"] == "Fast Drive 9000" and drive["serial"] == "S123" and drive["queues"] == 32
    assert drive["users"] == ["nvme0n1 is in use as swap"] and drive["numa_node"] == 1
    assert drive["group_others"] == [{"address": "0000:81:01.0", "class": "020000", "driver": "e1000e"}]
    assert drive["namespaces"] == [
        {
            "name": "nvme0n1",
            "bytes": 2 << 30,
            "block_bytes": 512,
            "metadata_bytes": 0,
            "max_transfer_bytes": 256 << 10,
            "power_fail_bytes": 4096,
            "volatile_cache": True,
        }
    ]
    _, out, _ = run(capsys, "nvme", "list", "--root", machine.root)
    lines = out.splitlines()
    assert lines[1].split("  ")[0] == DRIVE and "PCIe 16 GT/s x4 (of 32 GT/s x4)" in lines[1]
    assert lines[3:] == [
        DRIVE,
        "  in its group: 0000:81:01.0 (class 020000, driver e1000e)",
        "  nvme0n1: 2.0 GiB in blocks of 512 bytes",
        "  nvme0n1 is in use as swap",
        "  VFIO: in use: nvme0n1 is in use as swap",
    ]


def test_list_opens_nothing(machine, capsys):
    machine.add_kernel_drive()
    node = machine.root / "dev/nvme0n1"
    node.unlink()
    os.mkfifo(node)  # opening it would wait for ever
    _, out, _ = run(capsys, "nvme", "list", "--root", machine.root)
    assert "nothing is known to use it" in out and "VFIO: the kernel's driver has it" in out


def test_list_says_whether_vfio_can_open_it(machine, capsys):
    machine.add_function(driver="vfio-pci", group="5")
    machine.write("dev/vfio/5", "")
    (drive,) = answer(capsys, machine, "list")["drives"]
    assert drive["vfio_file"].endswith("/dev/vfio/5") and drive["vfio_file_usable"] and drive["refusal"] == ""
    assert "/dev/vfio/5 can be opened" in run(capsys, "nvme", "list", "--root", machine.root)[1]
    machine.add_function("0000:82:00.0", driver="vfio-pci")
    assert "IOMMU group, found none" in answer(capsys, machine, "list")["drives"][1]["refusal"]


@pytest.mark.parametrize("action", ["identify", "smart", "release", "gpu", "format-store"])
def test_addresses_of_no_drive(action, machine, capsys):
    machine.add_function("0000:00:1f.0", class_code="0x060100")
    rest = {"format-store": ("1", "--home", machine.root / "home")}.get(action, ())
    if action == "gpu":
        machine.add_kernel_drive()
        assert answer(capsys, machine, "gpu", "nonsense")["doorbells"]["tried"] is False  # no GPU here
        return
    for address, why in (
        ("0000:00:1f.0", "class 0108xx"),
        ("0000:99:00.0", "found nothing there"),
        ("nonsense", "expected"),
        ("nul\0", "NUL"),
    ):
        error = failure(capsys, "nvme", action, address, *rest, "--root", machine.root)
        assert why in error
    assert not (machine.root / "home").exists()


@pytest.mark.parametrize("action", ["identify", "smart", "format-store"])
def test_a_drive_that_vfio_has_not(action, machine, capsys):
    rest = {"format-store": ("1", "--home", machine.root / "home", "--erase")}.get(action, ())
    machine.add_kernel_drive()
    machine.use()
    argv = ("nvme", action, DRIVE, *rest, "--root", machine.root)
    assert "is in use as swap" in failure(capsys, *argv)
    machine.write("proc/swaps", "")
    assert "expected the driver vfio-pci, found nvme" in failure(capsys, *argv)
    assert not (machine.root / "home").exists()


def test_format_store_takes_a_namespace_only(machine, capsys):
    for number in ("0", "-1", str(2**32 - 1)):
        error = failure(capsys, "nvme", "format-store", DRIVE, "--home", "x", "--root", machine.root, "--", number)
        assert "expected an id of 1 to 4294967294" in error
    with pytest.raises(SystemExit):
        run(capsys, "nvme", "format-store", DRIVE, "1")  # no --home
    assert "--home" in capsys.readouterr().err


def test_release_without_root_says_how(machine, capsys, monkeypatch):
    monkeypatch.setattr(nvme.os, "geteuid", lambda: 1000)
    machine.add_kernel_drive()
    at, probe = machine.root / "sys/bus/pci/devices" / DRIVE, machine.root / "sys/bus/pci/drivers_probe"
    commands = [
        "modprobe vfio-pci",
        f"echo vfio-pci > {at}/driver_override",
        f"echo {DRIVE} > {at}/driver/unbind",
        f"echo {DRIVE} > {probe}",
    ]
    status, out, err = run(capsys, "nvme", "release", DRIVE, "--root", machine.root)
    assert status == 2 and out.splitlines() == commands
    assert err == "tardis nvme: nothing was done, since only root can: run the lines above as root\n"
    assert run(capsys, "nvme", "release", DRIVE, "--dry-run", "--root", machine.root)[0] == 0
    plan = answer(capsys, machine, "release", DRIVE, status=2)
    assert plan["commands"] == commands and plan["from"] == "nvme" and plan["to"] == "vfio-pci" and not plan["done"]
    assert machine.read(f"sys/bus/pci/devices/{DRIVE}/driver_override") == "(null)\n"
    assert answer(capsys, machine, "release", DRIVE, "--to", "nvme")["done"] is True
    _, out, _ = run(capsys, "nvme", "release", DRIVE, "--to", "nvme", "--root", machine.root)
    assert out == f"{DRIVE}: nvme has it already\n"


def test_release_refuses(machine, capsys):
    machine.add_kernel_drive()
    machine.use()
    assert "nothing uses, found that nvme0n1 is in use as swap" in failure(
        capsys, "nvme", "release", DRIVE, "--root", machine.root
    )
    machine.add_function("0000:82:00.0", driver="vfio-pci", group="5")
    machine.write("dev/vfio/5", "")
    machine.write("proc/77/comm", "tardis\n")
    (machine.root / "proc/77/fd").mkdir()
    (machine.root / "proc/77/fd/9").symlink_to(machine.root / "dev/vfio/5")
    error = failure(capsys, "nvme", "release", "0000:82:00.0", "--to", "nvme", "--root", machine.root)
    assert "is open in process 77 (tardis)" in error
    machine.add_function("0000:83:00.0", driver="nvme")
    assert "the IOMMU is off" in failure(capsys, "nvme", "release", "83:00.0", "--root", machine.root)
    with pytest.raises(SystemExit):
        run(capsys, "nvme", "release", DRIVE, "--to", "uio")


def test_release_as_root_that_no_driver_answers(machine, capsys, monkeypatch):
    monkeypatch.setattr(nvme.os, "geteuid", lambda: 0)
    machine.add_kernel_drive()
    machine.add_driver("vfio-pci")
    error = failure(capsys, "nvme", "release", DRIVE, "--root", machine.root)
    assert "expected the driver vfio-pci after it was asked, found nvme" in error
    assert machine.read("sys/bus/pci/drivers/nvme/unbind") == f"{DRIVE}\n"
    assert machine.read("sys/bus/pci/drivers_probe") == f"{DRIVE}\n"
    assert machine.read(f"sys/bus/pci/devices/{DRIVE}/driver_override")[0] == "\n"


def test_release_loads_the_module(monkeypatch):
    asked = []

    def modprobe(status, argv, **_):
        asked.append(argv)
        return types.SimpleNamespace(returncode=status, stderr="no such module")

    monkeypatch.setattr(nvme.subprocess, "run", lambda *argv, **options: modprobe(0, *argv, **options))
    nvme._load_module("vfio-pci")
    assert asked == [["modprobe", "vfio-pci"]]
    monkeypatch.setattr(nvme.subprocess, "run", lambda *argv, **options: modprobe(1, *argv, **options))
    with pytest.raises(nvme.CommandError, match="modprobe vfio-pci: no such module"):
        nvme._load_module("vfio-pci")


def test_gpu_says_what_was_looked_at(machine, capsys):
    found = answer(capsys, machine, "gpu")
    assert found["doorbells"] == {"tried": False, "reached": False, "found": "not available: no NVMe device"}
    assert found["memory"]["available"] is False
    ways = [probe["way"] for probe in found["memory"]["probes"]]
    assert ways == [
        "NVIDIA driver",
        "nvidia-peermem",
        "dma-buf into VFIO",
        "GPUDirect Storage",
        "GPU memory in BAR1",
    ]
    assert not any(probe["here"] for probe in found["memory"]["probes"])
    (machine.root / "sys/module/nvidia_peermem").mkdir(parents=True)
    assert answer(capsys, machine, "gpu")["memory"]["probes"][1]["here"] is True
    _, out, _ = run(capsys, "nvme", "gpu", "--root", machine.root)
    assert "not available: no NVMe device" in out and "serves RDMA adapters" in out


def test_gpu_that_does_not_reach_a_drive_is_a_problem(machine, capsys, monkeypatch):
    import sglang_tardis.nvme

    machine.add_function(driver="vfio-pci", group="5")
    facts = {"devices": 1, "direct_rdma": 1, "dma_buf": -1, "register_memory": 1}
    monkeypatch.setattr(sglang_tardis.nvme, "gpu_facts", lambda: facts)
    assert "not tried: name a drive" in answer(capsys, machine, "gpu")["doorbells"]["found"]
    verdict = {
        "reached": False,
        "found": "the page of registers cannot be mapped or read: refused",
        "reader_error": 801,
    }
    monkeypatch.setattr(sglang_tardis.nvme, "check_doorbells", lambda address, root: verdict)
    assert answer(capsys, machine, "gpu", DRIVE, status=1)["doorbells"]["tried"] is True
    verdict["reached"] = True
    status, out, _ = run(capsys, "nvme", "gpu", DRIVE, "--root", machine.root)
    assert status == 0 and "GPUDirect RDMA: yes, dma-buf: not said" in out


IDENTITY = {
    "address": DRIVE, "report": "", "bar_bytes": 16384, "function_reset": True, "msix_vectors": 65,
    "link_speed_mts": 16000, "link_lanes": 4, "link_most_speed_mts": 16000, "link_most_lanes": 4,
    "dma_buf_export": False, "model": "Fast \x1b[31mDrive", "serial": "S1", "firmware": "F", "vendor": 1,
    "subsystem_vendor": 1, "subsystem": "", "controller_id": 0, "version": "1.4.0", "mdts": 0,
    "max_transfer_bytes": None, "sgls": 1, "sgl": "any alignment", "sgl_bit_bucket": False, "sgl_blocks": None,
    "volatile_cache": True, "awun_blocks": 8, "awupf_blocks": 1, "dataset_management": True, "write_zeroes": True,
    "shadow_doorbells": False, "namespaces_at_most": 8, "max_queue_entries": 1024, "max_commands": None,
    "doorbell_stride_bytes": 4, "ready_timeout_ms": 7500, "shutdown_us": None, "queue_grant": 127,
    "volatile_cache_enabled": False,
    "namespaces": [
        {
            "id": 1, "blocks": 2048, "capacity_blocks": 2048, "used_blocks": 0, "block_bytes": 512, "bytes": 1 << 20,
            "metadata_bytes": 8, "protection_type": 1, "write_protected": True, "optimal_boundary_blocks": 0,
            "nguid": "", "eui64": "", "power_fail_bytes": None, "refusal": "metadata",
            "formats": [
                {"index": 0, "block_bytes": 512, "metadata_bytes": 8, "performance": 2, "in_use": True},
                {"index": 1, "block_bytes": None, "metadata_bytes": 0, "performance": 0, "in_use": False},
            ],
        }
    ],
}  # fmt: skip


def test_identity_in_words(capsys, monkeypatch):
    needs_core()
    import sglang_tardis.nvme

    monkeypatch.setattr(sglang_tardis.nvme, "identify", lambda address, root: IDENTITY)
    status, out, _ = run(capsys, "nvme", "identify", DRIVE)
    assert status == 0 and out == (
        "address              0000:81:00.0\n"
        "model                Fast ?[31mDrive\n"
        "serial               S1\n"
        "firmware             F\n"
        "NVMe                 1.4.0\n"
        "subsystem            -\n"
        "link                 PCIe 16 GT/s x4\n"
        "BAR0                 16.0 KiB\n"
        "MDTS                 0 (no limit)\n"
        "SGLS                 00000001 (any alignment)\n"
        "VWC                  yes, enabled: no\n"
        "AWUN, AWUPF          8, 1 blocks\n"
        "queue grant          127 pairs of 1024 entries at most\n"
        "shadow doorbells     no\n"
        "doorbell stride      4 bytes\n"
        "function reset       yes\n"
        "MSI-X vectors        65\n"
        "ready within         7.5 s\n"
        "\n"
        "namespace 1: 2048 blocks, 1.0 MiB\n"
        "  LBA format 0: 512 bytes, 8 of metadata, performance 2, in use\n"
        "  LBA format 1: reserved, 0 of metadata, performance 0\n"
        "  write protected\n"
        "  refused: metadata\n"
    )
    assert nvme_text.identity({**IDENTITY, "namespaces": []}).endswith("namespaces           none")


def test_health_in_words_and_as_a_status(capsys, monkeypatch):
    needs_core()
    import sglang_tardis.nvme

    log = dict.fromkeys(
        ("critical_warning", "used_percent", "units_read", "read_commands", "write_commands", "busy_minutes",
         "power_cycles", "power_on_hours", "unsafe_shutdowns", "media_errors", "error_log_entries", "warning_minutes",
         "critical_minutes"), 0,
    )  # fmt: skip
    log |= {
        "address": DRIVE, "model": "M", "serial": "S", "warnings": [], "temperature_celsius": 40,
        "sensors_celsius": [41, 42], "spare_percent": 100, "spare_threshold_percent": 10, "unit_bytes": 512000,
        "units_written": 2**64,
    }  # fmt: skip
    monkeypatch.setattr(sglang_tardis.nvme, "health", lambda address, root: log)
    status, out, _ = run(capsys, "nvme", "smart", DRIVE)
    assert status == 0
    assert "critical warning     none\n" in out and "temperature          40 °C\n" in out
    assert "spare                100 % (threshold 10 %)\n" in out and "sensors              41 °C, 42 °C\n" in out
    assert "written              8388608000.0 PiB in 0 commands\n" in out
    log |= {"critical_warning": 8, "warnings": ["media read-only"], "temperature_celsius": None}
    status, out, _ = run(capsys, "nvme", "smart", DRIVE)
    assert status == 1 and "critical warning     media read-only\n" in out and "temperature          not known\n" in out


def test_format_store_in_words(capsys, monkeypatch, tmp_path):
    needs_core()
    import sglang_tardis.nvme
    from sglang_tardis.gio_abi import GioError

    made = {
        "address": DRIVE, "namespace": 1, "home": "/nvme/home", "bytes": 1 << 30, "volume": "ab" * 16,
        "block_bytes": 512, "formatted": True, "found": "", "report": "",
    }  # fmt: skip
    asked = []

    def format_store(*argv, **options):
        asked.append((argv, options))
        return made

    monkeypatch.setattr(sglang_tardis.nvme, "format_store", format_store)
    argv = ("nvme", "format-store", DRIVE, "1", "--home", "/nvme/home")
    what = f"namespace 1 of {DRIVE} (1.0 GiB) is "
    assert run(capsys, *argv) == (0, f"{what}volume {'ab' * 16} of /nvme/home now\n", "")
    assert asked == [((DRIVE, 1, "/nvme/home"), {"erase": False, "root": "/"})]
    made["found"] = "an XFS file system at byte 0"
    assert run(capsys, *argv, "--erase")[1].endswith(" now; lost: an XFS file system at byte 0\n")
    assert asked[1][1]["erase"] is True
    made["formatted"] = False
    assert "already: " in run(capsys, *argv)[1]

    def refuse(*_, **__):
        raise GioError("found an XFS file system; format it with force, which destroys what is on it")

    monkeypatch.setattr(sglang_tardis.nvme, "format_store", refuse)
    assert failure(capsys, *argv) == (
        "tardis nvme: found an XFS file system; format it with --erase, which destroys what is on it\n"
    )
