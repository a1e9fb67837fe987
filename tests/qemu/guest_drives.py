# SPDX-License-Identifier: Apache-2.0
"""NVMe controllers of a guest: what a test says about them, and what QEMU is told."""

from __future__ import annotations

import dataclasses
import pathlib
import subprocess
from typing import Protocol

FIRST_SLOT = 4  # of the controllers, on the root bus


@dataclasses.dataclass(frozen=True)
class Fault:
    """An I/O error that QEMU's blkdebug gives."""

    operation: str  # read, write or flush
    errno: int = 5
    sector: int | None = None  # of 512 bytes, of the namespace; None: all
    once: bool = False

    def options(self, number: int) -> dict[str, str]:
        prefix = f"inject-error.{number}"
        rule = {f"{prefix}.event": "none", f"{prefix}.iotype": self.operation, f"{prefix}.errno": str(self.errno)}
        if self.sector is not None:
            rule[f"{prefix}.sector"] = str(self.sector)
        if self.once:
            rule[f"{prefix}.once"] = "on"
        return rule


class Medium(Protocol):
    """Where a namespace's bytes are. `nodes` ends with the block node that the namespace takes."""

    def nodes(self, name: str, bytes_: int, folder: pathlib.Path) -> list[dict[str, str]]:
        """Of a namespace of that name and size; files are made in the folder."""


@dataclasses.dataclass(frozen=True)
class Raw(Medium):
    """A file of zeros to begin with; what the guest wrote survives an end of QEMU, flushed or not."""

    def nodes(self, name: str, bytes_: int, folder: pathlib.Path) -> list[dict[str, str]]:
        image = folder / f"{name}.img"
        if not image.exists():
            with image.open("wb") as file:
                file.truncate(bytes_)
        return [{"driver": "file", "node-name": name, "filename": str(image)}]


@dataclasses.dataclass(frozen=True)
class VolatileCache(Medium):
    """A qcow2 image that grows: QEMU keeps what it says about new clusters in memory until the guest flushes.

    If QEMU is killed, everything that was written and not flushed is gone.
    """

    def nodes(self, name: str, bytes_: int, folder: pathlib.Path) -> list[dict[str, str]]:
        image = folder / f"{name}.qcow2"
        if not image.exists():
            command = ["qemu-img", "create", "-q", "-f", "qcow2", image, str(bytes_)]
            subprocess.run(command, check=True)
        return [
            {"driver": "file", "node-name": f"{name}-file", "filename": str(image)},
            {"driver": "qcow2", "node-name": name, "file": f"{name}-file"},
        ]


@dataclasses.dataclass(frozen=True)
class Slow(Medium):
    """Reads as zeros, forgets writes; every operation takes `seconds`."""

    seconds: float

    def nodes(self, name: str, bytes_: int, folder: pathlib.Path) -> list[dict[str, str]]:
        latency = str(round(self.seconds * 1e9))
        return [
            {"driver": "null-co", "node-name": name, "size": str(bytes_), "latency-ns": latency, "read-zeroes": "on"}
        ]


@dataclasses.dataclass(frozen=True)
class Server(Medium):
    """What a server of network block devices at a Unix socket has."""

    socket: pathlib.Path

    def nodes(self, name: str, bytes_: int, folder: pathlib.Path) -> list[dict[str, str]]:
        return [{"driver": "nbd", "node-name": name, "server.type": "unix", "server.path": str(self.socket)}]


@dataclasses.dataclass(frozen=True)
class Namespace:
    mib: int = 64
    block_bytes: int = 512
    medium: Medium = Raw()
    faults: tuple[Fault, ...] = ()
    options: tuple[str, ...] = ()  # of QEMU's nvme-ns
    throttled: bool = False  # the throttle group `<node>-limits` (qom-set of its limits) is above the medium


@dataclasses.dataclass(frozen=True)
class Controller:
    namespaces: tuple[Namespace, ...] = (Namespace(),)
    hot_plug: bool = False  # behind a port of its own, so that it can be taken out
    beside: bool = False  # function 1 of the slot of the one before
    options: tuple[str, ...] = ()  # of QEMU's nvme: "mdts=5", "max_ioqpairs=4", ...


def pci_addresses(controllers: tuple[Controller, ...]) -> list[str]:
    """As the guest's kernel numbers them: each port has a bus of its own, in the order of the slots."""
    addresses, bus = [], 0
    for number, controller in enumerate(controllers):
        if controller.hot_plug:
            bus += 1
            addresses.append(f"0000:{bus:02x}:00.0")
        elif controller.beside:
            addresses.append(f"0000:00:{FIRST_SLOT + number - 1:02x}.1")
        else:
            addresses.append(f"0000:00:{FIRST_SLOT + number:02x}.0")
    return addresses


def qemu_arguments(controllers: tuple[Controller, ...], folder: pathlib.Path) -> list[str]:
    """Controller N is the device `nvmeN`; its namespace K the block node `nvmeN-K`. Images are made in `folder`."""
    arguments: list[str] = []
    for number, controller in enumerate(controllers):
        name, slot = f"nvme{number}", f"{FIRST_SLOT + number:02x}.0"
        where = f"addr={FIRST_SLOT + number - 1:02x}.1" if controller.beside else f"addr={slot}"
        if controllers[number + 1 : number + 2] and controllers[number + 1].beside:
            where += ",multifunction=on"
        if controller.hot_plug:
            arguments += [
                "-device",
                f"pcie-root-port,id=port{number},chassis={number + 1},slot={number + 1},addr={slot}",
            ]
            where = f"bus=port{number}"
        options = ",".join(["nvme", f"id={name}", f"serial=tardis{number}", where, *controller.options])
        arguments += ["-device", options]
        for index, namespace in enumerate(controller.namespaces, start=1):
            node, above = f"{name}-{index}", []
            if namespace.throttled:
                arguments += ["-object", f"throttle-group,id={node}-limits"]
            for block in _nodes(node, namespace, folder):
                arguments += ["-blockdev", ",".join(f"{key}={value}" for key, value in block.items())]
                above.append(block["node-name"])
            size = f"logical_block_size={namespace.block_bytes},physical_block_size={namespace.block_bytes}"
            device = ["nvme-ns", f"drive={above[-1]}", f"bus={name}", f"nsid={index}", size, *namespace.options]
            arguments += ["-device", ",".join(device)]
    return arguments


def _nodes(node: str, namespace: Namespace, folder: pathlib.Path) -> list[dict[str, str]]:
    nodes = namespace.medium.nodes(node, namespace.mib << 20, folder)
    if namespace.faults:
        rules: dict[str, str] = {}
        for number, fault in enumerate(namespace.faults):
            rules |= fault.options(number)
        nodes.append({"driver": "blkdebug", "node-name": f"{node}-faults", "image": nodes[-1]["node-name"], **rules})
    if namespace.throttled:
        below, group = nodes[-1]["node-name"], f"{node}-limits"
        nodes.append({"driver": "throttle", "node-name": f"{node}-slow", "throttle-group": group, "file": below})
    return nodes
