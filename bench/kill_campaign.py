#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Kill a process that uses a store in every way at once, at random moments, and check the store after each kill.

`tardis_torture write` stores, flushes, loads, evicts and clears pages from three threads and logs what it was promised;
SIGKILL ends it after 5 to 300 ms, which may be in the middle of opening, of a write, of a flush or of a clear. Then
`tardis_torture check` opens the same store and counts:

- wrong bytes in any page that the store serves,
- pages that a flush had acknowledged and that are missing (in the case `keep`, whose capacity never evicts),
- pages that a clear had deleted and that came back,
- slots that were lost or quarantined, headers and payloads that `tardis verify` finds bad.

One store lives through many rounds; some checks leave it unclosed, some repair it. Every count must be 0: the exit
status says so. `value` of a row is the number of violations in `size` kills.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from common import Report, add_common_arguments, file_system, machine_facts

FIRST_MS, LAST_MS = 5, 300
ROUNDS_PER_STORE = 50
BROKEN = ("wrong", "missing", "resurrected", "quarantined", "unreadable", "verify_bad")


def find_program() -> pathlib.Path | None:
    """tardis_torture in TARDIS_BUILD_DIR or build/native, or None."""
    root = pathlib.Path(__file__).resolve().parent.parent
    builds = [os.environ.get("TARDIS_BUILD_DIR"), root / "build" / "native"]
    for build in builds:
        if build and (program := pathlib.Path(build) / "cpp" / "tests" / "tardis_torture").exists():
            return program
    return None


def run_case(
    program: pathlib.Path, folder: pathlib.Path, engine: str, mode: str, rounds: int, seed: int
) -> dict[str, Any]:
    """Kill `rounds` times; returns the totals. Stops at the first broken promise and leaves that store as it is."""
    chance = random.Random(seed)
    totals: Counter[str] = Counter()
    recovery_ms: list[float] = []
    for turn in range(rounds):
        store, log = (
            folder / f"{mode}-{engine}-{turn // ROUNDS_PER_STORE}",
            folder / f"{mode}-{engine}-{turn // ROUNDS_PER_STORE}.log",
        )
        if turn % ROUNDS_PER_STORE == 0 and turn > 0:
            old = folder / f"{mode}-{engine}-{turn // ROUNDS_PER_STORE - 1}"
            shutil.rmtree(old)
            old.with_name(old.name + ".log").unlink()
        arguments = [str(seed * 1_000_000 + turn), engine, str(log)]
        writer = subprocess.Popen(
            [program, "write", store, *arguments, mode], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        time.sleep(chance.uniform(FIRST_MS, LAST_MS) / 1e3)
        writer.send_signal(signal.SIGKILL)
        _, said = writer.communicate()
        if writer.returncode != -signal.SIGKILL:
            raise SystemExit(f"round {turn} of {mode}/{engine} in {folder}: the writer ended by itself: {said}")
        if not (store / "tardis.store").exists():
            totals["killed_before_creation"] += 1
            shutil.rmtree(store, ignore_errors=True)
            continue
        ending = chance.choices(("", "-dirty", "-repair"), (6, 3, 1))[0]
        check = subprocess.run(
            [program, "check", store, *arguments, mode + ending],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        try:
            counts = json.loads(check.stdout)
        except json.JSONDecodeError:
            raise SystemExit(f"round {turn} of {mode}/{engine} in {folder}: the check failed: {check.stderr}") from None
        recovery_ms.append(counts.pop("recovery_ms"))
        totals["lost_slots"] += not counts.pop("conserved")
        totals["slots"] = max(totals["slots"], counts.pop("slots"))
        totals.update(counts)
        if check.returncode != 0 or sum(counts[name] for name in BROKEN) > 0:
            print(f"round {turn} of {mode}/{engine} in {folder}: {check.stdout}{check.stderr}", file=sys.stderr)
            totals["stopped_in_round"] = turn
            break
    recovery_ms.sort()
    return {
        **{name: totals[name] for name in BROKEN},
        "lost_slots": totals["lost_slots"],
        "pages_checked": totals["found"],
        "flushed_pages_checked": totals["flushed"],
        "torn_pages_refused": totals["torn"],
        "pages_verified_at_open": totals["verified"],
        "pages_rejected_at_open": totals["rejected"],
        "killed_before_creation": totals["killed_before_creation"],
        "slots": totals["slots"],
        "recovery_ms_median": round(recovery_ms[len(recovery_ms) // 2], 3) if recovery_ms else None,
        "recovery_ms_max": round(recovery_ms[-1], 3) if recovery_ms else None,
        **({"stopped_in_round": totals["stopped_in_round"]} if "stopped_in_round" in totals else {}),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--rounds", type=int, help="kills in all (default 500; 24 with --quick)")
    parser.add_argument(
        "--folder",
        type=pathlib.Path,
        action="append",
        help="where stores are made, may be repeated (default: /tmp and /dev/shm)",
    )
    parser.add_argument("--engine", action="append", choices=("sync", "io_uring"), help="default: both")
    parser.add_argument("--mode", action="append", choices=("keep", "evict"), help="default: both")
    parser.add_argument("--seed", type=int, default=1, help="of the moments and of what is written (default 1)")
    parser.add_argument(
        "--program", type=pathlib.Path, default=find_program(), help="tardis_torture (default: of `make test`)"
    )
    options = parser.parse_args()
    if options.program is None:
        parser.error("tardis_torture was not found: build with -DTARDIS_TESTS=ON and name it with --program")
    folders = options.folder or [pathlib.Path(tempfile.gettempdir()), pathlib.Path("/dev/shm")]
    cases = [
        (folder, engine, mode)
        for folder in folders
        for engine in options.engine or ("sync", "io_uring")
        for mode in options.mode or ("keep", "evict")
    ]
    rounds = options.rounds or (24 if options.quick else 500)
    report = Report(options.json, machine_facts(*folders))
    broken = 0
    for number, (parent, engine, mode) in enumerate(cases):
        share = rounds // len(cases) + (number < rounds % len(cases))
        if share == 0:
            continue
        folder = pathlib.Path(tempfile.mkdtemp(prefix="tardis-kill-", dir=parent))
        counts = run_case(options.program, folder, engine, mode, share, options.seed * 100 + number)
        violations = sum(counts[name] for name in BROKEN) + counts["lost_slots"]
        if share >= 10 and (counts["pages_checked"] == 0 or (mode == "keep" and counts["flushed_pages_checked"] == 0)):
            print(f"{mode}/{engine}: no page was there to be checked, so this proves nothing", file=sys.stderr)
            violations += 1
        broken += violations
        report.add(f"kill -9, {mode}", f"{engine} on {file_system(parent)}", share, violations, "violations", **counts)
        if violations == 0:
            shutil.rmtree(folder)
        else:
            print(f"left for inspection: {folder}", file=sys.stderr)
    print(f"{rounds} kills, {broken} broken promises")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
