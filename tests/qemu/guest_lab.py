# SPDX-License-Identifier: Apache-2.0
"""What the tests start guests with.

Environment: ``TARDIS_BUILD_DIR`` (default ``build/native``) has the program under test, ``TARDIS_GUEST_KERNEL`` the
kernel (see guest_image.py); into ``TARDIS_GUEST_COVERAGE``, a folder, go the counts of a build with gcov, guest by
guest. ``TARDIS_QEMU_MIB`` is the memory of a guest, ``TARDIS_QEMU_PATIENCE`` multiplies its time.
"""

from __future__ import annotations

import os
import pathlib
import shlex
import subprocess
import tarfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from guest import Action, Guest, Machine
from guest_drives import pci_addresses
from guest_image import (
    DATA_FOLDER,
    PROGRAM_FOLDER,
    REPOSITORY,
    Kernel,
    MissingError,
    base_archive,
    data_archive,
    find_program,
    program_archive,
    require_programs,
    run_archive,
)

BUILD = pathlib.Path(os.environ.get("TARDIS_BUILD_DIR") or REPOSITORY / "build" / "native")
PROGRAM = BUILD / "cpp" / "tests" / "tardis_nvme_guest"
COVERAGE = os.environ.get("TARDIS_GUEST_COVERAGE")
SECONDS = 90.0  # of a guest, unless its test says otherwise; most take 5
PATIENCE = float(os.environ.get("TARDIS_QEMU_PATIENCE", "1"))  # times as much of it, for slow builds
# What the guest's program gets of this process's environment.
PASSED_ON = ("ASAN_OPTIONS", "UBSAN_OPTIONS")
OUT_BYTES = 256 << 20


class Bench:
    """What all guests of a session share."""

    def __init__(self, folder: pathlib.Path):
        require_programs()
        if not PROGRAM.exists():
            raise MissingError(f"{PROGRAM} is not built: `make qemu-test` builds it")
        self.folder = folder
        self.kernel = Kernel.find()
        vectors = sorted((REPOSITORY / "cpp" / "tests" / "data").glob("nvme_*.txt"))
        self._programs = program_archive([PROGRAM], folder) + data_archive(vectors)
        self._images = {self.kernel: base_archive(self.kernel, folder) + self._programs}
        self.guests_started = 0
        self.last_end = time.monotonic()
        self._running: set[Guest] = set()
        self._closed = False
        self._lock = threading.Lock()

    def image(self, kernel: Kernel) -> bytes:
        """What every guest of that kernel has in memory."""
        with self._lock:
            if kernel not in self._images:
                self._images[kernel] = base_archive(kernel, self.folder) + self._programs
            return self._images[kernel]

    def enter(self, guest: Guest) -> None:
        with self._lock:
            self.guests_started += 1
            self._running.add(guest)
            if self._closed:
                guest.kill()

    def leave(self, guest: Guest) -> None:
        with self._lock:
            self._running.discard(guest)
            self.last_end = time.monotonic()

    def close(self) -> None:
        """Ends all guests at once."""
        with self._lock:
            self._closed = True
            running = list(self._running)
        for guest in running:
            guest.kill()


class Lab:
    """Of one test. Its guests have one folder, so those with the same drives find them as the one before left them."""

    def __init__(self, bench: Bench, name: str):
        self._bench = bench
        self._guests = 0
        self.name = name
        self.folder = bench.folder / name
        self.folder.mkdir()
        self.notes: list[str] = []  # printed with the test's result
        self.qemu_crashes = 0  # that were no failure (scenarios.passed)

    def home_image(self, mib: int = 32) -> pathlib.Path:
        """A new ext4 file system, for a /home that outlives its guest."""
        image = self.folder / "home.img"
        with image.open("wb") as file:
            file.truncate(mib << 20)
        mke2fs = find_program("mke2fs")
        assert mke2fs is not None
        subprocess.run([mke2fs, "-q", "-F", "-t", "ext4", image], check=True)
        return image

    def remove_images(self) -> None:
        for pattern in ("*.img", "*.qcow2"):
            for image in self.folder.glob(pattern):
                image.unlink()

    @contextmanager
    def boot(
        self,
        machine: Machine,
        main: str,
        *,
        seconds: float = SECONDS,
        actions: Mapping[str, Action] | None = None,
        environment: Mapping[str, str] | None = None,
        kernel: Kernel | None = None,
    ) -> Iterator[Guest]:
        """A guest that runs `main`, a shell script, for at most `seconds`; it is gone when the context ends."""
        kernel = kernel or self._bench.kernel
        name = f"guest{self._guests}"
        self._guests += 1
        out_image = self.folder / f"{name}.out" if COVERAGE else None
        addresses = pci_addresses(machine.controllers)
        settings = {"VFIO": " ".join(addresses) if machine.vfio else "", "HOME_DISK": "", "OUT_DISK": ""}
        disks = iter(("/dev/vda", "/dev/vdb"))
        if machine.home_image is not None:
            settings["HOME_DISK"] = next(disks)
        if out_image is not None:
            settings["OUT_DISK"] = next(disks)
            with out_image.open("wb") as file:
                file.truncate(OUT_BYTES)
        exported = {
            "TARDIS_GUEST_NVME": ",".join(addresses),
            "TARDIS_GUEST_HOST": "/dev/ttyS1",
            "TARDIS_GUEST_FOLDER": "/home",
            "TARDIS_TEST_DATA": DATA_FOLDER,
            "GTEST_COLOR": "no",
            **({"GCOV_PREFIX": "/out"} if COVERAGE else {}),
            **{name: os.environ[name] for name in PASSED_ON if name in os.environ},
            "PATH": f"/bin:{PROGRAM_FOLDER}",
            **(environment or {}),
        }
        lines = [f"export {name}={shlex.quote(value)}" for name, value in exported.items()]
        if COVERAGE:
            lines.append("umask 0")  # for counts of processes of other users
        initrd = self.folder / f"{name}.initrd"
        initrd.write_bytes(self._bench.image(kernel) + run_archive(settings, "\n".join([*lines, main])))
        guest = Guest(name, machine, kernel.image, initrd, self.folder, seconds * PATIENCE, actions, out_image)
        try:
            self._bench.enter(guest)
            yield guest
        finally:
            guest.close()
            self._bench.leave(guest)
            initrd.unlink()
        if out_image is not None:
            self._keep_counts(out_image, name)

    def _keep_counts(self, out_image: pathlib.Path, name: str) -> None:
        assert COVERAGE is not None
        folder = pathlib.Path(COVERAGE) / f"{self.name}-{name}"
        folder.mkdir(parents=True)
        with out_image.open("rb") as file:
            if file.read(512).strip(b"\0"):  # else the guest ended before it could write
                file.seek(0)
                with tarfile.open(fileobj=file, mode="r:") as archive:
                    archive.extractall(folder, filter="data")
        out_image.unlink()
