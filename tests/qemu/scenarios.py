# SPDX-License-Identifier: Apache-2.0
"""What tests that run one suite of the guest's program share."""

from __future__ import annotations

from guest import Outcome


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
