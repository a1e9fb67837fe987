# SPDX-License-Identifier: Apache-2.0
"""usage: wheel_contents.py WHEEL [TRACE]...  (in the repository's root)

Checks that a wheel holds what the source tree says, and nothing of the machine that built it: no copied system
libraries, and none of the TRACEs (the folder of the sources, the host's name, the home folder). Prints one line of
facts; problems go to stderr, with exit status 1.
"""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

# Shorter ones ("/", "vm") would be found anywhere.
_SHORTEST_TRACE = 4


def contents(wheel: Path) -> dict[str, bytes]:
    """Every file of the wheel, by its name in it."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def binaries(files: dict[str, bytes]) -> list[str]:
    """Names of the shared libraries."""
    return sorted(name for name in files if ".so" in PurePosixPath(name).suffixes)


def problems(files: dict[str, bytes], traces: Sequence[str], source: Path) -> Iterator[str]:
    """What is wrong with a wheel's files, a line each."""
    for module in sorted((source / "python").rglob("*.py")):
        name = module.relative_to(source / "python").as_posix()
        if files.get(name) != module.read_bytes():
            yield f"{name}: missing, or not as in the source tree"
    for patch in sorted((source / "patches").rglob("*.patch")):
        if patch.read_bytes() not in files.values():
            yield f"{patch.relative_to(source).as_posix()}: missing, or not as in the source tree"
    libraries = binaries(files)
    for wanted in ("libtardis.so", "_core."):
        if not any(PurePosixPath(name).name.startswith(wanted) for name in libraries):
            yield f"{wanted}: missing; shared libraries are {libraries}"
    for name in libraries:
        if not name.startswith("sglang_tardis/"):
            yield f"{name}: a library of this machine was copied in"
    if not any("/licenses/" in name for name in files):
        yield "no licence file"
    for trace in dict.fromkeys(traces):
        if len(trace) < _SHORTEST_TRACE or trace == "localhost":
            continue
        for name, content in files.items():
            if trace.encode() in content:
                yield f"{name}: contains {trace!r} of this machine"


def main(argv: Sequence[str]) -> int:
    """Check the wheel named first."""
    wheel, *traces = argv
    files = contents(Path(wheel))
    found = list(problems(files, traces, Path.cwd()))
    for problem in found:
        print(problem, file=sys.stderr)
    sizes = ", ".join(f"{PurePosixPath(name).name} {len(files[name]):,} B" for name in binaries(files))
    print(f"{len(files)} files, {Path(wheel).stat().st_size:,} B packed ({sizes})")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
