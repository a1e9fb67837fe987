# SPDX-License-Identifier: Apache-2.0
"""`tardis doctor`: which path a server on this machine would use for its I/O, and why."""

from __future__ import annotations

import argparse
import ctypes
import errno
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import msgspec

from .. import __version__
from ..config import ENVIRONMENT_VARIABLE, ConfigError, TardisConfig, load_config
from .doctor_nvme import examine_nvme
from .doctor_storage import Finding, examine_storage
from .errors import EXIT_OK, EXIT_PROBLEMS
from .render import human_bytes, printable

_SEAMS_TIMEOUT_SECONDS = 300
_SEAMS_MARK = "tardis-doctor-seams "
_SEAMS_PROGRAM = f"""
import json
from sglang_tardis.sglang.plugin import check_seams
seams = [[seam.name, bool(seam.ok), str(seam.detail)] for seam in check_seams()]
print("\\n{_SEAMS_MARK}" + json.dumps(seams), flush=True)
"""
# Of the shared index (docs/on-disk-format.md): its tmpfs, what a page takes there at most, and docker's default size,
# which is too small for large stores.
_INDEX_FOLDER = "/dev/shm"
_INDEX_BYTES_PER_PAGE = 96
_LITTLE_SHARED_MEMORY = 64 << 20
_IO_URING_SETUP = 425  # the same number on every architecture


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "doctor",
        help="find out how I/O will be done, and why",
        description="Test the storage path and what surrounds it. Writes and removes one small file in each folder; "
        "starts no server. Exit status: 0 usable, 1 a problem was found.",
    )
    parser.add_argument("path", nargs="?", metavar="PATH", help="folder of the store; by default the configured one")
    parser.add_argument("--json", action="store_true", help="print the findings as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the findings as they come."""
    findings = []
    for finding in examine(args.path):
        findings.append(finding)
        if not args.json:
            print(f"{finding.status:8} {finding.name:20} {printable(finding.detail)}", flush=True)
    usable = all(finding.status != "problem" for finding in findings)
    if args.json:
        print(json.dumps({"usable": usable, "findings": msgspec.to_builtins(findings)}, indent=2))
    return EXIT_OK if usable else EXIT_PROBLEMS


def examine(path: str | None) -> Iterator[Finding]:
    """Everything that is looked at, in order."""
    yield Finding("tardis", "ok", f"{__version__} on Python {platform.python_version()}, Linux {platform.release()}")
    config, finding = _configuration(path)
    yield finding
    if config is not None:
        yield from examine_storage(config, further_are_known=path is None)
    yield _io_uring()
    yield _shared_memory()
    yield from examine_nvme(config.dram_bytes if config is not None else 0)
    yield _gpu()
    yield from _sglang()


def _configuration(path: str | None) -> tuple[TardisConfig | None, Finding]:
    try:
        config = load_config({"path": os.path.abspath(path)} if path is not None else None)
    except ConfigError as error:
        return None, Finding("configuration", "problem", str(error))
    source = (
        "PATH" if path is not None else ENVIRONMENT_VARIABLE if os.environ.get(ENVIRONMENT_VARIABLE) else "defaults"
    )
    further = "".join(f", spread over {folder} as well" for folder in config.more_paths)
    return config, Finding("configuration", "ok", f"store at {config.folder}{further} (from {source})")


def _io_uring() -> Finding:
    """Ask the kernel for a ring, the only way to see seccomp filters as well as settings."""
    libc = ctypes.CDLL(None, use_errno=True)
    parameters = ctypes.create_string_buffer(120)  # struct io_uring_params, zeroed
    ring = libc.syscall(ctypes.c_long(_IO_URING_SETUP), ctypes.c_uint(1), parameters)
    if ring >= 0:
        os.close(ring)
        return Finding("io_uring", "ok", "the kernel gives this process a ring")
    code = ctypes.get_errno()
    why = {
        errno.ENOSYS: "the kernel has no io_uring, or a sandbox hides it",
        errno.EPERM: "forbidden: a seccomp filter (containers) or the sysctl kernel.io_uring_disabled",
        errno.ENOMEM: "not enough lockable memory (ulimit -l)",
    }.get(code, os.strerror(code))
    return Finding("io_uring", "note", f"not available: {why}; a pool of threads does the I/O instead")


def _shared_memory(folder: str = _INDEX_FOLDER) -> Finding:
    """Where the processes of a store share its index."""
    try:
        space = os.statvfs(folder)
    except OSError as error:
        return Finding(folder, "problem", f"{error.strerror}; the index of a store in use lives there: mount a tmpfs")
    if not os.access(folder, os.W_OK | os.X_OK):
        return Finding(folder, "problem", "not writable by this user; the index of a store in use lives there")
    size, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    text = (
        f"{human_bytes(free)} free of {human_bytes(size)}: room for the index of about "
        f"{free // _INDEX_BYTES_PER_PAGE:,} pages of a store in use"
    )
    if free < _LITTLE_SHARED_MEMORY:
        return Finding(folder, "note", f"{text}; a large store needs more (docker: --shm-size), torch and NCCL as well")
    return Finding(folder, "ok", text)


def _gpu() -> Finding:
    """What the drivers say; torch is not asked, because it need not be installed."""
    names = []
    for information in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        try:
            lines = information.read_text(errors="replace").splitlines()
        except OSError:
            continue
        names += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    if names:
        return Finding("GPU", "ok", f"{len(names)}: {', '.join(sorted(set(names)))}")
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return Finding("GPU", "ok", "NVIDIA device present (the driver does not tell its name here)")
    if Path("/dev/kfd").exists():
        return Finding("GPU", "note", "AMD device present; tardis has not been tested with it")
    return Finding("GPU", "note", "none found; the store does not need one, SGLang usually does")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _sglang() -> Iterator[Finding]:
    version = _version("sglang")
    if version is None:
        yield Finding("SGLang", "note", "not installed in this Python environment")
        return
    yield Finding("SGLang", "ok", f"{version}, torch {_version('torch') or 'not installed'}")
    # In another process: importing SGLang is slow, prints, and must not be able to take this command down with it.
    try:
        result = subprocess.run(
            [sys.executable, "-c", _SEAMS_PROGRAM],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SEAMS_TIMEOUT_SECONDS,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield Finding("seams", "problem", f"SGLang did not finish importing within {_SEAMS_TIMEOUT_SECONDS} s")
        return
    lines = [line for line in result.stdout.splitlines() if line.startswith(_SEAMS_MARK)]
    if result.returncode or not lines:
        tail = (result.stderr.strip() or "no output").splitlines()[-1]
        yield Finding("seams", "problem", f"could not be checked (exit status {result.returncode}): {tail[:300]}")
        return
    for name, ok, detail in json.loads(lines[-1][len(_SEAMS_MARK) :]):
        yield Finding(f"seam {name}", "ok" if ok else "problem", detail)
