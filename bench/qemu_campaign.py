#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The NVMe driver in guests, built with gcov, and with AddressSanitizer and UBSan: all of tests/qemu, with more cuts.

Builds `tardis_nvme_guest` twice, runs the tests of tests/qemu against each, and adds up which lines of cpp/nvme guests
have executed. Rows: failed tests of each build (must be 0), and the lines, in percent of those that a compiler made
code for, of cpp/nvme without the software controller, and of each folder of it. The exit status is 1 if a test failed,
or the percentage is below `--least`.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from common import Report, add_common_arguments, machine_facts

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOFTWARE = "cpp/nvme/soft/"  # never there in a guest
BUILDS = {
    "gcov": ["-DCMAKE_CXX_FLAGS=--coverage", "-DCMAKE_BUILD_TYPE=Debug"],
    "address,undefined": ["-DTARDIS_SANITIZE=address,undefined"],
}
# Which parts of an ASan report are of use where no debugger is: the guest has no symbolizer.
SANITIZERS = {"ASAN_OPTIONS": "abort_on_error=0:detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1"}


def build(name: str, jobs: int) -> pathlib.Path:
    """The build folder of `name`, with the guests' program in it."""
    folder = ROOT / "build" / f"guest-{name.partition(',')[0]}"
    definitions = [*BUILDS[name], "-DTARDIS_TESTS=ON", "-DTARDIS_CUDA=OFF"]
    configure = ["cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", *definitions]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", folder, "-j", str(jobs), "--target", "tardis_nvme_guest"], check=True)
    return folder


def run_tests(folder: pathlib.Path, rounds: int, environment: dict[str, str]) -> dict[str, object]:
    """All tests of tests/qemu: how many passed and failed, guests and seconds."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "--color=no", "-p", "no:cacheprovider", ROOT / "tests" / "qemu"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        env={
            **os.environ,
            "CI": "true",  # a guest that is not to be had is a failure
            "TARDIS_BUILD_DIR": str(folder),
            "TARDIS_QEMU_ROUNDS": str(rounds),
            "TARDIS_QEMU_MIB": "1024",
            "TARDIS_QEMU_PATIENCE": "4",
            **environment,
        },
    )
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error|skipped)", done.stdout)}
    guests = re.search(r"^qemu: (\d+) guests", done.stdout, re.MULTILINE)
    failed = counts.get("failed", 0) + counts.get("error", 0)
    if done.returncode != 0:
        failed = max(1, failed)
        print(done.stdout)
    return {
        "passed": counts.get("passed", 0),
        "failed": failed,
        "skipped": counts.get("skipped", 0),
        "guests": int(guests[1]) if guests else 0,
        "seconds": round(time.monotonic() - started, 1),
    }


def merged_counts(guests: list[pathlib.Path], scratch: pathlib.Path) -> pathlib.Path:
    """One folder with the sums of all guests' .gcda files."""
    merged = guests[0]
    for number, guest in enumerate(guests[1:]):
        out = scratch / f"sum{number}"
        command = ["gcov-tool", "merge", "-o", out, merged, guest]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if merged.parent == scratch and merged.name.startswith("sum"):
            shutil.rmtree(merged)
        merged = out
    return merged


def executed_lines(build_folder: pathlib.Path, counts: pathlib.Path) -> dict[str, dict[int, int]]:
    """How often each line of a file of cpp/nvme was executed; lines without code are not there.

    What is inline is counted in any of the objects that have it, whichever the linker took.
    """
    objects = counts / str(build_folder).lstrip("/")
    lines: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for data in sorted(objects.rglob("*.gcda")):
        notes = (build_folder / data.relative_to(objects)).with_suffix(".gcno")
        shutil.copy(notes, data.with_suffix(".gcno"))
        command = ["gcov", "--json-format", "--stdout", str(data)]
        said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=build_folder)
        for file in json.loads(said.stdout)["files"]:
            path = pathlib.Path(build_folder, file["file"]).resolve()
            if not path.is_relative_to(ROOT / "cpp" / "nvme"):
                continue
            for line in file["lines"]:
                lines[str(path.relative_to(ROOT))][line["line_number"]] += line["count"]
    return lines


def covered(lines: dict[str, dict[int, int]], wanted: str, without: str = "") -> tuple[int, int]:
    """Lines that were executed, and all, of files whose path begins with `wanted`."""
    counts = [
        count
        for path, file in lines.items()
        if path.startswith(wanted) and not (without and path.startswith(without))
        for count in file.values()
    ]
    return sum(count > 0 for count in counts), len(counts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--rounds", type=int, help="power cuts, and as many kills (default 6; 2 with --quick)")
    parser.add_argument("--least", type=float, default=85.0, help="percent of lines (default 85)")
    parser.add_argument("--build", action="append", choices=tuple(BUILDS), help="may be repeated (default: both)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="of the builds")
    options = parser.parse_args()
    rounds = options.rounds or (2 if options.quick else 6)
    report = Report(options.json, machine_facts())
    failures = 0
    for name in options.build or BUILDS:
        folder = build(name, options.jobs)
        counts = folder / "guests"
        shutil.rmtree(counts, ignore_errors=True)
        environment = {"TARDIS_GUEST_COVERAGE": str(counts)} if name == "gcov" else SANITIZERS
        result = run_tests(folder, rounds, environment)
        failed = result.pop("failed")
        failures += failed
        report.add(
            "tests/qemu", f"-fsanitize={name}" if "," in name else name, result["guests"], failed, "failed", **result
        )
        if name == "gcov":
            scratch = folder / "guest-counts"
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            guests = sorted(guest for guest in counts.iterdir() if any(guest.rglob("*.gcda")))
            failures += report_lines(report, executed_lines(folder, merged_counts(guests, scratch)), options.least)
    print(f"{failures} failures")
    return 1 if failures else 0


def report_lines(report: Report, lines: dict[str, dict[int, int]], least: float) -> int:
    """Rows about lines; 1 if too few of them were executed."""
    files = {}
    for path in sorted(lines):
        done, all_ = covered(lines, path)
        missing = sorted(number for number, count in lines[path].items() if count == 0)
        files[path] = {"lines": all_, "executed": done, "not_executed": missing}
        if not path.startswith(SOFTWARE):
            print(f"  {path:40s} {done:5d} of {all_:5d}  {100 * done / all_:5.1f} %")
    done, all_ = covered(lines, "cpp/nvme/", SOFTWARE)
    percent = 100 * done / all_
    report.add("lines executed in guests", "cpp/nvme without soft", all_, percent, "%", 100.0, executed=done)
    done, all_ = covered(lines, "cpp/nvme/vfio/")
    report.add("lines executed in guests", "cpp/nvme/vfio", all_, 100 * done / all_, "%", 100.0, executed=done)
    report.note(files={path: facts for path, facts in files.items() if not path.startswith(SOFTWARE)})
    if percent < least:
        print(f"expected at least {least} % of the lines of cpp/nvme to be executed, found {percent:.1f} %")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
