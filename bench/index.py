# SPDX-License-Identifier: Apache-2.0
"""The index: lookups from Python over a store of real objects, and synthetic entries by the million in the core alone.

Over a real store in --folder (its pages are the smallest there are: one 4 KiB slot each):

lookup           one Namespace.lookup of 128 SGLang page keys (strings), chains chosen at random; conversion included
open, rescan     opening without a checkpoint: every header table is read (the page cache is dropped where we may)
open, checkpoint the same store after a clean close

Synthetic entries, by the program tardis_index_bench of a build with TARDIS_TESTS=ON: insertions and lookups on one
core, bytes of shared memory for each object, and a checkpoint written, dropped from the page cache and loaded.
Limits are what this index promises, not what the machine could do: 60 us for a lookup of 128 strings over a million
objects, 5 million keys a second on one core, 96 bytes an object, 200 us (p99) and 10 s for 50 million entries.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import numpy as np
from common import Report, add_common_arguments, is_memory, machine_facts
from sglang_tardis.bridge.keys import block_hashes
from sglang_tardis.store import Namespace, ObjectLayout, Store, StoreOptions
from store_throughput import drop_page_cache

PAGE = 4096
CHAIN = 128
LAYOUT = ObjectLayout(1, (PAGE,))
FINGERPRINT = b"index-benchmark!"
GIB = 1 << 30


def page_keys(chain: int) -> list[str]:
    """128 keys as SGLang writes them: 64 lower-case hexadecimal digits."""
    return np.random.default_rng(chain).bytes(32 * CHAIN).hex("\n", 32).split("\n")


def open_store(folder: pathlib.Path, objects: int) -> tuple[Store, Namespace]:
    """The store under test, large enough that nothing is evicted."""
    options = StoreOptions(capacity_bytes=2 * GIB + objects * PAGE * 6 // 5, object_bytes_hint=PAGE, free_space_floor=0)
    store = Store(folder, options)
    return store, store.namespace(FINGERPRINT, "{}", LAYOUT)


def percentile(times: list[float], share: float) -> float:
    """The value below which `share` of the times lie."""
    return sorted(times)[min(len(times) - 1, int(len(times) * share))]


def real_store(report: Report, folder: pathlib.Path, objects: int, calls: int) -> None:
    """Fill a store, look keys up, and open it again both ways."""
    chains = max(1, objects // CHAIN)
    size, where = f"{chains * CHAIN} objects", "tmpfs" if is_memory(folder) else "disk"
    page = np.random.default_rng(7).integers(0, 256, PAGE, dtype=np.uint8)
    pieces = np.full((CHAIN, 1), page.ctypes.data, dtype=np.uint64)
    store, space = open_store(folder, objects)
    with store:
        for chain in range(chains):
            if not space.set(block_hashes(page_keys(chain)), pieces).all():
                raise SystemExit(f"chain {chain}: not stored: {store.last_problem}")
        random = np.random.default_rng(3)
        times = []
        for chain in random.integers(0, chains, calls).tolist():
            keys = page_keys(chain)
            started = time.perf_counter()
            found = space.lookup(block_hashes(keys))
            times.append((time.perf_counter() - started) * 1e6)
            if found != CHAIN:
                raise SystemExit(f"chain {chain}: {found} of {CHAIN} pages found")
        report.add("lookup of 128 strings, p50", "tardis", size, percentile(times, 0.50), "us", None)
        report.add("lookup of 128 strings, p99", "tardis", size, percentile(times, 0.99), "us", 60.0)
    (folder / "index.checkpoint").unlink()
    for case in ("open, rescan", "open, checkpoint"):
        drop_page_cache()
        started = time.perf_counter()
        store, space = open_store(folder, objects)
        seconds = time.perf_counter() - started
        scanned, recovered = (store.stats()[name] for name in ("recovered_scanned", "recovered_pages"))
        if recovered != chains * CHAIN or (scanned == 0) == (case == "open, rescan"):
            raise SystemExit(f"{case}: {recovered} pages, {scanned} segments scanned")
        report.add(case, f"tardis on {where}", size, seconds, "s", None)
        report.add(f"{case}, objects a second", f"tardis on {where}", size, recovered / seconds, "1/s", None)
        store.close()


def synthetic(report: Report, program: pathlib.Path, shared: str, folder: pathlib.Path, objects: int) -> None:
    """One run of tardis_index_bench."""
    done = subprocess.run([program, shared, folder, str(objects)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{program.name}: {done.stderr.strip()}")
    result, size = json.loads(done.stdout), f"{objects} entries"
    million = objects <= 1_000_000
    where = "tmpfs" if is_memory(folder) else "disk"
    report.add("insert, one core", "core", size, result["inserts_per_second"] / 1e6, "M/s", None)
    report.add(
        "lookup, one core", "core", size, result["lookup_keys_per_second"] / 1e6, "M/s", 5.0 if million else None
    )
    report.add("lookup of 128, p99", "core", size, result["batch_p99_us"], "us", None if million else 200.0)
    report.add("index bytes an object", "core", size, result["bytes_per_object"], "B", 96.0)
    report.add("checkpoint write", f"core, {where}", size, result["checkpoint_write_seconds"], "s", None)
    load = result["checkpoint_load_seconds"]
    report.add("checkpoint load", f"core, {where}", size, load, "s", None if million else 10.0, **result)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="where the store and checkpoints go")
    parser.add_argument("--shared", default="/dev/shm", help="where the synthetic index goes (a tmpfs)")
    parser.add_argument("--program", type=pathlib.Path, help="tardis_index_bench; by default of TARDIS_BUILD_DIR")
    parser.add_argument("--objects", type=int, help="objects of the real store; 0: leave it out")
    parser.add_argument("--entries", type=int, nargs="*", help="synthetic entries")
    arguments = parser.parse_args()
    build = os.environ.get("TARDIS_BUILD_DIR")
    program = arguments.program or (pathlib.Path(build) / "cpp/tests/tardis_index_bench" if build else None)
    entries = [100_000] if arguments.quick else [1_000_000, 50_000_000]
    entries = entries if arguments.entries is None else arguments.entries
    objects = (20_000 if arguments.quick else 1_000_000) if arguments.objects is None else arguments.objects
    arguments.folder.mkdir(parents=True, exist_ok=True)
    report = Report(arguments.json, machine_facts(arguments.folder, arguments.shared))
    folder = arguments.folder / f"index-{os.getpid()}"
    folder.mkdir()
    try:
        if objects:
            real_store(report, folder / "store", objects, 2_000 if arguments.quick else 20_000)
        if entries and program is None:
            print("no tardis_index_bench (--program or TARDIS_BUILD_DIR): synthetic entries left out", file=sys.stderr)
        for count in entries if program else ():
            synthetic(report, program, arguments.shared, folder, count)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
