# SPDX-License-Identifier: Apache-2.0
"""What tests that run one suite of the guest's program share."""

from __future__ import annotations

from guest import Machine, Outcome, QemuCrashedError

# In which QEMU 7.2 crashes now and then, by a bug of its own (docs/vfio.md).
CRASHES = "GuestRecovery.ResetWithCommandsInFlight"

BROKER = (
    "ScenarioBroker.AKilledClientIsNothingToTheOthers",
    "ScenarioBroker.AClientHasWhatItAsksForWithinItsLimits",
    "ScenarioBroker.AStoreOnARange",
    "ScenarioBroker.AKilledBrokerEndsAllRequestsAndTheNextOneStarts",
    "ScenarioBroker.ServesWithoutPrivileges",
)
"""Cases of the suite ScenarioBroker."""


def run(filter_: str) -> str:
    """The script of a guest that runs these cases."""
    return f"tardis_nvme_guest --gtest_filter={filter_}"


def run_without_waiting(filter_: str) -> str:
    """The same, for cases in which a drive is gone.

    The kernel waits for more than a minute for the reset of a function that does not answer, and the end of the process
    with it: so the verdict is what the program printed.
    """
    return f"""
{run(filter_)} >/tmp/log 2>&1 &
until grep -qE '^\\[  (PASSED|FAILED)  \\]' /tmp/log || [ ! -d /proc/$! ]; do usleep 100000; done
usleep 500000
[ -z "$GCOV_PREFIX" ] || sleep 5
cat /tmp/log
grep -q '^\\[  PASSED  \\]' /tmp/log && ! grep -q '^\\[  FAILED  \\]' /tmp/log
"""


def check(lab, outcome: Outcome, *cases: str) -> None:
    """Exactly these cases ran and passed; what they said of faults is kept."""
    assert sorted(outcome.cases("OK")) == sorted(cases), outcome.log
    lab.notes += [line for line in outcome.log.splitlines() if line.startswith(("[ FAULT", "chain "))]
    lab.notes.append(f"{outcome.seconds:.1f} s")


def passed(lab, machine: Machine, script: str, **boot) -> Outcome:
    """Of a guest that must succeed; of a second one where QEMU crashed in the case in which it is known to do so."""
    for last in (False, True):
        try:
            with lab.boot(machine, script, **boot) as guest:
                return guest.passed()
        except QemuCrashedError:
            if last or not guest.log.rstrip().endswith(f"[ RUN      ] {CRASHES}"):
                raise
            lab.notes.append(f"QEMU itself crashed in {CRASHES}; a second guest was started")
            lab.qemu_crashes += 1
            lab.remove_images()
    raise AssertionError
