# SPDX-License-Identifier: Apache-2.0
"""A broker of QEMU's controller with clients in other processes (docs/nvmed.md)."""

from __future__ import annotations

from guest import Machine
from guest_drives import Controller, Namespace
from scenarios import BROKER, check, run


def test_broker(lab):
    machine = Machine((Controller((Namespace(block_bytes=4096),)),))
    with lab.boot(machine, run("ScenarioBroker.*")) as guest:
        outcome = guest.passed()
    check(lab, outcome, *BROKER)
