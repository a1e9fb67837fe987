# SPDX-License-Identifier: Apache-2.0
"""One guest: a virtual machine under QEMU's emulation (TCG; KVM is never asked for), from its start to its verdict.

The program in the guest may ask for something to happen outside, by a line on the second serial port (``/dev/ttyS1``):
``unplug 0`` calls ``actions["unplug"](guest, "0")``, and the program gets ``ok ...`` or ``failed ...`` as the answer.

QEMU's exit status, by the device isa-debug-exit: 33 is a pass and 35 a failure of the program. Anything else is an
error of the guest or of this harness: 0 a kernel that panicked or stopped, 1 a QEMU that did not start, 137 no end in
time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from guest_drives import Controller, pci_addresses, qemu_arguments

PASS, FAIL, NO_VERDICT, NOT_STARTED, TOO_LATE = 33, 35, 0, 1, 137
TAIL_LINES = 60  # of the serial log, in messages
# They save boot time, or doubts about clocks.
KERNEL_OPTIONS = (
    "console=ttyS0 panic=-1 nokaslr intel_iommu=on mitigations=off tsc=reliable no_timer_check "
    "cryptomgr.notests random.trust_cpu=on"
)
# Keeps the kernel's own driver, which is built in, off the controllers.
KERNEL_DRIVER_OFF = "initcall_blacklist=nvme_init"

Action = Callable[["Guest", str], "str | None"]


class GuestError(AssertionError):
    """The guest did not do what it was started for; with the end of its serial log."""


class QemuCrashedError(GuestError):
    """QEMU itself ended by SIGSEGV or SIGABRT, which no guest may bring about."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """Hardware of a guest, and what its kernel is told."""

    controllers: tuple[Controller, ...] = (Controller(),)
    memory_mib: int = int(os.environ.get("TARDIS_QEMU_MIB", "512"))
    processors: int = 1
    iommu: tuple[str, ...] = ("intel-iommu",)  # each a -device of QEMU
    home_image: pathlib.Path | None = None  # an ext4 file system, mounted at /home; None: memory
    native_hot_plug: bool = False  # by the kernel's pciehp, not by ACPI
    kernel_driver: bool = False  # the kernel's own NVMe driver is there, and has the controllers at first
    vfio: bool = True  # vfio-pci gets them before the program starts
    kernel_options: str = ""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a guest that came to a verdict said."""

    passed: bool
    log: str  # the serial port's
    seconds: float

    def cases(self, verdict: str) -> list[str]:
        """GoogleTest cases that ended so: OK, FAILED or SKIPPED."""
        name = r"\w+(?:/\w+)?\.\w+(?:/\w+)?"
        found = re.findall(rf"^\[ +{verdict} +\] ({name})(?:, .*)? \(\d+ ms\)$", self.log, re.MULTILINE)
        return list(dict.fromkeys(found))

    def value(self, name: str) -> str:
        """Of a line ``name: value`` that the program printed."""
        found = re.search(rf"^{re.escape(name)}: (.*)$", self.log, re.MULTILINE)
        assert found is not None, f"the guest said nothing of {name}:\n{tail(self.log)}"
        return found[1]


def tail(log: str) -> str:
    return "\n".join(log.splitlines()[-TAIL_LINES:])


class Guest:
    """Runs from its construction to close(); a context manager. QEMU never outlives it, and not its time either."""

    def __init__(
        self,
        name: str,
        machine: Machine,
        kernel: pathlib.Path,
        initrd: pathlib.Path,
        folder: pathlib.Path,
        seconds: float,
        actions: Mapping[str, Action] | None = None,
        out_image: pathlib.Path | None = None,
    ):
        self.name, self.folder = name, folder
        self.pci = pci_addresses(machine.controllers)
        self._stderr = folder / f"{name}.qemu"
        self.events: list[dict[str, Any]] = []  # of QMP
        self.asked: list[str] = []  # by the program
        self._actions = dict(actions or {})
        self._log = bytearray()
        self._changed = threading.Condition()
        self._qmp_lock, self._qmp_ready = threading.Lock(), False
        self._seconds, self._started = seconds, time.monotonic()
        self._deadline = self._started + seconds
        self._trouble: str | None = None
        with contextlib.ExitStack() as inherited:
            qmp, qmp_theirs = socket.socketpair()
            control, control_theirs = socket.socketpair()
            inherited.callback(qmp_theirs.close)
            inherited.callback(control_theirs.close)
            command = self._command(machine, kernel, initrd, out_image, qmp_theirs.fileno(), control_theirs.fileno())
            (folder / f"{name}.command").write_text(" ".join(command) + "\n")
            # `timeout` is there for the case that this process is killed. A session of its own: no Ctrl-C for QEMU.
            self._process = subprocess.Popen(
                ["timeout", "--signal=KILL", f"{seconds + 5:g}", *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=inherited.enter_context(self._stderr.open("wb")),
                pass_fds=(qmp_theirs.fileno(), control_theirs.fileno()),
                start_new_session=True,
            )
        self._qmp_socket, self._control = qmp, control
        self._qmp_file = qmp.makefile("rb")
        self._threads = [
            threading.Thread(target=target, name=f"{name} {what}", daemon=True)
            for what, target in (("serial", self._read_serial), ("control", self._serve))
        ]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _command(
        machine: Machine,
        kernel: pathlib.Path,
        initrd: pathlib.Path,
        out_image: pathlib.Path | None,
        qmp: int,
        control: int,
    ) -> list[str]:
        options = f"{KERNEL_OPTIONS} {machine.kernel_options}"
        if not machine.kernel_driver:
            options += f" {KERNEL_DRIVER_OFF}"
        options += " ignore_loglevel" if os.environ.get("TARDIS_GUEST_VERBOSE") else " quiet loglevel=1"
        command = ["qemu-system-x86_64", "-accel", "tcg,thread=multi", "-machine", "q35", "-cpu", "max"]
        command += ["-m", str(machine.memory_mib), "-smp", str(machine.processors)]
        command += ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
        command += ["-kernel", str(kernel), "-initrd", str(initrd), "-append", options]
        command += ["-chardev", "stdio,id=serial0,signal=off", "-serial", "chardev:serial0"]
        command += ["-chardev", f"socket,id=serial1,fd={control}", "-serial", "chardev:serial1"]
        command += ["-chardev", f"socket,id=qmp,fd={qmp}", "-mon", "chardev=qmp,mode=control"]
        command += ["-device", "isa-debug-exit,iobase=0xf4,iosize=4"]
        for device in machine.iommu:
            command += ["-device", device]
        if machine.native_hot_plug:
            command += ["-global", "ICH9-LPC.acpi-pci-hotplug-with-bridge-support=off"]
        for index, image in enumerate(image for image in (machine.home_image, out_image) if image is not None):
            command += ["-drive", f"file={image},format=raw,if=none,id=disk{index}"]
            command += ["-device", f"virtio-blk-pci,drive=disk{index},addr={0x10 + index:02x}.0"]
        return command + qemu_arguments(machine.controllers, initrd.parent)

    def __enter__(self) -> Guest:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- what it says

    @property
    def log(self) -> str:
        with self._changed:
            return self._log.decode(errors="replace").replace("\r", "")

    def wait_for(self, pattern: str, seconds: float | None = None) -> re.Match[str]:
        """The first place of the serial log that matches; GuestError at the end of the guest or of the time."""
        deadline = min(self._deadline, time.monotonic() + (seconds if seconds is not None else self._seconds))
        while True:
            found = re.search(pattern, self.log, re.MULTILINE)
            if found is not None:
                return found
            if not self._threads[0].is_alive():
                raise self._error(f"ended (exit status {self._process.wait()}) before it said {pattern!r}")
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._error(f"did not say {pattern!r} in time")
            with self._changed:
                self._changed.wait(min(left, 0.2))

    def running(self) -> bool:
        return self._process.poll() is None

    def outcome(self) -> Outcome:
        """Waits for the program's verdict."""
        try:
            status = self._process.wait(max(0.1, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            raise self._error(f"came to no verdict within {self._seconds:g} s") from None
        self._threads[0].join(5)
        if self._trouble is not None:
            raise self._error(self._trouble)
        if status in (-signal.SIGSEGV, -signal.SIGABRT):
            raise QemuCrashedError(*self._error("came to no verdict: QEMU itself crashed").args)
        if status not in (PASS, FAIL):
            meaning = {
                NO_VERDICT: "its kernel panicked or stopped",
                NOT_STARTED: "QEMU did not start",
                TOO_LATE: "it took too long",
            }.get(status, "QEMU died")
            raise self._error(f"came to no verdict, QEMU's exit status is {status}: {meaning}")
        return Outcome(status == PASS, self.log, time.monotonic() - self._started)

    def passed(self) -> Outcome:
        """The outcome of a program that must succeed."""
        outcome = self.outcome()
        if not outcome.passed:
            failed = outcome.cases("FAILED")
            raise self._error(f"failed: {', '.join(failed) or 'see its log'}")
        return outcome

    def _error(self, what: str) -> GuestError:
        kept = self.folder / f"{self.name}.log"
        kept.write_text(self.log)
        said = "".join(f"\nQEMU: {line}" for line in self._stderr.read_text().splitlines()[:8])
        return GuestError(f"guest {self.name} {what}{said}\nThe end of its serial log ({kept}):\n{tail(self.log)}")

    def _read_serial(self) -> None:
        assert self._process.stdout is not None
        while data := os.read(self._process.stdout.fileno(), 65536):
            with self._changed:
                self._log += data
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    # ---- what is done to it

    def qmp(self, command: str, **arguments: Any) -> Any:
        """A command of QEMU's machine protocol; what it returns."""
        request = {"execute": command, "arguments": arguments}
        with self._qmp_lock:
            if not self._qmp_ready:
                self._receive("QMP")
                self._send({"execute": "qmp_capabilities"})
                self._receive("return")
                self._qmp_ready = True
            self._send(request)
            answer = self._receive("return")
        if "error" in answer:
            raise self._error(f"QEMU refused {request}: {answer['error'].get('desc')}")
        return answer["return"]

    def wait_event(self, name: str, seconds: float) -> dict[str, Any]:
        """The first event of that name, which may have come already."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.qmp("query-status")  # events come with the answers
            for event in self.events:
                if event["event"] == name:
                    return event
            time.sleep(0.05)
        raise self._error(f"QEMU sent no {name} within {seconds:g} s")

    def _send(self, message: dict[str, Any]) -> None:
        self._qmp_socket.sendall(json.dumps(message).encode() + b"\n")

    def _receive(self, wanted: str) -> dict[str, Any]:
        while line := self._qmp_file.readline():
            message = json.loads(line)
            if "event" in message:
                self.events.append(message)
            elif wanted in message or "error" in message:
                return message
        raise self._error("QEMU has closed its monitor")

    def unplug(self, number: int) -> None:
        """Asks for the removal of a controller, as somebody who presses the button of its slot."""
        self.qmp("device_del", id=f"nvme{number}")

    def limit(self, node: str, bytes_per_second: int) -> None:
        """Of a throttled namespace, for example "nvme0-1"; 0 for no limit."""
        path = f"/objects/{node}-limits"
        self.qmp("qom-set", path=path, property="limits", value={"bps-total": bytes_per_second})

    def signal(self, number: int) -> None:
        """Sends a signal to QEMU, if it runs."""
        # Not to `timeout`, whose child it is and which must reap it.
        children = pathlib.Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        with contextlib.suppress(OSError):
            for child in children.read_text().split():
                os.kill(int(child), number)

    def kill(self) -> None:
        """Ends QEMU at once, as a power cut does: what it has not written is gone."""
        while self._process.poll() is None:
            self.signal(signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.05)
        self._threads[0].join(5)

    def close(self) -> None:
        self.kill()
        # Both ends up the thread that waits for the guest's requests.
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._threads[1]:
            self._threads[1].join(5)
        self._control.close()
        self._qmp_file.close()
        self._qmp_socket.close()
        (self.folder / f"{self.name}.log").write_text(self.log)
        assert self._process.stdout is not None
        if not self._threads[0].is_alive():
            self._process.stdout.close()

    def _serve(self) -> None:
        with self._control.makefile("rb") as lines:
            while True:
                try:
                    line = lines.readline().decode(errors="replace").strip("\0\r\n ")
                    if not line:
                        return
                    answer = self._act(line)
                    self._control.sendall(f"{answer}\n".encode())
                except (OSError, ValueError):
                    return  # QEMU ended

    def _act(self, line: str) -> str:
        name, _, argument = line.partition(" ")
        self.asked.append(line)
        action = self._actions.get(name)
        try:
            if action is None:
                raise GuestError(f"expected one of {sorted(self._actions)}")
            return f"ok {action(self, argument) or ''}".rstrip()
        except Exception as error:
            self._trouble = f"asked for {line!r}, which failed: {error}"
            return f"failed {type(error).__name__}"
