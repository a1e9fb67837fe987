# SPDX-License-Identifier: Apache-2.0
"""What a guest finds in memory when it starts: busybox, modules, the program under test and its libraries."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import shutil
import stat
import subprocess

HERE = pathlib.Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
PROGRAM_FOLDER, DATA_FOLDER = "/program", "/data"
DEVICE_FILE_MARK = b"VFIO with iommufd"  # what device_file_domain.cpp calls its way


class MissingError(Exception):
    """Something that guests need is not there: what, and how to get it."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What scripts/install-guest-kernel made, or scripts/build-vfio-kernel, which has no modules."""

    folder: pathlib.Path

    @property
    def image(self) -> pathlib.Path:
        return self.folder / "vmlinuz"

    @property
    def modules(self) -> list[pathlib.Path]:
        return sorted((self.folder / "modules").glob("*.ko"))

    @classmethod
    def find(cls) -> Kernel:
        """In ``TARDIS_GUEST_KERNEL``, else where `make` puts it."""
        folder = pathlib.Path(os.environ.get("TARDIS_GUEST_KERNEL") or REPOSITORY / ".venv" / ".tardis" / "guest")
        why_not = folder / "why-not"
        if why_not.exists():
            raise MissingError(f"no guest kernel: {why_not.read_text().strip()}")
        if not (folder / "vmlinuz").exists():
            raise MissingError(f"no guest kernel in {folder}: `make qemu-test` or scripts/install-guest-kernel gets it")
        return cls(folder)

    @classmethod
    def of_other_ways(cls, program: pathlib.Path) -> Kernel:
        """What scripts/build-vfio-kernel made, in ``TARDIS_VFIO_KERNEL``, for a program that knows all ways of VFIO."""
        named = os.environ.get("TARDIS_VFIO_KERNEL")
        if not named:
            raise MissingError(
                "TARDIS_VFIO_KERNEL names no kernel with all ways of VFIO: scripts/build-vfio-kernel makes one"
            )
        if not (pathlib.Path(named) / "vmlinuz").exists():
            raise MissingError(f"TARDIS_VFIO_KERNEL: no vmlinuz in {named}; scripts/build-vfio-kernel makes it")
        if DEVICE_FILE_MARK not in program.read_bytes():
            raise MissingError(
                f"{program} was compiled with kernel headers older than Linux 6.6: compile it with "
                f"-DTARDIS_KERNEL_HEADERS={named}/headers/include"
            )
        return cls(pathlib.Path(named))


def require_programs() -> None:
    for program, package in (
        ("qemu-system-x86_64", "qemu-system-x86"),
        ("qemu-img", "qemu-utils"),
        ("busybox", "busybox-static"),
        ("mke2fs", "e2fsprogs"),
    ):
        if find_program(program) is None:
            raise MissingError(f"no {program}: requirements/apt.txt lists its package {package}")


def find_program(name: str) -> str | None:
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


class Archive:
    """A cpio archive in the format `newc`, as the kernel reads it."""

    def __init__(self):
        self._parts: list[bytes] = []
        self._folders: set[str] = set()

    def add(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """A file at the absolute `path`, and the folders above it."""
        self._add_folders(path)
        self._entry(path, data, stat.S_IFREG | mode)

    def add_device(self, path: str, major: int, minor: int) -> None:
        """A character device."""
        self._add_folders(path)
        self._entry(path, b"", stat.S_IFCHR | 0o600, major, minor)

    def _add_folders(self, path: str) -> None:
        for folder in map(str, list(reversed(pathlib.PurePosixPath(path).parents))[1:]):
            if folder not in self._folders:
                self._folders.add(folder)
                self._entry(folder, b"", stat.S_IFDIR | 0o755)

    def finish(self) -> bytes:
        self._entry("/TRAILER!!!", b"", 0)
        return b"".join(self._parts)

    def _entry(self, path: str, data: bytes, mode: int, major: int = 0, minor: int = 0) -> None:
        name = path[1:].encode() + b"\0"
        fields = (len(self._parts) + 1, mode, 0, 0, 1, 0, len(data), 0, 0, major, minor, len(name), 0)
        head = b"070701" + b"".join(b"%08X" % field for field in fields) + name
        self._parts += [head, b"\0" * (-len(head) % 4), data, b"\0" * (-len(data) % 4)]


def base_archive(kernel: Kernel, scratch: pathlib.Path) -> bytes:
    """What all guests have: /init, busybox, qexit and the modules."""
    qexit = scratch / "qexit"
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-O2", "-static", "-Wall", "-Werror", "-o", qexit, HERE / "qexit.c"], check=True)
    busybox = find_program("busybox")
    assert busybox is not None
    if subprocess.run(["ldd", busybox], capture_output=True, check=False).returncode == 0:
        raise MissingError(f"{busybox} needs shared libraries: expected the package busybox-static")
    archive = Archive()
    archive.add("/init", (HERE / "init").read_bytes(), 0o755)
    archive.add("/bin/busybox", pathlib.Path(busybox).read_bytes(), 0o755)
    archive.add("/bin/qexit", qexit.read_bytes(), 0o755)
    archive.add_device("/dev/console", 5, 1)
    for module in kernel.modules:
        archive.add(f"/modules/{module.name}", module.read_bytes())
    return archive.finish()


def shared_libraries(program: pathlib.Path) -> list[pathlib.Path]:
    """Those that the loader would take for `program` here, and the loader itself."""
    listing = subprocess.run(["ldd", program], capture_output=True, text=True, check=False)
    if "not found" in listing.stdout:
        raise MissingError(f"{program}: {listing.stdout}")
    return [pathlib.Path(path) for path in re.findall(r"(?:^|=>)\s*(/\S+) \(0x", listing.stdout, re.MULTILINE)]


def program_archive(programs: list[pathlib.Path], scratch: pathlib.Path) -> bytes:
    """Programs in PROGRAM_FOLDER, without what only a debugger reads, and their libraries where the loader looks."""
    archive, seen = Archive(), set()
    for program in programs:
        stripped = scratch / program.name
        subprocess.run(["strip", "--strip-debug", "-o", stripped, program], check=True)
        archive.add(f"{PROGRAM_FOLDER}/{program.name}", stripped.read_bytes(), 0o755)
        for library in shared_libraries(program):
            if library not in seen:
                seen.add(library)
                archive.add(str(library), library.read_bytes(), 0o755)
    return archive.finish()


def data_archive(files: list[pathlib.Path]) -> bytes:
    """Files that programs read, in DATA_FOLDER."""
    archive = Archive()
    for file in files:
        archive.add(f"{DATA_FOLDER}/{file.name}", file.read_bytes())
    return archive.finish()


def run_archive(settings: dict[str, str], main: str) -> bytes:
    """What one guest is told: shell variables for /init, and the script that it runs."""
    archive = Archive()
    archive.add("/run/settings", "".join(f"{name}='{value}'\n" for name, value in settings.items()).encode())
    archive.add("/run/main", f"#!/bin/busybox sh\n{main}\n".encode(), 0o755)
    return archive.finish()
