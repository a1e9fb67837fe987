# SPDX-License-Identifier: Apache-2.0
"""Stores whose machine or process ends at any moment: what was flushed is there, and nothing wrong is served."""

from __future__ import annotations

import os
import random
import re
import threading

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

    further = 0
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
            guest.wait_for(r"FillUntilTheEnd")
            threading.Event().wait(delay)
            guest.kill()
            further += left(lab, guest.log, set(flushed) - {chain})
    with lab.boot(machine, run(VERIFY), environment=environment(0)) as guest:
        outcome = guest.passed()
    check(lab, outcome, VERIFY)
    left(lab, outcome.log, set(flushed))
    assert len(flushed) == ROUNDS


def left(lab, log, chains):
    """What a guest found of these chains; the number of pages beyond what was flushed."""
    found = dict.fromkeys(chains, None)
    for chain, flushed, missing, further in re.findall(
        r"^chain (\d+): flushed (\d+), missing (\d+), further (\d+)$", log, re.MULTILINE
    ):
        assert int(missing) == 0 and int(flushed) > 0
        found[int(chain)] = int(further)
    assert None not in found.values(), log
    return sum(found.values())


KILLS = r"""
export TARDIS_GUEST_PROGRESS=/tmp/progress TARDIS_GUEST_FLUSHED=
for round in $(seq {rounds}); do
  export TARDIS_GUEST_ROUND=$round
  {fill} >/tmp/fill 2>&1 &
  until grep -qE "^flushed $round (..[^0-4]|[5-9].|...)" /tmp/progress 2>/dev/null; do
    [ -d /proc/$! ] || {{ cat /tmp/fill; exit 1; }}
    usleep 20000
  done
  kill -9 $!
  wait
  grep -q "the end did not come" /tmp/fill && {{ cat /tmp/fill; exit 1; }}
  pages=$(grep "^flushed $round " /tmp/progress | tail -n 1 | cut -d ' ' -f 3)
  TARDIS_GUEST_FLUSHED=$TARDIS_GUEST_FLUSHED,$round:$pages
  TARDIS_GUEST_FLUSHED=${{TARDIS_GUEST_FLUSHED#,}}
  {verify} || exit 1
done
"""


def test_kill_9_of_the_store(lab):
    """The kernel takes the drive from the process, and the next one finds it usable."""
    rounds = max(3, ROUNDS)
    drive = Controller((Namespace(mib=128, block_bytes=512),))
    script = KILLS.format(rounds=rounds, fill=run(FILL), verify=run(VERIFY))
    with lab.boot(Machine((drive,)), script) as guest:
        outcome = guest.passed()
    check(lab, outcome, VERIFY)
    assert len(re.findall(rf"^\[       OK \] {VERIFY} ", outcome.log, re.MULTILINE)) == rounds
    left(lab, outcome.log, set(range(1, rounds + 1)))
