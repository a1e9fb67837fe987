#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Replay what power cuts could have left of a store, and check each state against what the store had promised.

A drive in memory keeps a journal of every write, flush, reservation, rename and unlink of a store at work
(cpp/tests/store_crash_states.cpp). After each event, states are built from what was durable there and any part of what
was not - whole writes, writes torn at 512 bytes, in any order - and each is opened through the store's own interface:
no wrong byte, everything flushed there (unless evicted or deleted since), nothing deleted back, no slot lost or used
twice, and the store takes and returns new pages. Then the work goes on from one of these states, or from what a killed
process leaves, and is crashed again.

One row per workload: `size` states were checked, `value` is the number of workloads with a broken promise (a run stops
at the first one and prints how to repeat it). The last row is the sum.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from common import Report, add_common_arguments, add_program_argument, machine_facts, required_program

SUITE = "Workloads/StoreCrashStates.KeepEveryPromise/"
COUNTS = (
    "states",
    "distinct_states",
    "crash_points",
    "sessions",
    "pages_read",
    "flushed_pages_checked",
    "deleted_pages_checked",
    "states_on_real_files",
)


def workloads(program: pathlib.Path) -> list[str]:
    """Names of the workloads that the test program has."""
    listing = subprocess.run(
        [program, f"--gtest_filter={SUITE}*", "--gtest_list_tests"], capture_output=True, text=True, check=True
    ).stdout
    return [line.split("#")[0].strip().rsplit("/", 1)[1] for line in listing.splitlines() if line.startswith("  ")]


def run_workload(program: pathlib.Path, name: str, states: int, seed: int) -> dict[str, Any]:
    """Check `states` states of one workload in a process of its own; returns its counts."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder) / "result.json"
        done = subprocess.run(
            [program, f"--gtest_filter={SUITE}{name}", f"--gtest_output=json:{result}", "--gtest_color=no"],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "TARDIS_CRASH_STATES": str(states), "TARDIS_CRASH_SEED": str(seed)},
        )
        suites = json.loads(result.read_text())["testsuites"] if result.exists() else []
    cases = [case for suite in suites for case in suite["testsuite"]]
    counts = {key: int(cases[0].get(key, 0)) if cases else 0 for key in COUNTS}
    if done.returncode != 0 or counts["states"] < states:
        print(f"{name}, seed {seed}:\n{done.stdout[-6000:]}{done.stderr[-2000:]}", file=sys.stderr)
    failed = done.returncode != 0 or counts["states"] < states
    return {**counts, "broken": int(failed), "seconds": round(time.monotonic() - started, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--states", type=int, help="states in all (default 180,000; 4,500 with --quick)")
    parser.add_argument("--seed", type=int, default=1, help="of the first session; later ones count on (default 1)")
    parser.add_argument("--jobs", type=int, default=2, help="workloads at the same time (default 2)")
    add_program_argument(parser, "tardis_tests")
    options = parser.parse_args()
    program = required_program(parser, options.program, "tardis_tests")
    names = workloads(program)
    if not names:
        parser.error(f"{program} has no crash states; build it from this tree")
    states = (options.states or (4_500 if options.quick else 180_000)) // len(names)
    report = Report(options.json, machine_facts("/dev/shm"))
    total = dict.fromkeys((*COUNTS, "broken"), 0)
    with ThreadPoolExecutor(options.jobs) as pool:
        results = pool.map(lambda name: run_workload(program, name, states, options.seed), names)
        for name, counts in zip(names, results, strict=True):
            for key in total:
                total[key] += counts[key]
            broken = counts.pop("broken")
            size = counts.pop("states")
            report.add("crash states", name, size, broken, "violations", seed=options.seed, **counts)
    broken, size = total.pop("broken"), total.pop("states")
    report.add("crash states", "all workloads", size, broken, "violations", seed=options.seed, **total)
    print(f"{size} states, {total['distinct_states']} distinct, {broken} workloads with a broken promise")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
