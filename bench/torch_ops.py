# SPDX-License-Identifier: Apache-2.0
"""The torch ops of sglang_tardis.gpu on a GPU: checks first, then what a restore costs.

Against the software controller over memory: host threads copy between the namespace and pinned bounce slots, and SMs
carry the bytes on to pages in HBM. No drive takes part.

checks     pools of several layouts, put and get to other pages, every byte of the pools compared; ids outside, counts
           above, a deadline that passes, renew; lookups
graphs     one CUDA graph gets all layers while a second stream waits for each and reads it; replayed with other ids,
           slots and counts each time; every byte of the pools and every sum that was read compared
profile    torch.profiler over replays: which CUDA calls the host makes, none of which may wait or copy; calls into the
           library for each restore
timing     GB/s of a get and a put of all layers; the limit is a pinned copy to or from HBM by a copy engine, measured
           in the same run

Without a GPU (--device cpu) the checks alone, with small pools.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from common import Outcome, Report, add_common_arguments, machine_facts
from sglang_tardis import gpu
from sglang_tardis.gpu import ObjectIndex
from torch_ops_rig import LLAMA, OPS, SHAPES, RestoreGraph, Rig, Shape, quick_options, random_choice

SKIPPED = 77
PARTS = ("checks", "graphs", "profile", "timing")
CONTROLLER = "software controller over memory"
# In the names of calls that wait, copy or allocate.
WAITING = ("Synchronize", "Memcpy", "Memset", "Malloc", "Free", "HostAlloc", "StreamWait")


# ---- checks
def check_layouts(outcome: Outcome, device: str, rounds: int) -> None:
    random = np.random.default_rng()
    shapes = SHAPES if device == "cpu" else (LLAMA, *SHAPES)
    several = [(SHAPES[0], {"slot_bytes": size}) for size in (16 << 10, 8 << 10)]
    cases = [*((shape, {}) for shape in shapes), *several]
    for shape, more in cases:
        pages = 16 if device == "cpu" else 96
        with Rig(shape, pages, pages + 16, device, 64, **quick_options(device), **more) as rig:
            wrong = 0
            rig.fill()
            outcome.expect(set(rig.store()) == {1}, f"{shape.name}: put", rig.session.layer_report(0))
            for _ in range(rounds):
                most = min(64, pages, rig.session.most_pages)
                chosen = random_choice(rig, most, random)
                rig.poison()
                rig.choose(*chosen)
                wrong += set(rig.run(OPS.batch_get)) != {1} or not rig.right(*chosen)
            name = f"{shape.name}, {rig.session.commands_per_page} commands a page"
            outcome.expect(wrong == 0, f"{name}: pages of another content", wrong)
            outcome.report.add(f"put and get: {name}", CONTROLLER, rounds, wrong, "wrong")


def check_refusals(outcome: Outcome, device: str) -> None:
    failed = outcome.failed
    with Rig(SHAPES[0], 24, 30, device, 8, **quick_options(device)) as rig:
        rig.fill()
        rig.store()
        inside = list(rig.at)[:3]
        rig.poison()
        rig.choose([1, 24, -1, 2, 3, 4], [inside[0], inside[0], inside[0], inside[1], 30, -1])
        outcome.expect(set(rig.run(OPS.batch_get)) == {2}, "ids outside: flags")
        outcome.expect(rig.right([1, 2], inside[:2]), "ids outside: the pools")
        ends = rig.session.layer_report(3).ends
        outcome.expect(ends == ("done", "refused", "refused", "done", "refused", "refused"), "ids outside", ends)
        rig.poison()
        rig.choose([1, 2], inside[:2])
        rig.count.fill_(9)
        outcome.expect(set(rig.run(OPS.batch_get)) == {2} and rig.right([], []), "a count above the ids")
        rig.choose([5, 6, 7], inside)
        outcome.expect(set(rig.run(OPS.batch_get)) == {1} and rig.right([5, 6, 7], inside), "afterwards")
        rig.choose([], [])
        rig.poison()
        outcome.expect(set(rig.run(OPS.batch_get)) == {1} and rig.right([], []), "a count of 0")
    outcome.report.add("ids and counts outside", CONTROLLER, "", outcome.failed - failed, "wrong")


def check_renew(outcome: Outcome, device: str) -> None:
    """A deadline passes; the flag says so, the queues are down, renew makes them work again."""
    failed, shape = outcome.failed, Shape("", 1, (8, 256), (8, 256), torch.bfloat16, 256)
    pages = 16 if device == "cpu" else 64
    with Rig(shape, pages, pages, device, pages, threads=1, queues=1, entries=64) as rig:
        rig.fill()
        rig.session.deadline_ms = 10_000
        outcome.expect(rig.store() == [1], "renew: put")
        slots, stored = list(rig.at), list(rig.at.values())
        rig.session.deadline_ms = 1
        rig.choose(stored, slots)
        for _attempt in range(50):  # a thread that is not scheduled for that long finds everything done when it looks
            rig.poison()
            found = rig.run(OPS.batch_get)
            report = rig.session.layer_report(0)
            if found != [1]:
                break
        outcome.expect(found == [2] and report.needs_renew, "a deadline of 1 ms", report.rings)
        rig.session.deadline_ms = 10_000
        outcome.expect(rig.run(OPS.batch_get) == [2], "a queue that is down")
        rig.session.renew()
        rig.poison()
        outcome.expect(rig.run(OPS.batch_get) == [1] and rig.right(stored, slots), "renew: get")
    outcome.report.add("deadline and renew", CONTROLLER, "", outcome.failed - failed, "wrong")


def check_digests(outcome: Outcome, device: str) -> None:
    """Made by put; a get that expects others says which pages are damaged, as it does of bytes changed on the drive."""
    failed, pages = outcome.failed, list(range(16))
    for shape in SHAPES:
        with Rig(shape, 24, 30, device, 16, **quick_options(device)) as rig:
            rig.fill()
            rig.at = {page: page for page in pages}
            digests = torch.zeros((16, shape.layers, rig.layout.digests), dtype=torch.int64, device=device)
            rig.choose(pages, pages)
            put = rig.run(OPS.batch_put, digests=digests)
            outcome.expect(set(put) == {1} and bool((digests != 0).all()), f"digests, {shape.name}: put", put)
            rig.poison()
            get = rig.run(OPS.batch_get, digests=digests)
            outcome.expect(set(get) == {1} and rig.right(pages, pages), f"digests, {shape.name}: get", get)
            digests[5, 1, -1] ^= 1 << 40
            get = rig.run(OPS.batch_get, digests=digests)
            wanted = [2 if layer == 1 else 1 for layer in range(shape.layers)]
            outcome.expect(get == wanted, f"digests, {shape.name}: a wrong digest", get)
            digests[5, 1, -1] ^= 1 << 40
            block = torch.zeros(rig.layout.block_bytes, dtype=torch.uint8)
            at = 7 * rig.layout.object_bytes + rig.layout.layer_offset(2)
            rig.session.read(at, block)
            block[33] ^= 4
            rig.session.write(at, block)
            get = rig.run(OPS.batch_get, digests=digests)
            wanted = [2 if layer == 2 else 1 for layer in range(shape.layers)]
            done = rig.session.layer_report(2).pages_done
            outcome.expect(
                get == wanted and done == [page != 7 for page in pages], f"digests, {shape.name}: a bit", get
            )
    outcome.report.add("digests", CONTROLLER, "", outcome.failed - failed, "wrong")


def check_lookup(outcome: Outcome, device: str) -> None:
    entries = 2_000 if device == "cpu" else 20_000
    random = np.random.default_rng()
    index = ObjectIndex(entries, device)
    changes = np.zeros(entries, dtype=gpu.ENTRY_DTYPE)
    changes["key"] = random.integers(0, 256, (entries, 32))
    changes["location"], changes["generation"], changes["space"] = random.integers(0, 1 << 40, entries), 1, 3
    there = entries * 3 // 4
    for first in range(0, there, 5000):
        outcome.expect(set(index.apply(changes[first : min(first + 5000, there)])) == {"inserted"}, "lookup: put")
    keys = torch.from_numpy(changes["key"].copy()).to(device)
    answers = index.new_answers(entries)
    count = torch.tensor([entries - 5], dtype=torch.int32, device=device)
    OPS.lookup(index.handle, keys, count, answers, space=3)
    rows = answers.cpu().numpy().view(gpu.ANSWER_DTYPE)[:, 0]
    good = (rows["status"][:there] == 1).all() and (rows["status"][there:] == 0).all()
    good = good and (rows["location"][:there] == changes["location"][:there]).all()
    outcome.expect(bool(good), "lookup: answers")
    outcome.report.add("lookup", "index", entries, 0 if good else 1, "wrong")


# ---- graphs
def check_graphs(outcome: Outcome, quick: bool) -> None:
    random = np.random.default_rng()
    for shape, replays in ((LLAMA, 30 if quick else 1000), *((shape, 30 if quick else 1000) for shape in SHAPES)):
        with Rig(shape, 96, 128, "cuda", 40, **{**quick_options("cuda"), "threads": 8, "queues": 8}) as rig:
            rig.fill()
            outcome.expect(set(rig.store()) == {1}, f"graph, {shape.name}: put")
            rig.choose([0], list(rig.at)[:1])
            graph = RestoreGraph(rig)
            begin = time.monotonic()
            wrong = sum(not graph.replay_is_right(*random_choice(rig, 40, random)) for _ in range(replays))
            spent = time.monotonic() - begin
            outcome.expect(wrong == 0, f"graph, {shape.name}: replays that are wrong", wrong)
            outcome.report.add(
                f"graph replays: {shape.name}", CONTROLLER, replays, wrong, "wrong", seconds=round(spent, 1)
            )
            hasty = RestoreGraph(rig, waits=False)
            pages, slots = list(range(40)), list(rig.at)[:40]
            early = sum(not hasty.replay_is_right(pages, slots) for _ in range(10))
            outcome.expect(early > 0, f"graph, {shape.name}: what reads without waiting is told from what waits")
            outcome.report.add(f"control, no waits: {shape.name}", CONTROLLER, 10, early, "wrong (wanted)")
            rig.session.renew()  # a graph of before stays as good
            wrong = sum(not graph.replay_is_right(*random_choice(rig, 40, random)) for _ in range(5))
            outcome.expect(wrong == 0, f"graph, {shape.name}: replays after renew", wrong)


def check_graph_of_hashes(outcome: Outcome, quick: bool) -> None:
    """Hashes in, pages out: a lookup in the graph says where the objects are."""
    random = np.random.default_rng()
    shape, replays, most = SHAPES[0], 20 if quick else 200, 40
    with Rig(shape, 96, 128, "cuda", most, **quick_options("cuda")) as rig:
        rig.fill()
        outcome.expect(set(rig.store()) == {1}, "hashes: put")
        index = ObjectIndex(1000, "cuda")
        slots = list(rig.at)
        changes = np.zeros(len(slots), dtype=gpu.ENTRY_DTYPE)
        changes["key"] = random.integers(0, 256, (len(slots), 32))
        changes["location"] = np.array(slots) * rig.layout.object_blocks
        index.apply(changes)
        keys = torch.zeros((most, 32), dtype=torch.uint8, device="cuda")
        answers, blocks = index.new_answers(most), torch.zeros(most, dtype=torch.int64, device="cuda")

        def ask() -> None:
            OPS.lookup(index.handle, keys, rig.count, answers)
            blocks.copy_(answers[:, 0])

        rig.choose([0], [0])
        graph = RestoreGraph(rig, ask, blocks=blocks)
        wrong = 0
        for _ in range(replays):
            pages, _ = random_choice(rig, most, random)
            which = random.integers(0, len(slots), len(pages))
            keys.fill_(0)
            keys[: len(pages)] = torch.from_numpy(changes["key"][which]).cuda()
            chosen = [slots[i] for i in which]
            rig.poison()
            rig.choose(pages, list(range(len(pages))))  # slot i of the table of blocks
            graph.graph.replay()
            wrong += not rig.right(pages, chosen) or set(rig.session.flags.tolist()) != {1}
        outcome.expect(wrong == 0, "hashes: replays that are wrong", wrong)
        outcome.report.add("graph replays: from hashes", CONTROLLER, replays, wrong, "wrong")


# ---- what the host does
def waiting(calls: dict[str, int]) -> list[str]:
    """Of those calls, which wait for the device or move bytes."""
    return sorted(name for name in calls if any(part in name for part in WAITING))


def traced_calls(replay: Callable[[int], None], replays: int, afterwards: Callable[[], object]) -> dict[str, int]:
    """CUDA calls by name from the first replay's launch until all of them have landed, which is polled."""
    landed = torch.cuda.Event()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as trace:
        torch.cuda.synchronize()  # before the first launch: what the profiler did until then
        for i in range(replays):
            replay(i)
            afterwards()
        landed.record()
        while not landed.query():
            time.sleep(1e-4)
    on_host = torch.autograd.DeviceType.CPU
    events = [(event.name, event.time_range.start) for event in trace.events() if event.device_type == on_host]
    first = min((start for name, start in events if name == "cudaGraphLaunch"), default=0)
    last = max((start for name, start in events if name == "cudaEventQuery"), default=0)
    found: dict[str, int] = {}
    for name, start in events:
        if first <= start <= last and re.match(r"cu(da)?[A-Z]", name):
            found[name] = found.get(name, 0) + 1
    return found


def profile(outcome: Outcome, quick: bool) -> None:
    replays = 10 if quick else 50
    random = np.random.default_rng()
    with Rig(LLAMA, 96, 128, "cuda", 40, **{**quick_options("cuda"), "threads": 8, "queues": 8}) as rig:
        rig.fill()
        rig.store()
        calls = {}
        for count in (1, 40):
            rig.choose(list(range(count)), list(rig.at)[:count])
            before = rig.session.host_calls
            rig.run(OPS.batch_get)
            calls[count] = rig.session.host_calls - before
        rig.choose([0], list(rig.at)[:1])
        graph = RestoreGraph(rig)
        outcome.expect(calls == {1: rig.shape.layers, 40: rig.shape.layers}, "calls into the library", calls)
        outcome.report.add("host calls: get, 32 layers", "calls into the library", "1 page", calls[1], "calls")
        outcome.report.add("host calls: get, 32 layers", "calls into the library", "40 pages", calls[40], "calls")
        outcome.report.add("host calls: get and waits", "at capture", "", graph.host_calls, "calls")

        # Ids of every replay are on the device before; one kernel each puts them where the graph reads them.
        chosen = [random_choice(rig, 40, random) for _ in range(replays)]
        table = torch.full((2, replays, 40), -77, dtype=torch.int32)
        for i, (pages, slots) in enumerate(chosen):
            table[0, i, : len(pages)], table[1, i, : len(slots)] = (
                torch.tensor(numbers, dtype=torch.int32) for numbers in (pages, slots)
            )
        table = table.cuda()
        counts = torch.tensor([len(pages) for pages, _ in chosen], dtype=torch.int32, device="cuda")
        steps = torch.arange(replays, device="cuda")

        def replay(i: int) -> None:
            step = steps[i : i + 1]
            torch.index_select(table[0], 0, step, out=rig.page_ids.view(1, -1))
            torch.index_select(table[1], 0, step, out=rig.slot_ids.view(1, -1))
            torch.index_select(counts, 0, step, out=rig.count)
            graph.graph.replay()

        replay(0)
        torch.cuda.synchronize()
        rig.poison()
        before = rig.session.host_calls
        found = traced_calls(replay, replays, lambda: None)
        outcome.expect(rig.session.host_calls == before, "calls into the library by replays")
        outcome.report.add("host calls: a replay", "calls into the library", "", 0, "calls")
        outcome.expect(found.get("cudaGraphLaunch", 0) == replays, "graph launches in the trace", found)
        outcome.report.note(cuda_calls_in_replays=found, replays_profiled=replays)
        print("CUDA calls while", replays, "replays were under way:", found, flush=True)
        outcome.expect(not waiting(found), "calls that wait or copy between submission and landed", waiting(found))
        outcome.report.add("waits and copies by the host", "replays", replays, len(waiting(found)), "kinds of calls")
        last_pages, last_slots = chosen[-1]
        wanted = list(rig.wanted(last_pages, last_slots))
        to = torch.tensor(last_pages, dtype=torch.int64, device="cuda")
        good = all(torch.equal(mine[:, to], other[:, to]) for mine, other in zip(rig.raw, wanted, strict=True))
        outcome.expect(good, "profiled replays: pages of the last one")
        # The method sees a wait where there is one.
        control = waiting(traced_calls(replay, 2, lambda: rig.session.flags.tolist()))
        outcome.expect(bool(control), "control: a replay whose flags are read at once")
        outcome.report.add("control: flags read at once", "replays", 2, len(control), "kinds of calls")


# ---- timing
def copy_limits(report: Report) -> dict[str, float]:
    """GB/s of one large copy by a copy engine, in and out."""
    size = 1 << 30
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    limits = {}
    for name, to, of in (("in", device, host), ("out", host, device)):
        times = [seconds(lambda to=to, of=of: to.copy_(of, non_blocking=True)) for _ in range(4)]
        limits[name] = size / statistics.median(times[1:]) / 1e9
        report.add(f"rig: pinned copy {name}", "torch copy_", size, limits[name], "GB/s")
    return limits


def seconds(work: Callable[[], object]) -> float:
    """Of the device, from before `work` to after it."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def timing(outcome: Outcome, quick: bool) -> None:
    limits = copy_limits(outcome.report)
    most = 64 if quick else 512
    options = {"threads": 12, "queues": 12, "entries": 64, "deadline_ms": 10_000}
    with Rig(LLAMA, most, most, "cuda", most, **options) as rig:
        rig.fill()
        outcome.expect(set(rig.store()) == {1}, "timing: put")
        slots = np.random.default_rng().permutation(most).tolist()
        rig.poison()
        rig.choose(list(range(most)), slots)
        outcome.expect(set(rig.run(OPS.batch_get)) == {1} and rig.right(list(range(most)), slots), "timing: get")

        digests = torch.zeros((most, rig.shape.layers, rig.layout.digests), dtype=torch.int64, device="cuda")
        works = {
            "get": (OPS.batch_get, {}),
            "put": (OPS.batch_put, {}),
            "put, digests": (OPS.batch_put, {"digests": digests}),
            "get, digests": (OPS.batch_get, {"digests": digests}),
        }
        graphs = {}
        for name, (op, more) in works.items():
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name]):
                rig.session.flags.zero_()
                rig.enqueue(op, **more)
        for count in (count for count in (1, 8, 64, 512) if count <= most):
            rig.choose(list(range(count)), slots[:count])
            size = count * rig.layout.object_bytes
            for name, graph in graphs.items():
                repeats = 3 if quick else 9
                times = [seconds(graph.replay) for _ in range(repeats + 1)][1:]
                outcome.expect(set(rig.session.flags.tolist()) == {1}, f"timing: {name}")
                rate = size / statistics.median(times) / 1e9
                limit = limits["in" if "get" in name else "out"]
                extra = {"ms": round(statistics.median(times) * 1e3, 3), "pages": count, "layers": rig.shape.layers}
                case = f"{name}, 32 layers, {count} pages"
                outcome.report.add(case, CONTROLLER, rig.layout.layer_bytes, rate, "GB/s", limit, **extra)
        host = []
        for _ in range(20):
            rig.session.flags.zero_()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            rig.enqueue(OPS.batch_get)
            host.append((time.perf_counter() - begin) / rig.shape.layers * 1e6)
        outcome.report.add("host time of an op, not in a graph", "batch_get", most, statistics.median(host), "us")


def main() -> int:
    """Every part, or those that are named; exit status 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        print("skipped: no CUDA device (--device cpu runs the checks)")
        return SKIPPED
    torch.manual_seed(time.time_ns())
    report = Report(arguments.json, machine_facts())
    outcome = Outcome(report)
    quick = arguments.quick
    with contextlib.ExitStack() as stack:
        if on_gpu:
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream()))
        if "checks" in arguments.parts:
            check_layouts(outcome, arguments.device, 2 if not on_gpu else 3 if quick else 20)
            check_refusals(outcome, arguments.device)
            check_digests(outcome, arguments.device)
            check_renew(outcome, arguments.device)
            check_lookup(outcome, arguments.device)
        if on_gpu and "graphs" in arguments.parts:
            check_graphs(outcome, quick)
            check_graph_of_hashes(outcome, quick)
        if on_gpu and "timing" in arguments.parts:
            timing(outcome, quick)
        if on_gpu and "profile" in arguments.parts:
            profile(outcome, quick)
    print("right" if outcome.failed == 0 else f"{outcome.failed} checks FAILED", flush=True)
    return 1 if outcome.failed else 0


if __name__ == "__main__":
    sys.exit(main())
