# SPDX-License-Identifier: Apache-2.0
"""What the benchmark scripts share: facts about the machine, the options `--quick` and `--json`, and the result file.

A result file is one JSON object::

    {"machine": {...}, "command": "...", "rows": [{"case", "system", "size", "value", "unit", "limit", "ratio", ...}]}

`value` is what was measured, `limit` the best the same machine could do at that (measured in the same run where the
script can; null where there is no meaningful one), `ratio` how near the value comes to the limit: 1.0 is at the limit,
for times limit / value, for rates value / limit. Further keys of a row are named by the script that writes it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

PACKAGES = ("sglang-tardis", "sglang", "sglang-kernel", "torch", "transformers", "triton", "numpy")
# Units in which less is better; a ratio is limit / value for these.
TIME_UNITS = frozenset({"ms", "s", "us"})


def _first_line(path: str, key: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                if line.startswith(key):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return None


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _mount(folder: str | os.PathLike) -> tuple[str, list[str]]:
    """Type of the file system that holds `folder` and its options; "unknown" if /proc does not say."""
    real = os.path.realpath(folder)
    best, kind, given = "", "unknown", ""
    try:
        with open("/proc/self/mounts", encoding="utf-8") as mounts:
            for line in mounts:
                _, mount, fstype, options, *_ = line.split()
                mount = mount.replace("\\040", " ")
                inside = real == mount or real.startswith(mount.rstrip("/") + "/")
                if inside and len(mount) >= len(best):
                    best, kind, given = mount, fstype, options
    except OSError:
        pass
    return kind, given.split(",")


def file_system(folder: str | os.PathLike) -> str:
    """Type of the file system that holds `folder`, for example "ext4" or "tmpfs"."""
    return _mount(folder)[0]


def file_system_facts(folder: str | os.PathLike) -> str:
    """The same, and for a tmpfs what its pages are if not small ones: first reads depend on it."""
    kind, options = _mount(folder)
    return ", ".join([kind, *(option for option in options if option.startswith("huge="))])


def is_memory(folder: str | os.PathLike) -> bool:
    """True where "disk" numbers are memory numbers: the folder lies on tmpfs or ramfs."""
    return file_system(folder) in ("tmpfs", "ramfs")


def gpu_query(what: str, fields: str) -> list[list[str]]:
    """Lines of nvidia-smi; none where there is no GPU."""
    text = _output(["nvidia-smi", f"--query-{what}={fields}", "--format=csv,noheader,nounits"]) or ""
    return [line.split(", ") for line in text.splitlines()]


def machine_facts(*folders: str | os.PathLike) -> dict[str, Any]:
    """Hardware, kernel, driver and package versions, and the file system of each folder. Imports no package."""
    facts: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpu": _first_line("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _first_line("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {},
        "file_systems": {str(folder): file_system_facts(folder) for folder in folders},
    }
    for name in PACKAGES:
        try:
            facts["packages"][name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    gpu = _output(
        [
            "nvidia-smi",
            "--query-gpu=name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max",
            "--format=csv,noheader",
        ]
    )
    facts["gpu"] = gpu.splitlines() if gpu else None
    if gpu:
        banner = _output(["nvidia-smi"]) or ""
        facts["cuda_driver"] = next(
            (x.split("CUDA Version:")[1].split()[0] for x in banner.splitlines() if "CUDA Version:" in x), None
        )
    return facts


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that every benchmark script has."""
    parser.add_argument(
        "--quick", action="store_true", help="fewer repetitions and smaller sizes: a check that it works"
    )
    parser.add_argument(
        "--json", type=pathlib.Path, metavar="FILE", help="write the results there, again after each row"
    )


def add_program_argument(parser: argparse.ArgumentParser, name: str) -> None:
    """Add --program: a native test program, by default the one in TARDIS_BUILD_DIR or build/native."""
    root = pathlib.Path(__file__).resolve().parent.parent
    builds = [pathlib.Path(build) for build in (os.environ.get("TARDIS_BUILD_DIR"), root / "build" / "native") if build]
    programs = [build / "cpp" / "tests" / name for build in builds]
    found = next((program for program in programs if program.exists()), None)
    parser.add_argument("--program", type=pathlib.Path, default=found, help=f"{name} (default: of `make test`)")


def required_program(parser: argparse.ArgumentParser, program: pathlib.Path | None, name: str) -> pathlib.Path:
    """What --program says; ends the script if there is none."""
    if program is None:
        parser.error(f"{name} was not found: build with -DTARDIS_TESTS=ON and name it with --program")
    return program


def run_program(command: Sequence[str | pathlib.Path], on_row: Callable[[dict[str, Any]], None]) -> int:
    """Run a program that prints a JSON object a line: `on_row` gets each as it comes, other lines are printed.

    Returns its exit status.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                on_row(json.loads(line))
            else:
                print(line, end="", flush=True)
    return process.returncode


def add_store_arguments(parser: argparse.ArgumentParser, what: str) -> None:
    """Options of programs that move pages between a GPU and a store; `what` they move them by."""
    parser.add_argument("--shared", type=pathlib.Path, default="/dev/shm", help="a folder for the store")
    parser.add_argument("--pages", type=int, help=f"of a {what}, 64 or more; default: 512, with --quick 128")
    parser.add_argument("--threads", type=int, default=12, help="of the software controller, 1 to 12")


def add_program_row(report: Report, row: dict[str, Any]) -> None:
    """A line of a program that prints rows, as one of the report."""
    names = ("case", "system", "size", "value", "unit")
    extra = {name: value for name, value in row.items() if name not in (*names, "limit")}
    report.add(*(row[name] for name in names), row.get("limit"), **extra)


class Outcome:
    """Checks that failed."""

    def __init__(self, report: Report) -> None:
        self.report, self.failed = report, 0

    def expect(self, good: bool, what: str, found: object = "") -> None:
        """Print and count what is not so."""
        if not good:
            self.failed += 1
            print(f"FAILED {what}: {found}", flush=True)


def run_check(report: Report, case: str, system: str, unit: str, *command: str | pathlib.Path) -> int:
    """Run a check that ends with its number of failures, which becomes a row; returns its exit status.

    Args:
        unit: of what the command's second word counts.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, sep="", end="", flush=True)
    lines = done.stdout.splitlines()
    if done.returncode in (0, 1) and lines and lines[-1].endswith("failures"):
        wrong = int(lines[-1].split()[0])
        report.add(case, system, f"{command[1]} {unit}", wrong, "wrong", output=lines)
    return done.returncode


def machine_limits(folder: pathlib.Path, gpu: bool) -> dict[str, float]:
    """Rates of this machine that bound a restore; from a process of its own, so that nothing of it stays.

    Raises:
        RuntimeError: it failed; the message says how.
    """
    script = pathlib.Path(__file__).resolve().parent / "machine_limits.py"
    command = [sys.executable, str(script), "--folder", str(folder), *(["--gpu"] if gpu else ["--mib", "256"])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    except subprocess.SubprocessError as error:
        raise RuntimeError(f"machine_limits.py: {error} {str(getattr(error, 'stderr', ''))[-500:]}") from error
    return json.loads(done.stdout.splitlines()[-1])


class ServedModel:
    """Base of profiles with a field `model`, the folder of a model: what its config.json says."""

    model: pathlib.Path

    @property
    def shape(self) -> dict[str, Any]:
        """The whole of config.json."""
        return json.loads((self.model / "config.json").read_text(encoding="utf-8"))

    @property
    def token_bytes(self) -> int:
        """Bytes of KV a token (bf16)."""
        shape = self.shape
        return 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * 2


class Report:
    """The result table: rows are printed and, with a file, written as they come, so that a cut run leaves them."""

    def __init__(self, file: pathlib.Path | None, machine: dict[str, Any], **extra: Any) -> None:
        self.file, self.machine, self.extra = file, machine, extra
        self.command = shlex.join([pathlib.Path(sys.executable).name, *sys.argv])
        self.rows: dict[tuple, dict[str, Any]] = {}
        self.save()

    def add(
        self, case: str, system: str, size: Any, value: float, unit: str, limit: float | None = None, **extra: Any
    ) -> dict[str, Any]:
        """Add one row; a row of the same case, system and size is replaced."""
        ratio = None
        if limit and (value or unit not in TIME_UNITS):
            ratio = round(limit / value if unit in TIME_UNITS else value / limit, 3)
        row = {
            "case": case,
            "system": system,
            "size": size,
            "value": round(value, 3),
            "unit": unit,
            "limit": None if limit is None else round(limit, 3),
            "ratio": ratio,
            **extra,
        }
        self.rows[case, system, str(size)] = row
        bound = "" if ratio is None else f"  limit {limit:9.2f}  ratio {ratio:5.2f}"
        print(f"{case:28s} {system:24s} {size!s:>8s} {value:10.2f} {unit:5s}{bound}", flush=True)
        self.save()
        return row

    def note(self, **extra: Any) -> None:
        """Add keys beside the rows, for example server flags."""
        self.extra.update(extra)
        self.save()

    def save(self) -> None:
        """Write the file through a rename, so that a reader never sees half of it."""
        if self.file is None:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        content = {"machine": self.machine, "command": self.command, "rows": list(self.rows.values()), **self.extra}
        partial = self.file.with_name(self.file.name + ".partial")
        partial.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
        partial.replace(self.file)


def measure_by_program(
    document: str | None, name: str, add_row: Callable[[Report, dict[str, Any]], None]
) -> tuple[Report, int]:
    """Run a program of the test build that only knows --quick: `add_row` puts its rows into the report.

    Returns the report and the program's exit status.
    """
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    add_program_argument(parser, name)
    arguments = parser.parse_args()
    program = required_program(parser, arguments.program, name)
    report = Report(arguments.json, machine_facts())
    command = [str(program.absolute()), *(["--quick"] if arguments.quick else [])]
    return report, run_program(command, lambda row: add_row(report, row))
