#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Kill processes that use a store in every way at once, at random moments, and check the store after the kills.

`tardis_torture campaign` forks writers that store, flush, load, evict and clear pages from three threads, now and then
close the store and open it again (which writes and reads what it keeps between the two), and log what they were
promised. SIGKILL ends them after 1 to 110 ms, which may be in the middle of any of that. With `--processes N`, N of
them work on one store at once, read each other's pages and store the same ones; while one is killed the others must go
on. Then a check opens the same store and counts:

- wrong bytes in any page that the store serves,
- pages that a flush had acknowledged and that are missing (in the case `keep`, whose capacity never evicts),
- pages that a clear had deleted and that came back,
- slots that were lost or quarantined, headers and payloads that `tardis verify` finds bad.

One store lives through many kills; some checks leave it unclosed, some repair it. Every count must be 0: the exit
status says so. `value` of a row is the number of violations in `size` kills.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from common import Report, add_common_arguments, add_program_argument, file_system, machine_facts, required_program

BROKEN = ("wrong", "missing", "resurrected", "quarantined", "unreadable", "verify_bad")
SUMS = (*BROKEN, "found", "flushed", "torn", "verified", "rejected", "kills", "checks", "killed_before_creation")


class Case(NamedTuple):
    """One store setting; `folder` is made for it."""

    folder: pathlib.Path
    engine: str
    mode: str
    processes: int
    kills: int
    seed: int


def run_case(program: pathlib.Path, case: Case, seconds: float) -> dict[str, Any]:
    """Kill until `case.kills` or the time is up; returns the totals. Stops at the first broken promise."""
    arguments = [case.folder, case.seed, case.engine, case.mode, case.kills, case.processes, seconds]
    started = time.monotonic()
    done = subprocess.run(
        [program, "campaign", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds + 600,
    )
    totals: Counter[str] = Counter()
    recovery_ms: list[float] = []
    lost_slots = slots = broken = 0
    for line in done.stdout.splitlines():
        counts = json.loads(line)
        totals.update({name: counts[name] for name in SUMS if name in counts})
        broken += counts.get("broken", 0)
        if "recovery_ms" in counts:
            recovery_ms.append(counts["recovery_ms"])
            lost_slots += not counts["conserved"]
            slots = max(slots, counts["slots"])
    recovery_ms.sort()
    violations = sum(totals[name] for name in BROKEN) + lost_slots
    if done.returncode != 0:
        print(f"{case}: exit status {done.returncode}\n{done.stderr}", file=sys.stderr)
        violations = max(1, violations)
    return {
        "violations": violations,
        "kills": totals["kills"],
        **{name: totals[name] for name in BROKEN},
        "lost_slots": lost_slots,
        "checks": totals["checks"],
        "pages_checked": totals["found"],
        "flushed_pages_checked": totals["flushed"],
        "torn_pages_refused": totals["torn"],
        "pages_verified_at_open": totals["verified"],
        "pages_rejected_at_open": totals["rejected"],
        "killed_before_creation": totals["killed_before_creation"],
        "slots": slots,
        "recovery_ms_median": round(recovery_ms[len(recovery_ms) // 2], 3) if recovery_ms else None,
        "recovery_ms_max": round(recovery_ms[-1], 3) if recovery_ms else None,
        "seconds": round(time.monotonic() - started, 1),
        **({"said": done.stderr[-2000:]} if done.returncode != 0 else {}),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--rounds", type=int, help="kills in all (default 500; 24 with --quick)")
    parser.add_argument("--seconds", type=float, help="end after this time, whatever --rounds says")
    parser.add_argument(
        "--folder",
        type=pathlib.Path,
        action="append",
        help="where stores are made, may be repeated (default: /tmp and /dev/shm)",
    )
    parser.add_argument("--engine", action="append", choices=("sync", "io_uring"), help="default: both")
    parser.add_argument("--mode", action="append", choices=("keep", "evict"), help="default: both")
    parser.add_argument(
        "--processes", type=int, action="append", help="that use one store at once, may be repeated (default: 1)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="cases that run at the same time (default 1)")
    parser.add_argument("--seed", type=int, default=1, help="of the moments and of what is written (default 1)")
    add_program_argument(parser, "tardis_torture")
    options = parser.parse_args()
    program = required_program(parser, options.program, "tardis_torture")
    folders = options.folder or [pathlib.Path(tempfile.gettempdir()), pathlib.Path("/dev/shm")]
    settings = [
        (folder, engine, mode, processes)
        for folder in folders
        for engine in options.engine or ("sync", "io_uring")
        for mode in options.mode or ("keep", "evict")
        for processes in options.processes or (1,)
    ]
    rounds = options.rounds or (24 if options.quick else 500)
    cases = []
    for number, (parent, engine, mode, processes) in enumerate(settings):
        share = rounds // len(settings) + (number < rounds % len(settings))
        if share > 0:
            folder = pathlib.Path(tempfile.mkdtemp(prefix="tardis-kill-", dir=parent))
            cases.append(Case(folder, engine, mode, processes, share, options.seed * 100 + number))
    seconds = options.seconds / len(cases) * options.jobs if options.seconds else 86_400.0
    report = Report(options.json, machine_facts(*folders))
    broken = kills = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        results = pool.map(lambda case: run_case(program, case, seconds), cases)
        for case, counts in zip(cases, results, strict=True):
            violations, done = counts.pop("violations"), counts.pop("kills")
            nothing = counts["pages_checked"] == 0 or (case.mode == "keep" and counts["flushed_pages_checked"] == 0)
            if done >= 20 and nothing:
                print(f"{case}: no page was there to be checked, so this proves nothing", file=sys.stderr)
                violations += 1
            broken += violations
            kills += done
            several = "" if case.processes == 1 else f", {case.processes} processes"
            where = f"{case.engine} on {file_system(case.folder)}"
            report.add(f"kill -9, {case.mode}{several}", where, done, violations, "violations", **counts)
            if violations == 0:
                shutil.rmtree(case.folder)
            else:
                print(f"left for inspection: {case.folder}", file=sys.stderr)
    print(f"{kills} kills, {broken} broken promises")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
