#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The main job, end to end: KV of long prompts is stored, the server stops, a new server gives it back.

Starts the real SGLang server with ``--hicache-storage-backend tardis`` on a store in a local folder and a small Llama
of random weights, sends prompts of random tokens, waits until they are stored, stops the server, starts a new one on
the same store and sends them again.

Exit status 0: every prompt came back from storage, and its first token and top-20 log probabilities equal those of a
device hit with the same number of cached tokens, bit for bit. (A cold answer is only shown: computing all tokens at
once rounds differently from continuing after a cached prefix, with any cache.) Otherwise 1; 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from server import MODELS, Answer, Server, ServerError, ServerSpec, cached_by_a_hit, prompt

ROOT = Path(__file__).resolve().parent.parent
PORTS = range(32100, 32200)
WARM_UP_SEEDS = (9001, 9002)


@dataclass(frozen=True)
class Plan:
    """What is sent to which server."""

    model: str
    device: str
    prompts: int
    tokens: int
    page_size: int
    max_total_tokens: int
    hicache_ratio: float
    capacity: str = "4GiB"
    """Of the store: more than the pages of all prompts, so that none is evicted."""

    @property
    def vocabulary(self) -> int:
        return json.loads((MODELS / self.model / "config.json").read_text())["vocab_size"]


CPU_PLAN = Plan("small-llama", "cpu", prompts=3, tokens=3072, page_size=64, max_total_tokens=16384, hicache_ratio=3.0)
CPU_QUICK_PLAN = Plan(
    "tiny-llama", "cpu", prompts=1, tokens=768, page_size=64, max_total_tokens=4096, hicache_ratio=3.0
)
GPU_PLAN = Plan(
    "gpu-llama",
    "cuda",
    prompts=3,
    tokens=16384,
    page_size=64,
    max_total_tokens=65536,
    hicache_ratio=2.0,
    capacity="8GiB",
)
GPU_QUICK_PLAN = Plan(
    "gpu-llama", "cuda", prompts=1, tokens=4096, page_size=64, max_total_tokens=16384, hicache_ratio=2.0
)


@dataclass
class Outcome:
    """One prompt's story."""

    name: str
    cold: Answer
    device: Answer
    restored: Answer | None = None

    @property
    def problem(self) -> str | None:
        """Why this prompt does not count as restored, or None."""
        restored, device = self.restored, self.device
        if restored is None or restored.cached["storage"] == 0:
            return "nothing came from storage"
        if restored.cached_tokens != device.cached_tokens:
            return f"{restored.cached_tokens} tokens were cached, a device hit has {device.cached_tokens}"
        if restored.first_token != device.first_token:
            return f"first token {restored.first_token}, a device hit says {device.first_token}"
        if restored.logprobs != device.logprobs:
            return "log probabilities differ from a device hit's"
        return None


class Progress:
    """One line that is rewritten on a terminal, and printed once elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._begin = time.monotonic()

    def show(self, text: str) -> None:
        """Replace the line (terminals only)."""
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{self._stamp()} {text}"[:width], end="", flush=True)

    def done(self, text: str) -> None:
        """Finish the line."""
        print(("\r\x1b[K" if self._terminal else "") + f"{self._stamp()} {text}", flush=True)

    def bar(self, text: str, done: float, total: float) -> None:
        """Show a share of a whole."""
        filled = int(20 * min(1.0, done / total)) if total else 20
        self.show(f"{text} [{'#' * filled}{'.' * (20 - filled)}] {done:,.0f} / {total:,.0f}")

    def _stamp(self) -> str:
        return f"[{time.monotonic() - self._begin:6.1f} s]"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if there is one"
    )
    parser.add_argument("--quick", action="store_true", help="one shorter prompt and a smaller model")
    parser.add_argument("--kill", action="store_true", help="end the first server with SIGKILL instead of SIGTERM")
    parser.add_argument("--layout", help="--hicache-mem-layout of the servers (default: not given)")
    parser.add_argument("--io-backend", help="--hicache-io-backend of the servers (default: not given)")
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "demo-output",
        help="folder for logs and the store; a store that an earlier demonstration left there is deleted (%(default)s)",
    )
    parser.add_argument(
        "--store", type=Path, help="folder of the store (default: OUTPUT/store); an existing one is used"
    )
    parser.add_argument("--port", type=int, help="default: a free one")
    parser.add_argument(
        "--server-flag", action="append", default=[], help="a further server flag (repeatable; write --server-flag=--x)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    return parser.parse_args()


def has_gpu() -> bool:
    tool = shutil.which("nvidia-smi")
    return bool(tool) and b"GPU " in subprocess.run([tool, "-L"], capture_output=True, check=False).stdout


def free_port() -> int:
    for port in PORTS:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise SystemExit(f"every port of {PORTS.start} ... {PORTS.stop - 1} is in use; name another with --port")


def allocated_bytes(folder: Path) -> int:
    """What a folder's files take on disk."""
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())


def path_in_use(server: Server) -> str:
    """The store's own report of how it does I/O: from the line that it logs at start."""
    lines = [line.partition("tardis: store ")[2] for line in server.log_text().splitlines() if "tardis: store " in line]
    if not lines:
        return "not reported"
    engine = re.search(r"engine .*(?=, capacity )", lines[-1])
    return engine[0] if engine else lines[-1]


def start(server: Server, progress: Progress, which: str) -> None:
    took = server.start(progress=lambda seconds: progress.bar(f"Starting {which} server, seconds", seconds, 30))
    progress.done(f"{which.capitalize()} server is up after {took:.0f} s")


def first_life(server: Server, plan: Plan, prompts: list[list[int]], progress: Progress) -> list[Outcome]:
    """Cold answers and device hits, until everything is stored."""
    start(server, progress, "first")
    progress.show("Warming up (SGLang compiles its page hash at the first request)")
    warm_up = prompt(WARM_UP_SEEDS[0], plan.tokens, plan.vocabulary)
    server.generate(warm_up)
    server.generate(warm_up)
    outcomes = []
    for number, ids in enumerate(prompts, 1):
        progress.show(f"Prompt {number} of {len(prompts)}: cold")
        cold = server.generate(ids)
        progress.show(f"Prompt {number} of {len(prompts)}: device hit")
        outcomes.append(Outcome(f"{number} ({plan.tokens:,} tokens)", cold, server.generate(ids)))
    expected = cached_by_a_hit(plan.tokens + 1, plan.page_size) * (len(prompts) + 1)
    server.wait_until_stored(expected, progress=lambda tokens: progress.bar("Storing, tokens", tokens, expected))
    progress.done(f"{len(prompts)} prompts answered, {expected:,} tokens stored")
    return outcomes


def second_life(
    server: Server, plan: Plan, prompts: list[list[int]], outcomes: list[Outcome], progress: Progress
) -> None:
    """The same prompts on a new server."""
    start(server, progress, "second")
    progress.show("Warming up")
    warm_up = prompt(WARM_UP_SEEDS[1], plan.tokens, plan.vocabulary)
    server.generate(warm_up)
    server.generate(warm_up)
    for number, (ids, outcome) in enumerate(zip(prompts, outcomes, strict=True), 1):
        progress.show(f"Prompt {number} of {len(prompts)}: restored")
        outcome.restored = server.generate(ids)
    progress.done("All prompts sent again")


def tiers(answer: Answer | None) -> str:
    return " / ".join(f"{tokens:,}" for tokens in answer.cached.values()) if answer else "-"


def print_table(outcomes: list[Outcome]) -> None:
    head = ("prompt", "cached device / host / storage", "cold", "device hit", "restored", "as a device hit")
    rows = [
        (
            outcome.name,
            tiers(outcome.restored),
            f"{outcome.cold.ttft * 1e3:,.0f} ms",
            f"{outcome.device.ttft * 1e3:,.0f} ms",
            f"{outcome.restored.ttft * 1e3:,.0f} ms" if outcome.restored else "-",
            "yes" if outcome.problem is None else "NO",
        )
        for outcome in outcomes
    ]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    print("\nTime to first token, and what came from where after the restart:\n")
    for row in (head, tuple("-" * width for width in widths), *rows):
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print()


def main() -> int:
    args = arguments()
    device = args.device if args.device != "auto" else ("cuda" if has_gpu() else "cpu")
    plan = {
        ("cpu", False): CPU_PLAN,
        ("cpu", True): CPU_QUICK_PLAN,
        ("cuda", False): GPU_PLAN,
        ("cuda", True): GPU_QUICK_PLAN,
    }[device, args.quick]

    output: Path = args.output.resolve()
    store: Path = args.store.resolve() if args.store else output / "store"
    if args.store is None:
        shutil.rmtree(store, ignore_errors=True)
    output.mkdir(parents=True, exist_ok=True)

    spec = ServerSpec(
        model=MODELS / plan.model,
        port=args.port or free_port(),
        device=plan.device,
        extra_config={"path": str(store), "capacity": plan.capacity},
        page_size=plan.page_size,
        max_total_tokens=plan.max_total_tokens,
        hicache_ratio=plan.hicache_ratio,
        layout=args.layout,
        io_backend=args.io_backend,
        flags=args.server_flag,
    )
    seed = int(time.time()) if args.store else 1  # a store that is kept would already hold the usual prompts
    prompts = [prompt(seed + number, plan.tokens, plan.vocabulary) for number in range(plan.prompts)]
    progress = Progress()
    versions = {name: metadata.version(name) for name in ("sglang", "sglang-tardis", "torch")}
    print(f"SGLang {versions['sglang']}, sglang-tardis {versions['sglang-tardis']}, {plan.model} on {device}")
    print(f"Store: {store}\nLogs:  {output}/server-1.log, server-2.log\n")
    try:
        with closing(Server(spec, output / "server-1.log")) as server:
            outcomes = first_life(server, plan, prompts, progress)
            how = signal.SIGKILL if args.kill else signal.SIGTERM
            progress.show(f"Stopping the first server ({how.name})")
            server.stop(how)
        progress.done(f"First server stopped ({how.name})")
        with closing(Server(spec, output / "server-2.log")) as server:
            second_life(server, plan, prompts, outcomes, progress)
            on_disk, path = allocated_bytes(store), path_in_use(server)
            progress.show("Stopping the second server")
        progress.done("Second server stopped")
    except ServerError as error:
        print(f"\nFailed: {error}", file=sys.stderr)
        return 1

    print_table(outcomes)
    print(f"On disk: {on_disk / 1e6:,.1f} MB in {store}\nPath:    {path}\n")
    problems = [f"prompt {outcome.name}: {outcome.problem}" for outcome in outcomes if outcome.problem]
    if args.json:
        report = {
            "versions": versions,
            "python": platform.python_version(),
            "plan": asdict(plan),
            "stopped_with": how.name,
            "bytes_on_disk": on_disk,
            "path_in_use": path,
            "prompts": [asdict(outcome) | {"problem": outcome.problem} for outcome in outcomes],
            "passed": not problems,
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if problems:
        print("Failed:\n" + "\n".join(f"  {problem}" for problem in problems), file=sys.stderr)
        return 1
    count = len(outcomes)
    print(
        f"{count} of {count} prompts came back after the restart; first tokens and logprobs are those of a device hit."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
