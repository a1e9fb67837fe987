# SPDX-License-Identifier: Apache-2.0
"""The part of `tardis doctor` that looks at NVMe drives and at what VFIO needs. Opens no drive."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .doctor_storage import Finding
from .nvme_text import link, namespace_line
from .render import human_bytes

# docs/vfio.md: about 3 MiB of each of the driver's four queue pairs; 0.25 % of what is registered, for its table.
_DRIVER_BYTES = 4 * (3 << 20)
_TABLE_SHARE = 400
_CAP_IPC_LOCK = 14
_NO_IOMMU_GROUP = "vfio-noiommu"  # as the kernel names it


def examine_nvme(pool_bytes: int = 0, root: str = "/") -> Iterator[Finding]:
    """The IOMMU, VFIO, the memlock limit, and each NVMe controller.

    Args:
        pool_bytes: of host memory that a drive would reach beside the driver's own.
        root: the folder that has the machine's sys, proc and dev.
    """
    yield _iommu(Path(root))
    yield _vfio(Path(root))
    yield _memlock(pool_bytes, Path(root))
    from ..gio_abi import GioError

    try:
        from ..nvme import drives

        found = drives(root)
    except GioError as error:
        yield Finding("NVMe", "note", f"cannot be looked at: {error}")
        return
    if not found:
        yield Finding("NVMe", "ok", "no NVMe device here; a store lies on a file system")
    for drive in found:
        yield _drive(drive)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _line(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


def _iommu(root: Path) -> Finding:
    folder = root / "sys/kernel/iommu_groups"
    # VFIO makes a group for a drive without an IOMMU, where the kernel was told to allow that.
    without = [group for group in _names(folder) if _line(folder / group / "name") == _NO_IOMMU_GROUP]
    groups = len(_names(folder)) - len(without)
    if groups:
        units = ", ".join(_names(root / "sys/class/iommu")) or "its name is not shown"
        return Finding("IOMMU", "ok", f"{groups} groups ({units})")
    if without:
        return Finding(
            "IOMMU",
            "note",
            "off, and vfio-pci has a drive without one (vfio.enable_unsafe_noiommu_mode): it is not used, as it would "
            "reach all memory of the machine",
        )
    return Finding(
        "IOMMU",
        "note",
        "off, or hidden from here: no groups in /sys/kernel/iommu_groups. Only VFIO needs it (VT-d or AMD-Vi in the "
        "firmware, intel_iommu=on on the kernel's command line)",
    )


def _vfio(root: Path) -> Finding:
    missing = []
    if not (root / "sys/bus/pci/drivers/vfio-pci").is_dir():
        missing.append("the driver vfio-pci is not loaded (modprobe vfio-pci)")
    container, iommufd = root / "dev/vfio/vfio", root / "dev/iommu"
    ways = [file for file in (container, iommufd) if file.exists()]
    usable = [file for file in ways if os.access(file, os.R_OK | os.W_OK)]
    if not ways:
        missing.append("neither /dev/vfio/vfio nor /dev/iommu is there")
    elif not usable:
        missing.append(f"this user may not open {' or '.join(_shown(file, root) for file in ways)}")
    if container in usable and iommufd not in usable and not (root / "sys/module/vfio_iommu_type1").is_dir():
        missing.append("the module vfio_iommu_type1 is not loaded")
    if missing:
        return Finding("VFIO", "note", f"{'; '.join(missing)}. Only drives without a file system need it")
    return Finding(
        "VFIO", "ok", f"vfio-pci is loaded, {' and '.join(_shown(file, root) for file in usable)} can be opened"
    )


def _shown(file: Path, root: Path) -> str:
    return f"/{file.relative_to(root)}"


def _may_lock_all(root: Path) -> bool:
    try:
        status = (root / "proc/self/status").read_text(errors="replace")
    except OSError:
        return False
    lines = [line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")]
    return bool(lines) and bool(int(lines[0], 16) >> _CAP_IPC_LOCK & 1)


def _memlock(pool_bytes: int, root: Path) -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    wanted = _DRIVER_BYTES + pool_bytes + pool_bytes // _TABLE_SHARE
    need = f"a drive by VFIO takes {human_bytes(wanted)}"
    if pool_bytes:
        need += f", of which {human_bytes(pool_bytes)} are dram"
    if limit == resource.RLIM_INFINITY:
        return Finding("memlock", "ok", f"no limit; {need}")
    if _may_lock_all(root):
        return Finding("memlock", "ok", f"{human_bytes(limit)}, which this user is exempt from (CAP_IPC_LOCK); {need}")
    if limit >= wanted:
        return Finding("memlock", "ok", f"{human_bytes(limit)}; {need}")
    return Finding("memlock", "note", f"{human_bytes(limit)}, and {need}: raise it (ulimit -l, LimitMEMLOCK=)")


def _drive(drive: Mapping[str, Any]) -> Finding:
    name = f"NVMe {drive['address']}"
    parts = [f"driver {drive['driver'] or 'none'}"]
    if drive["model"]:
        parts.append(drive["model"])
    parts += [text for text in (link(drive),) if text]
    if drive["bar_bytes"]:
        parts.append(f"BAR0 of {human_bytes(drive['bar_bytes'])}")
    text = ", ".join(parts)
    if drive["driver"] == "nvme":
        return Finding(name, "ok", "; ".join([text, *_of_the_kernel(drive)]))
    unread = (
        f"LBA format, SGLS, MDTS, VWC, AWUPF and the queue grant: `tardis nvme identify {drive['address']}`, which "
        "resets it"
    )
    if drive["refusal"]:
        return Finding(name, "note", f"{text}; {drive['refusal']}")
    return Finding(name, "ok", f"{text}; {unread}")


def _of_the_kernel(drive: Mapping[str, Any]) -> Iterator[str]:
    if drive["queues"] is not None:
        yield f"{drive['queues']} I/O queues granted"
    for space in drive["namespaces"]:
        facts = [namespace_line(space)]
        if space["volatile_cache"] is not None:
            facts.append(f"VWC {'on' if space['volatile_cache'] else 'off'}")
        if space["max_transfer_bytes"] is not None:
            facts.append(f"{human_bytes(space['max_transfer_bytes'])} a command (MDTS or the kernel's bound)")
        if space["power_fail_bytes"]:
            facts.append(f"atomic writes of {human_bytes(space['power_fail_bytes'])}")
        yield ", ".join(facts)
    yield "the kernel does not show SGLS"
    yield from drive["users"]
