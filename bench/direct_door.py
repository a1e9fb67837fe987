# SPDX-License-Identifier: Apache-2.0
"""The direct door without a server, on a GPU: checks first, then what loads and offloads take.

Pages go from pools of random bytes to the pinned tier and a store's files, and come back to other pages,
which hold poison before. A second stream reads each layer behind `LayerCounter.wait_until`, as a model does, and what
it read is compared besides all bytes of the pools. The drive's part is played by the software controller, over files.

checks     loads from memory, from files, of both, several at once and split; aborts; damaged bytes; a deadline that
           passes, and queue pairs made anew; with offloads on their way beside them
timing     GB/s and host time of loads and offloads; the limit is a pinned copy by a copy engine, in the same run

Without a GPU (--device cpu) the checks alone, with small pools.
"""

from __future__ import annotations

import argparse
import hashlib
import pathlib
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch
from common import Outcome, Report, add_common_arguments, machine_facts
from corrupt import flip_signs, stored_pages
from sglang_tardis.direct_door import DirectDoor, DoorOptions, LoadBatch
from sglang_tardis.kv_pools import KvPools
from sglang_tardis.layer_counter import LayerCounter
from sglang_tardis.store import ObjectLayout, Store, StoreOptions

SKIPPED = 77
PARTS = ("checks", "timing")
TOKENS = 16  # of a page; rows are as wide as a page asks for
POISON = 0x5A
FINGERPRINT = hashlib.sha256(b"bench/direct_door.py").digest()[:16]


class Rig:
    """Pools, a store and a door. Page i of the prompt is page i of the pools until `forget`.

    Args:
        layers, key_bytes, value_bytes: of a page in a layer; value_bytes 0: one buffer, as MLA has it.
        pages: of the pools.
        slots: of the tier.
    """

    def __init__(
        self,
        device: str,
        folder: pathlib.Path,
        *,
        layers: int,
        key_bytes: int,
        value_bytes: int,
        pages: int,
        slots: int,
        threads: int = 1,
        deadline_ms: int = 5000,
        seed: int = 0,
    ) -> None:
        self.folder, self.device, self.pages = folder, torch.device(device), pages
        self.generator = torch.Generator(device=self.device).manual_seed(seed)
        sides = [key_bytes] + [value_bytes] * (value_bytes > 0)
        self.buffers = [
            [torch.zeros(pages * TOKENS, 1, size // TOKENS, dtype=torch.uint8, device=device) for size in sides]
            for _ in range(layers)
        ]
        values = [layer[1] for layer in self.buffers] if value_bytes else None
        self.pools = KvPools([layer[0] for layer in self.buffers], values, page_tokens=TOKENS)
        self.layout = self.pools.layout()
        self.store = Store(folder, StoreOptions(object_bytes_hint=self.layout.object_bytes, free_space_floor=0))
        regions = tuple(sides)
        self.namespace = self.store.namespace(FINGERPRINT, "{}", ObjectLayout(layers, regions))
        self.forward = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        dram = slots * self.layout.object_bytes
        queues = min(threads, 12)
        options = DoorOptions(dram, dram, threads=threads, queues=queues, deadline_ms=deadline_ms)
        self.door = DirectDoor(self.store, self.namespace, self.pools, self.layout, options, self.forward)
        self.counter = LayerCounter(layers)
        self.wanted: list[list[torch.Tensor]] = []  # rows of the prompt's pages, in HBM

    def fill(self, pages: int) -> None:
        """Random bytes in the first pages of the pools, remembered."""
        for layer in self.buffers:
            for buffer in layer:
                buffer.random_(0, 256, generator=self.generator)
        self.wanted = [[self.rows(buffer)[:pages].clone() for buffer in layer] for layer in self.buffers]

    def rows(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.view(self.pages, -1)

    def poison(self) -> None:
        for layer in self.buffers:
            for buffer in layer:
                buffer.fill_(POISON)

    def indices(self, places: list[int]) -> torch.Tensor:
        """Token slots of pages."""
        first = torch.tensor(places, dtype=torch.int64, device=self.device)[:, None] * TOKENS
        return (first + torch.arange(TOKENS, device=self.device)).reshape(-1)

    def slots(self, places: list[int] | torch.Tensor) -> torch.Tensor:
        """Token slots of pages, or those that were made before."""
        return places if isinstance(places, torch.Tensor) else self.indices(places)

    def offload(self, hashes: np.ndarray, places: list[int] | torch.Tensor) -> None:
        def ready() -> list[torch.cuda.Event]:
            event = torch.cuda.Event()
            event.record()
            return [event]

        self.door.offload(self.namespace, hashes, self.slots(places), ready)

    def settle(self) -> list[bool]:
        """Wait until every offload is copied; their results."""
        self.door.behind.drain()
        return [self.door.behind.pop() for _ in range(self.door.behind.num_completed())]

    def load(self, hashes: np.ndarray, places: list[int] | torch.Tensor, *, hides: bool = False) -> LoadBatch:
        queued = self.door.queue(self.namespace, hashes, self.slots(places))
        return self.door.start(self.namespace, [queued], hides=hides)

    def read(self, batch: LoadBatch, places: list[int]) -> list[list[torch.Tensor]]:
        """What a model would read of each layer, behind the counter's waits."""
        index = self.counter.add(batch)
        self.counter.set_consumer(index)
        with torch.cuda.stream(self.forward):
            if self.forward is not None:
                self.forward.wait_stream(torch.cuda.default_stream(self.device))
            chosen = torch.tensor(places, device=self.device)
            seen = []
            for layer, buffers in enumerate(self.buffers):
                self.counter.wait_until(layer)
                seen.append([self.rows(buffer)[chosen] for buffer in buffers])
        self.counter.set_consumer(-1)
        self.counter.remove(index)
        return seen

    def differs(self, places: list[int], which: list[int], seen: list[list[torch.Tensor]] | None = None) -> int:
        """Buffers of which a byte is wrong: pages of the prompt, `which`, at `places`, and poison everywhere else."""
        wrong = 0
        at, of = torch.tensor(places, device=self.device), torch.tensor(which, device=self.device)
        for layer, buffers in enumerate(self.buffers):
            for side, buffer in enumerate(buffers):
                expected = torch.full_like(self.rows(buffer), POISON)
                expected[at] = self.wanted[layer][side][of]
                wrong += not torch.equal(self.rows(buffer), expected)
                if seen is not None:
                    wrong += not torch.equal(seen[layer][side], self.wanted[layer][side][of])
        return wrong

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        self.door.close()
        self.store.close()


SHAPES = {
    "K and V of 16 KiB in 8 layers": dict(layers=8, key_bytes=16384, value_bytes=16384),
    "MLA of 36 KiB in 3 layers": dict(layers=3, key_bytes=36864, value_bytes=0),
    "K and V of 128 KiB in 32 layers": dict(layers=32, key_bytes=131072, value_bytes=131072),
}


def hashes_of(pages: int, seed: int) -> np.ndarray:
    keys = b"".join(hashlib.sha256(f"{seed}/{page}".encode()).digest() for page in range(pages))
    return np.frombuffer(keys, np.uint8).reshape(pages, 32)


def check_round_trips(outcome: Outcome, rig: Rig, name: str, rounds: int, pages: int) -> None:
    """Loads whose pages are in memory, in files or in both, while other pages are offloaded."""
    random = np.random.default_rng()
    hashes = hashes_of(pages, 1)
    rig.fill(pages)
    rig.offload(hashes[: pages // 2], list(range(pages // 2)))
    rig.offload(hashes[pages // 2 :], list(range(pages // 2, pages)))
    outcome.expect(rig.settle() == [True, True], f"{name}: offloads")
    rig.store.flush()
    outcome.expect(rig.namespace.lookup(hashes) == pages, f"{name}: stored", rig.namespace.lookup(hashes))
    aside = hashes_of(4, 2)
    wrong = unlike = 0
    for number in range(rounds):
        absent = random.permutation(pages)[: (0, pages, pages // 2, 3)[number % 4]]
        rig.door.tier.erase(rig.namespace.handle, np.ascontiguousarray(hashes[np.sort(absent)]))
        rig.poison()
        some = int(random.integers(1, pages + 1))
        places = random.permutation(rig.pages)[:some].tolist()
        if number % 8 == 4:  # of which all are in memory: one run, or few
            first = int(random.integers(0, rig.pages - some + 1))
            places = list(range(first, first + some))
        hides = number % 16 == 4
        ways = rig.door.state()
        batch = rig.load(np.ascontiguousarray(hashes[:some]), places, hides=hides)
        if hides and rig.device.type == "cuda":
            by_movers = rig.door.state()["loads_by_movers"] - ways["loads_by_movers"]
            outcome.expect(by_movers == 1, f"{name}: a load beside compute", by_movers)
        if number % 3 == 0:
            others = [page for page in range(rig.pages) if page not in set(places)][:4]
            if len(others) == 4:  # poison, on its way out beside the load
                rig.door.tier.erase(rig.namespace.handle, aside)
                rig.offload(aside, others)
        seen = rig.read(batch, places)
        unlike += not batch.finish()
        rig.synchronize()
        wrong += rig.differs(places, list(range(some)), seen) > 0
        rig.settle()
        rig.synchronize()
        restore(rig, hashes, pages)
    outcome.expect(wrong == 0 and unlike == 0, f"{name}: loads", (wrong, unlike))
    state = rig.door.state()
    outcome.expect(state["dram_pinned"] == state["loads_under_way"] == 0, f"{name}: what is left", state)
    if rig.device.type == "cuda":
        ways = state["loads_by_copy_engine"], state["loads_by_movers"]
        outcome.expect(min(ways) > 0, f"{name}: loads by copy engines and by movers", ways)
    outcome.report.add(f"loads: {name}", "files of a store", rounds, wrong + unlike, "wrong")


def restore(rig: Rig, hashes: np.ndarray, pages: int) -> None:
    """All pages are in the tier again."""
    for layer, buffers in enumerate(rig.buffers):
        for side, buffer in enumerate(buffers):
            rig.rows(buffer)[:pages] = rig.wanted[layer][side]
    rig.offload(hashes, list(range(pages)))
    rig.settle()


def check_many_at_once(outcome: Outcome, rig: Rig, pages: int) -> None:
    """More loads in flight than boards; loads that are split; finished in another order."""
    hashes = hashes_of(pages, 1)
    rig.poison()
    engine = rig.door.engine
    before = engine.most_file_pages, engine.most_pinned_pages
    engine.most_file_pages, engine.most_pinned_pages = 3, 5
    rig.door.tier.erase(rig.namespace.handle, np.ascontiguousarray(hashes[::2]))
    each = min(10, pages // 2)
    begun = [
        (rig.load(hashes[:each], list(range(first, first + each))), list(range(first, first + each)))
        for first in range(0, rig.pages - each + 1, each)
    ]
    seen = [rig.read(batch, places) for batch, places in begun]
    good = [batch.finish() for batch, _ in reversed(begun)]
    rig.synchronize()
    places = [place for _, chosen in begun for place in chosen]
    wrong = rig.differs(places, list(range(each)) * len(begun))
    for one in seen:
        for layer, sides in enumerate(one):
            for side, rows in enumerate(sides):
                wrong += not torch.equal(rows, rig.wanted[layer][side][:each])
    engine.most_file_pages, engine.most_pinned_pages = before
    outcome.expect(all(good) and wrong == 0, "many loads at once", (good, wrong))
    outcome.expect(engine.under_way == 0 and len(engine._free) == 8, "boards", engine.under_way)
    outcome.report.add("loads at once, split", "files of a store", len(begun), wrong, "wrong")
    restore(rig, hashes, pages)


def check_damage(outcome: Outcome, make: Callable[..., Rig], folder: pathlib.Path) -> None:
    """A page whose bytes changed on the drive: the load says so, and it is not offered again."""
    rig = make(slots=64)
    hashes = hashes_of(20, 3)
    rig.fill(20)
    rig.offload(hashes, list(range(20)))
    rig.settle()
    wanted = rig.wanted
    rig.close()
    flip_signs(stored_pages(folder)[hashes[7].tobytes()])
    rig = make(slots=64)
    rig.wanted = wanted
    rig.poison()
    outcome.expect(rig.door.find_run(rig.namespace, hashes) == 20, "damage: found")
    batch = rig.load(hashes, list(range(20)))
    rig.read(batch, list(range(20)))
    outcome.expect(not batch.finish(), "damage: the load is bad")
    outcome.expect(rig.door.find_run(rig.namespace, hashes) == 7, "damage: not offered again")
    rig.poison()
    again = rig.load(hashes[:7], list(range(7)))
    seen = rig.read(again, list(range(7)))
    outcome.expect(again.finish(), "damage: the others")
    rig.synchronize()
    outcome.expect(rig.differs(list(range(7)), list(range(7)), seen) == 0, "damage: bytes of the others")
    rig.close()


def check_deadline(outcome: Outcome, make: Callable[..., Rig]) -> None:
    """Rings that cannot keep their deadline: parts are read by the host; then the queue pairs are made anew."""
    rig = make(slots=64, deadline_ms=1)
    hashes = hashes_of(48, 4)
    rig.fill(48)
    rig.offload(hashes, list(range(48)))
    rig.settle()
    good = bad = wrong = 0
    for _ in range(12):
        rig.door.tier.clear()
        rig.poison()
        batch = rig.load(hashes, list(range(48)))
        seen = rig.read(batch, list(range(48)))
        if batch.finish():
            good += 1
            rig.synchronize()
            wrong += rig.differs(list(range(48)), list(range(48)), seen) > 0
        else:
            bad += 1
        if not rig.door.engine.sound:
            end = time.monotonic() + 20
            while not rig.door.engine.sound and time.monotonic() < end:
                time.sleep(0.01)
            outcome.expect(rig.door.engine.sound, "deadline: made anew")
    outcome.expect(wrong == 0, "deadline: wrong bytes in loads that were good", wrong)
    state = rig.door.state()
    parts = state["loader_repaired_parts"]
    print(
        f"deadline of 1 ms: {good} loads good, {bad} bad, {parts} parts repaired, made anew {state['renewals']} times"
    )
    outcome.report.add("deadline of 1 ms, repaired", "files of a store", good, parts, "parts")
    rig.close()


def checks(outcome: Outcome, device: str, root: pathlib.Path, quick: bool) -> None:
    for number, (name, shape) in enumerate(SHAPES.items()):
        if device == "cpu" and shape["layers"] > 8:
            continue
        pages = 40 if shape["layers"] > 8 else 60
        folder = root / f"checks{number}"
        threads = 1 if device == "cpu" else 8
        rig = Rig(device, folder, pages=pages + 20, slots=pages + 8, threads=threads, **shape)
        check_round_trips(outcome, rig, name, 12 if quick else 60, pages)
        check_many_at_once(outcome, rig, pages)
        rig.close()
        shutil.rmtree(folder)

        def make(folder: pathlib.Path = folder, shape: dict = shape, threads: int = threads, **more: int) -> Rig:
            return Rig(device, folder, pages=64, threads=threads, **shape, **more)

        if number == 0:
            check_damage(outcome, make, folder)
            shutil.rmtree(folder)
            check_deadline(outcome, make)
            shutil.rmtree(folder)


def copy_limits(report: Report) -> None:
    size = 1 << 30
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    for name, source, target in (("in", host, device), ("out", device, host)):
        times = []
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        report.add(f"copy engine, {name}", "pinned memory", size, size / statistics.median(times) / 1e9, "GB/s")


def timing(outcome: Outcome, root: pathlib.Path, quick: bool) -> None:
    report = outcome.report
    copy_limits(report)
    shape = SHAPES["K and V of 128 KiB in 32 layers"]
    most = 128 if quick else 512
    rig = Rig("cuda", root / "timing", pages=most + 8, slots=most + 8, threads=12, **shape)
    hashes = hashes_of(most, 5)
    rig.fill(most)
    for pages in (1, 64, most):
        gbytes = pages * rig.layout.object_bytes / 1e9
        slots = rig.indices(list(range(pages)))
        rig.door.tier.clear()
        rig.store.clear()
        rig.synchronize()
        start = time.perf_counter()
        rig.offload(np.ascontiguousarray(hashes[:pages]), slots)
        called = time.perf_counter()
        while rig.door.behind.num_completed() == 0:
            time.sleep(1e-4)
        copied = time.perf_counter()
        outcome.expect(rig.settle() == [True], "timing: offload")
        report.add("offload, host", "pinned memory", pages, (called - start) * 1e6, "us")
        report.add("offload, copied", "pinned memory", pages, gbytes / (copied - start), "GB/s")
        report.add("offload, stored", "files of a store", pages, gbytes / (time.perf_counter() - start), "GB/s")
        for source in ("memory", "memory, movers", "files"):
            total, host, first = [], [], []
            rig.door.engine.copy_engine = source == "memory"
            before = rig.door.engine.loads_by_copy_engine
            for _ in range(5):
                if source == "files":
                    rig.door.tier.clear()
                rig.synchronize()
                start = time.perf_counter()
                batch = rig.load(np.ascontiguousarray(hashes[:pages]), slots)
                host.append(time.perf_counter() - start)
                batch.loads[0].wait_layer(0)
                torch.cuda.current_stream().synchronize()
                first.append(time.perf_counter() - start)
                outcome.expect(batch.finish(), f"timing: load from {source}")
                total.append(time.perf_counter() - start)
            by_copies = rig.door.engine.loads_by_copy_engine - before
            outcome.expect(by_copies == (5 if source == "memory" else 0), f"timing: how {source} was loaded", by_copies)
            for name, times, unit in (("host", host, "us"), ("first layer", first, "us")):
                report.add(f"load from {source}, {name}", "direct door", pages, statistics.median(times) * 1e6, unit)
            report.add(f"load from {source}", "direct door", pages, gbytes / statistics.median(total), "GB/s")
            lookups = []
            for _ in range(20):
                start = time.perf_counter()
                rig.door.find_run(rig.namespace, hashes[:pages])
                lookups.append(time.perf_counter() - start)
            report.add(f"lookup, {source}", "direct door", pages, statistics.median(lookups) * 1e6, "us")
    rig.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--folder", type=pathlib.Path, help="where the store is made (default: the temporary folder)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("skipped: there is no CUDA device")
        return SKIPPED
    outcome = Outcome(Report(arguments.json, machine_facts()))
    with tempfile.TemporaryDirectory(prefix="tardis-direct-", dir=arguments.folder) as folder:
        root = pathlib.Path(folder)
        if "checks" in arguments.parts:
            checks(outcome, arguments.device, root, arguments.quick)
        if "timing" in arguments.parts and arguments.device == "cuda":
            timing(outcome, root, arguments.quick)
    print("wrong:", outcome.failed)
    return 1 if outcome.failed else 0


if __name__ == "__main__":
    sys.exit(main())
