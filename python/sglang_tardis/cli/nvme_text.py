# SPDX-License-Identifier: Apache-2.0
"""What `tardis nvme` and `tardis doctor` say of drives, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .render import human_bytes, printable, table

Facts = Mapping[str, Any]


def link(facts: Facts) -> str:
    """The PCIe link: "PCIe 16.0 GT/s x4", and what it could be if that is more; empty if not known."""
    if not facts["link_speed_mts"]:
        return ""
    text = f"PCIe {facts['link_speed_mts'] / 1000:g} GT/s x{facts['link_lanes']}"
    most = (facts["link_most_speed_mts"], facts["link_most_lanes"])
    if most != (facts["link_speed_mts"], facts["link_lanes"]) and all(most):
        text += f" (of {most[0] / 1000:g} GT/s x{most[1]})"
    return text


def _or(value: object, otherwise: str = "-") -> object:
    return otherwise if value in (None, "") else value


def listing(drives: Sequence[Facts]) -> str:
    """Of `tardis nvme list`."""
    if not drives:
        return "no NVMe device here"
    rows = [
        (
            drive["address"],
            _or(drive["driver"], "none"),
            _or(drive["iommu_group"]),
            drive["numa_node"] if drive["numa_node"] >= 0 else "-",
            _or(link(drive)),
            _or(drive["model"]),
            _or(drive["serial"]),
        )
        for drive in drives
    ]
    lines = [table(("address", "driver", "group", "node", "link", "model", "serial"), rows)]
    for drive in drives:
        lines += ["", printable(drive["address"]), *(f"  {printable(line)}" for line in _details(drive))]
    return "\n".join(lines)


def _details(drive: Facts) -> list[str]:
    lines = []
    for other in drive["group_others"]:
        lines.append(f"in its group: {other['address']} (class {other['class']}, driver {other['driver'] or 'none'})")
    lines += [namespace_line(space) for space in drive["namespaces"]]
    lines += drive["users"]
    if drive["driver"] == "nvme" and not drive["users"]:
        lines.append("nothing is known to use it (mounts of other containers cannot be seen here)")
    lines.append(f"VFIO: {drive['refusal']}" if drive["refusal"] else f"VFIO: {drive['vfio_file']} can be opened")
    return lines


def namespace_line(space: Facts) -> str:
    """One namespace, as the kernel shows it."""
    parts = [space["name"] + ":"]
    if space["bytes"] is not None:
        parts.append(human_bytes(space["bytes"]))
    if space["block_bytes"] is not None:
        metadata = f" and {space['metadata_bytes']} of metadata" if space["metadata_bytes"] else ""
        parts.append(f"in blocks of {space['block_bytes']} bytes{metadata}")
    return " ".join(parts)


def _lines(rows: Sequence[tuple[str, object]]) -> list[str]:
    return [f"{name:20} {printable(value)}" for name, value in rows]


def _yes(value: object) -> str:
    return "not known" if value is None else "yes" if value else "no"


def identity(facts: Facts) -> str:
    """Of `tardis nvme identify`."""
    most = facts["max_transfer_bytes"]
    cache = "no" if not facts["volatile_cache"] else f"yes, enabled: {_yes(facts['volatile_cache_enabled'])}"
    rows = [
        ("address", facts["address"]),
        ("model", facts["model"]),
        ("serial", facts["serial"]),
        ("firmware", facts["firmware"]),
        ("NVMe", facts["version"]),
        ("subsystem", _or(facts["subsystem"])),
        ("link", _or(link(facts), "not known")),
        ("BAR0", human_bytes(facts["bar_bytes"])),
        ("MDTS", f"{facts['mdts']} ({'no limit' if most is None else human_bytes(most)})"),
        ("SGLS", f"{facts['sgls']:08x} ({facts['sgl']})"),
        ("VWC", cache),
        ("AWUN, AWUPF", f"{facts['awun_blocks']}, {facts['awupf_blocks']} blocks"),
        ("queue grant", f"{facts['queue_grant']} pairs of {facts['max_queue_entries']} entries at most"),
        ("shadow doorbells", _yes(facts["shadow_doorbells"])),
        ("doorbell stride", f"{facts['doorbell_stride_bytes']} bytes"),
        ("function reset", _yes(facts["function_reset"])),
        ("MSI-X vectors", facts["msix_vectors"]),
        ("ready within", f"{facts['ready_timeout_ms'] / 1000:g} s"),
    ]
    lines = _lines(rows)
    for space in facts["namespaces"]:
        lines += ["", *_namespace(space)]
    return "\n".join(lines if facts["namespaces"] else [*lines, "namespaces           none"])


def _namespace(space: Facts) -> list[str]:
    size = "" if space["bytes"] is None else f", {human_bytes(space['bytes'])}"
    lines = [f"namespace {space['id']}: {space['blocks']} blocks{size}"]
    for form in space["formats"]:
        block = "reserved" if form["block_bytes"] is None else f"{form['block_bytes']} bytes"
        used = ", in use" if form["in_use"] else ""
        lines.append(
            f"  LBA format {form['index']}: {block}, {form['metadata_bytes']} of metadata, "
            f"performance {form['performance']}{used}"
        )
    if space["power_fail_bytes"] is not None:
        lines.append(f"  whole after a power failure: aligned writes of {human_bytes(space['power_fail_bytes'])}")
    if space["write_protected"]:
        lines.append("  write protected")
    lines.append(f"  refused: {printable(space['refusal'])}" if space["refusal"] else "  a store can be on it")
    return lines


def health(log: Facts) -> str:
    """Of `tardis nvme smart`."""
    unit = log["unit_bytes"]
    temperature = log["temperature_celsius"]
    rows: list[tuple[str, object]] = [
        ("drive", f"{log['address']} {log['model']} {log['serial']}"),
        ("critical warning", ", ".join(log["warnings"]) or "none"),
        ("temperature", "not known" if temperature is None else f"{temperature} °C"),
        ("spare", f"{log['spare_percent']} % (threshold {log['spare_threshold_percent']} %)"),
        ("used", f"{log['used_percent']} % of its expected life"),
        ("read", f"{human_bytes(log['units_read'] * unit)} in {log['read_commands']:,} commands"),
        ("written", f"{human_bytes(log['units_written'] * unit)} in {log['write_commands']:,} commands"),
        ("busy", f"{log['busy_minutes']:,} min"),
        ("power cycles", f"{log['power_cycles']:,}, {log['unsafe_shutdowns']:,} shutdowns were unsafe"),
        ("powered on", f"{log['power_on_hours']:,} h"),
        ("media errors", f"{log['media_errors']:,}"),
        ("error log entries", f"{log['error_log_entries']:,}"),
        ("too warm", f"{log['warning_minutes']:,} min, critical {log['critical_minutes']:,} min"),
    ]
    if log["sensors_celsius"]:
        rows.append(("sensors", ", ".join(f"{value} °C" for value in log["sensors_celsius"])))
    return "\n".join(_lines(rows))


def formatted(made: Facts) -> str:
    """Of `tardis nvme format-store`."""
    home = printable(made["home"])
    what = f"namespace {made['namespace']} of {made['address']} ({human_bytes(made['bytes'])})"
    if not made["formatted"]:
        return f"{what} is the volume of {home} already: {made['volume']}; nothing was changed"
    lost = f"; lost: {printable(made['found'])}" if made["found"] else ""
    return f"{what} is volume {made['volume']} of {home} now{lost}"


def release(plan: Facts) -> str:
    """Of `tardis nvme release`: what was done, or the commands that do it."""
    lines = list(plan["commands"])
    if plan["done"] and lines:
        lines = [f"{plan['address']}: {plan['to']} has it now; before, {plan['from'] or 'no driver'} had it"]
    elif plan["done"]:
        lines = [f"{plan['address']}: {plan['to']} has it already"]
    if plan["remaining"]:
        lines.append(f"still to do: {plan['remaining']}")
    return "\n".join(printable(line) for line in lines)


def gpu(answer: Facts) -> str:
    """Of `tardis nvme gpu`."""
    facts = answer["gpu"]
    said = {-1: "not said", 0: "no", 1: "yes"}
    lines = _lines(
        [
            (
                "GPU",
                "none that CUDA sees"
                if facts is None
                else f"{facts['devices']}; GPUDirect RDMA: {said.get(facts['direct_rdma'], '?')}, "
                f"dma-buf: {said.get(facts['dma_buf'], '?')}",
            ),
            ("doorbells by it", answer["doorbells"]["found"]),
            ("its memory", "not available to a drive that a process has; what was looked at:"),
        ]
    )
    for probe in answer["memory"]["probes"]:
        lines.append(f"  {probe['way']:20} {printable(probe['found'])}")
    return "\n".join(lines)
