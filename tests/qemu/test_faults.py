# SPDX-License-Identifier: Apache-2.0
"""Drives that report errors, are slow, or die: rows of docs/nvme-faults.md."""

from __future__ import annotations

import os
import signal
import subprocess
import time

from guest import Machine
from guest_drives import Controller, Fault, Namespace, Raw, Server, Slow, pci_addresses
from scenarios import check, run

ERRORS = Controller(
    (
        Namespace(faults=(Fault("read", sector=16),)),
        Namespace(block_bytes=4096, faults=(Fault("write", once=True),)),
        Namespace(faults=(Fault("write", errno=28, sector=16),)),
        Namespace(block_bytes=4096, faults=(Fault("flush"),)),
        Namespace(block_bytes=4096, faults=(Fault("read", sector=6161),)),
    ),
    options=("max_ioqpairs=1",),
)
SLOW = Controller(
    (
        Namespace(block_bytes=4096, medium=Slow(0.05)),
        Namespace(medium=Slow(0.25)),
        Namespace(block_bytes=4096, medium=Slow(0.6)),
        Namespace(block_bytes=4096, medium=Slow(1.0)),
        Namespace(block_bytes=4096, throttled=True),
        Namespace(block_bytes=4096, medium=Slow(2.0)),
    )
)


def test_errors(lab):
    with lab.boot(Machine((ERRORS,)), run("ScenarioErrors.*")) as guest:
        outcome = guest.passed()
    check(
        lab,
        outcome,
        "ScenarioErrors.AReadThatFailsCostsThatRequestAlone",
        "ScenarioErrors.AWriteThatFailsOnceIsSentAgain",
        "ScenarioErrors.AWriteThatFailsAlwaysEndsInTheError",
        "ScenarioErrors.AFlushThatFailsSaysSo",
        "ScenarioErrors.AnAddressThatDoesNotExistIsNotSent",
        "ScenarioErrors.FewerQueuesThanAskedFor",
        "ScenarioErrors.AStoreGivesUpThePageAlone",
    )


def limit(guest, argument):
    node, bytes_per_second = argument.split()
    guest.limit(node, int(bytes_per_second))


def test_slow_drives(lab):
    machine = Machine((SLOW, Controller((Namespace(medium=Slow(1.5)),))))
    environment = {"TARDIS_GUEST_SLOW": pci_addresses(machine.controllers)[1]}
    filter_ = run("ScenarioSlow.*:GuestSlow.*")
    with lab.boot(machine, filter_, actions={"limit": limit}, environment=environment) as guest:
        outcome = guest.passed()
    check(
        lab,
        outcome,
        "ScenarioSlow.CompletionInTime",
        "ScenarioSlow.CompletionAfterItsTimeAndWithinTheGrace",
        "ScenarioSlow.CompletionAfterTheGrace",
        "ScenarioSlow.DeletionIsAnsweredLate",
        "ScenarioSlow.LateDataOfARealMedium",
        "ScenarioSlow.ResetWithACommandInFlight",
        "GuestSlow.CommandsThatTakeTooLongEndInTime",
    )


def test_a_medium_that_dies(lab):
    """The drive's blocks come from a server, which is killed."""
    image, socket = lab.folder / "served.img", lab.folder / "nbd"
    Raw().nodes("served", 128 << 20, lab.folder)
    command = ["qemu-nbd", "--format=raw", "--persistent", f"--socket={socket}", str(image)]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        while not socket.exists():
            assert server.poll() is None, "qemu-nbd ended"
            time.sleep(0.05)
        machine = Machine((Controller((Namespace(mib=128, block_bytes=4096, medium=Server(socket)),)),))

        def kill_server(*_):
            os.kill(server.pid, signal.SIGKILL)
            server.wait()

        with lab.boot(machine, run("ScenarioStore.TheMediumDies"), actions={"kill-server": kill_server}) as guest:
            outcome = guest.passed()
    finally:
        server.kill()
        server.wait()
    check(lab, outcome, "ScenarioStore.TheMediumDies")
    assert guest.asked == ["kill-server"]
