# SPDX-License-Identifier: Apache-2.0
"""Stores whose machine or process ends at any moment: what was flushed is there, and nothing wrong is served."""

from __future__ import annotations

import os
import random
import re
import threading
import time

from guest import Machine
from guest_drives import Controller, Namespace, VolatileCache
from scenarios import check, run

ROUNDS = int(os.environ.get("TARDIS_QEMU_ROUNDS", "2"))
SEED = int(os.environ.get("TARDIS_QEMU_SEED", "1"))
FILL, VERIFY = "ScenarioStore.FillUntilTheEnd", "ScenarioStore.WhatWasFlushedIsThere"


def test_power_cuts(lab):
    """QEMU is killed while a guest fills a store, and what QEMU had not written is lost; the next guest looks."""
    moments = random.Random(SEED)
    volatile = Namespace(mib=128, block_bytes=4096, medium=VolatileCache())
    drive = Controller((volatile, volatile))
    machine = Machine((drive,), home_image=lab.home_image())
    flushed: dict[int, int] = {}

    def environment(chain):
        return {
            "TARDIS_GUEST_ROUND": str(chain),
            "TARDIS_GUEST_FLUSHED": ",".join(f"{chain}:{pages}" for chain, pages in flushed.items()),
        }

    for chain in range(1, ROUNDS + 1):
        enough, delay = moments.randrange(20, 80), moments.uniform(0, 0.2)
        cut = threading.Event()

        def note(guest, argument, enough=enough, cut=cut):
            which, pages = map(int, argument.split())
            flushed[which] = pages
            if pages >= enough:
                cut.set()

        # The guest that looks at what the last cut left goes on to fill the store until the next.
        script = f"{run(VERIFY)} || exit 1\n{run(FILL)}" if flushed else run(FILL)
        with lab.boot(machine, script, actions={"flushed": note}, environment=environment(chain)) as guest:
            while not cut.wait(0.2):
                assert guest.running(), guest.log
            time.sleep(delay)
            guest.kill()
            look(guest.log, set(flushed) - {chain})
    with lab.boot(machine, run(VERIFY), environment=environment(0)) as guest:
        outcome = guest.passed()
    check(lab, outcome, VERIFY)
    look(outcome.log, set(flushed))
    assert len(flushed) == ROUNDS


def look(log, chains):
    """A guest has looked for the pages of all these chains and missed none that was flushed."""
    found = re.findall(r"^chain (\d+): flushed (\d+), missing (\d+), further (\d+)$", log, re.MULTILINE)
    assert {int(chain) for chain, *_ in found} == chains, log
    assert all(int(flushed) > 0 and int(missing) == 0 for _, flushed, missing, _ in found), log


# Until so many pages are flushed, and a moment longer.
KILL = r"""
export TARDIS_GUEST_ROUND={chain}
{fill} >/tmp/fill 2>&1 &
until grep -qE "^flushed {chain} ([{tens}-9].|...)$" /tmp/progress 2>/dev/null; do
  [ -d /proc/$! ] || {{ cat /tmp/fill; exit 1; }}
  usleep 5000
done
usleep {microseconds}
kill -9 $! || {{ cat /tmp/fill; exit 1; }}
wait
pages=$(grep "^flushed {chain} " /tmp/progress | tail -n 1 | cut -d ' ' -f 3)
TARDIS_GUEST_FLUSHED=${{TARDIS_GUEST_FLUSHED}}{comma}{chain}:$pages
{verify} || exit 1
"""


def kill_and_look(lab, machine, **boot):
    """A guest in which a process that fills a store is killed again and again, and the next one looks."""
    moments = random.Random(SEED)
    rounds = max(3, ROUNDS)
    script = "export TARDIS_GUEST_PROGRESS=/tmp/progress TARDIS_GUEST_FLUSHED=\n" + "".join(
        KILL.format(
            chain=chain,
            tens=moments.randrange(2, 9),
            microseconds=moments.randrange(100_000),
            comma="," if chain > 1 else "",
            fill=run(FILL),
            verify=run(VERIFY),
        )
        for chain in range(1, rounds + 1)
    )
    with lab.boot(machine, script, **boot) as guest:
        outcome = guest.passed()
    check(lab, outcome, VERIFY)
    assert len(re.findall(rf"^\[       OK \] {VERIFY} ", outcome.log, re.MULTILINE)) == rounds
    look(outcome.log, set(range(1, rounds + 1)))


def test_kill_9_of_the_store(lab):
    """The kernel takes the drive from the process, and the next one finds it usable."""
    kill_and_look(lab, Machine((Controller((Namespace(mib=128, block_bytes=512),)),)))
