# SPDX-License-Identifier: Apache-2.0
"""usage: wheel_smoke.py VERSION

Uses an installed wheel in an environment that has nothing else: the command, the doctor, pages stored by one opening of
a store and read back by the next. VERSION is the Python that must be running, such as 3.12.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from importlib import metadata

import numpy as np
import sglang_tardis
from sglang_tardis.store import ObjectLayout, Store, StoreOptions, inspect, verify

PAGES, PARTS, REGION = 32, 4, 8192
LAYOUT = ObjectLayout(PARTS, (REGION, REGION))
OPTIONS = StoreOptions(capacity_bytes=64 << 20, free_space_floor=0)


def expect(what: str, found: object, wanted: object) -> None:
    """End the program if the two differ (assert would vanish under -O)."""
    if found != wanted:
        sys.exit(f"{what}: expected {wanted!r}, found {found!r}")


def tardis(*argv: str) -> str:
    """What the installed command prints; a failing one ends the program."""
    result = subprocess.run([f"{sys.prefix}/bin/tardis", *argv], capture_output=True, text=True, check=False)
    expect(f"exit status of tardis {argv[0]} ({result.stdout} {result.stderr})", result.returncode, 0)
    return result.stdout


def round_trip(folder: str) -> str:
    """Store pages, open the store again, read them back; returns the engine that did it."""
    rng = np.random.default_rng(7)
    stored = rng.integers(0, 256, (PAGES, PARTS, 2, REGION), dtype=np.uint8)
    loaded = np.zeros_like(stored)
    hashes = rng.integers(0, 256, (PAGES, 32), dtype=np.uint8)
    steps = np.arange(PAGES * PARTS * 2, dtype=np.uint64).reshape(PAGES, -1) * np.uint64(REGION)
    with Store(folder, OPTIONS) as store:
        space = store.namespace(b"n" * 16, "{}", LAYOUT)
        expect("pages stored", int(space.set(hashes, stored.ctypes.data + steps).sum()), PAGES)
        store.flush()
    with Store(folder, OPTIONS) as store:
        space = store.namespace(b"n" * 16, "{}", LAYOUT)
        expect("pages found again", space.lookup(hashes), PAGES)
        expect("pages read back", int(space.get(hashes, loaded.ctypes.data + steps).sum()), PAGES)
        engine = store.path_report()["engine"]
    expect("bytes read back are those stored", bool((loaded == stored).all()), True)
    return engine


def main(version: str) -> None:
    """Run every step; prints one line."""
    expect("Python", ".".join(platform.python_version_tuple()[:2]), version)
    installed = {distribution.metadata["Name"].lower() for distribution in metadata.distributions()}
    expect("packages installed", installed, {"sglang-tardis", "msgspec", "numpy"})
    expect("tardis --version", tardis("--version"), f"tardis {sglang_tardis.__version__}\n")
    expect("a usage text", "COMMAND" in tardis("--help"), True)
    folder = tempfile.mkdtemp() + "/store"
    engine = round_trip(folder)
    report, problems = verify(folder)
    expect("problems found", problems, [])
    expect("pages verified", report["objects"], PAGES)
    expect("pages counted", inspect(folder)["objects"], PAGES)
    expect("tardis info", json.loads(tardis("info", folder, "--json"))["objects"], PAGES)
    doctor = json.loads(tardis("doctor", folder, "--json"))
    expect("doctor's judgement", doctor["usable"], True)
    expect("doctor on SGLang", [one["status"] for one in doctor["findings"] if one["name"] == "SGLang"], ["note"])
    libc = " ".join(platform.libc_ver())
    print(
        f"Python {platform.python_version()}, {libc}: help, info, doctor, {PAGES} pages stored and read back ({engine})"
    )


if __name__ == "__main__":
    main(sys.argv[1])
