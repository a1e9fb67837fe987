#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The NVMe driver in guests, built with gcov, and with AddressSanitizer and UBSan: all of tests/qemu, with more cuts.

Builds `tardis_nvme_guest` twice, runs the tests of tests/qemu against each, and adds up which lines of cpp/nvme guests
have executed. Rows: failed tests of each build (must be 0); each test on VFIO's character device and without an IOMMU,
where ``TARDIS_VFIO_KERNEL`` names a kernel of scripts/build-vfio-kernel (else they are skipped, which is said); and
the lines, in percent of those that a compiler made code for, of cpp/nvme without the software controller, of vfio and
of broker. The exit status is 1 if a test failed, or the percentage of cpp/nvme is below `--least`.
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
import xml.etree.ElementTree as ElementTree
from collections import defaultdict

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from common import Report, add_common_arguments, machine_facts

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOFTWARE = "cpp/nvme/soft/"  # never there in a guest
FOLDERS = {
    "cpp/nvme without soft": ("cpp/nvme/", SOFTWARE),
    "cpp/nvme/vfio": ("cpp/nvme/vfio/",),
    "cpp/nvme/broker": ("cpp/nvme/broker/",),
}
OTHER_WAYS = "test_vfio_modes"  # of VFIO
BUILDS = {
    "gcov": ["-DCMAKE_CXX_FLAGS=--coverage", "-DCMAKE_BUILD_TYPE=Debug"],
    "address,undefined": ["-DTARDIS_SANITIZE=address,undefined"],
}
# Which parts of an ASan report are of use where no debugger is: the guest has no symbolizer.
SANITIZERS = {"ASAN_OPTIONS": "abort_on_error=0:detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1"}


def build(name: str, jobs: int) -> pathlib.Path:
    """The build folder of `name`, with the guests' program in it."""
    folder = ROOT / "build" / f"guest-{name.partition(',')[0]}"
    kernel = os.environ.get("TARDIS_VFIO_KERNEL")
    headers = pathlib.Path(kernel).resolve() / "headers" / "include" if kernel else ""
    definitions = [*BUILDS[name], "-DTARDIS_TESTS=ON", "-DTARDIS_CUDA=OFF", f"-DTARDIS_KERNEL_HEADERS={headers}"]
    configure = ["cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", *definitions]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", folder, "-j", str(jobs), "--target", "tardis_nvme_guest"], check=True)
    return folder


def run_tests(
    folder: pathlib.Path, rounds: int, environment: dict[str, str]
) -> tuple[dict[str, object], list[ElementTree.Element]]:
    """All tests of tests/qemu: how many passed and failed, guests and seconds; and each test, as JUnit has it."""
    started = time.monotonic()
    cases = folder / "tests-qemu.xml"
    options = ["-q", "-rs", "--color=no", "-p", "no:cacheprovider", f"--junitxml={cases}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, ROOT / "tests" / "qemu"],
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
    guests = re.search(r"^qemu: (\d+) guests, (\d+) crashes", done.stdout, re.MULTILINE)
    failed = counts.get("failed", 0) + counts.get("error", 0)
    if done.returncode != 0:
        failed = max(1, failed)
        print(done.stdout)
    result = {
        "passed": counts.get("passed", 0),
        "failed": failed,
        "skipped": counts.get("skipped", 0),
        "guests": int(guests[1]) if guests else 0,
        "qemu_crashes": int(guests[2]) if guests else 0,
        "seconds": round(time.monotonic() - started, 1),
    }
    return result, list(ElementTree.parse(cases).iter("testcase"))


def report_other_ways(report: Report, build_name: str, cases: list[ElementTree.Element]) -> None:
    """A row for each test on another way of VFIO; the reason, once, if there was no kernel for them."""
    reasons = set()
    for case in cases:
        if OTHER_WAYS not in case.get("classname", ""):
            continue
        skipped = case.find("skipped")
        if skipped is not None:
            reasons.add(skipped.get("message", ""))
            continue
        failed = case.find("failure") is not None or case.find("error") is not None
        report.add(
            "VFIO's other ways", build_name, case.get("name"), int(failed), "failed", seconds=float(case.get("time"))
        )
    for reason in sorted(reasons):
        print(f"skipped: {reason}")


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
        build_name = f"-fsanitize={name}" if "," in name else name
        result, cases = run_tests(folder, rounds, environment)
        failed = result.pop("failed")
        failures += failed
        report.add("tests/qemu", build_name, result["guests"], failed, "failed", **result)
        report_other_ways(report, build_name, cases)
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
    percents = []
    for name, wanted in FOLDERS.items():
        done, all_ = covered(lines, *wanted)
        percents.append(100 * done / all_)
        report.add("lines executed in guests", name, all_, percents[-1], "%", 100.0, executed=done)
    percent = percents[0]
    report.note(files={path: facts for path, facts in files.items() if not path.startswith(SOFTWARE)})
    if percent < least:
        print(f"expected at least {least} % of the lines of cpp/nvme to be executed, found {percent:.1f} %")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
