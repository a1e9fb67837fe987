# SPDX-License-Identifier: Apache-2.0
"""What tests that run one suite of the guest's program share."""

from __future__ import annotations

from guest import Outcome


def run(filter_: str) -> str:
    """The script of a guest that runs these cases."""
    return f"tardis_nvme_guest --gtest_filter={filter_}"


def check(lab, outcome: Outcome, *cases: str) -> None:
    """Exactly these cases ran and passed; what they said of faults is kept."""
    assert sorted(outcome.cases("OK")) == sorted(cases), outcome.log
    lab.notes += [line for line in outcome.log.splitlines() if line.startswith(("[ FAULT", "chain "))]
    lab.notes.append(f"{outcome.seconds:.1f} s")
