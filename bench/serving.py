# SPDX-License-Identifier: Apache-2.0
"""A real SGLang server under six workloads, by tier: recompute, HiCache-DRAM, SGLang's `file` backend, tardis.

(a) LV-Eval-like: 8 prompts of 46-56 K tokens sharing 10,428
(b) multi-turn: 6 clients, 10 rounds, +4,096 tokens a round, one token out
(c) the first 300 requests of a conversation trace (`--trace FILE`, Mooncake's format), lengths / 16
(d) hit rate fixed at 50, 75, 90, 95 and 99 % of 32,000 tokens
(e) a working set of 4 times the DRAM tier
(f) misses only

All tiers share one server (one more where a workload wants another DRAM size): storage is attached and detached while
it runs, so flags, weights and pools are the same. recompute: storage detached, each prompt with a cache salt of its
own, so that nothing can hit; HiCache-DRAM: storage detached; file, tardis: attached to an empty folder. Every tier
answers the same requests in the same order. Loads: `seq` one at a time, `waves`, `trace` as recorded, or a number of
requests a second (Poisson, the same gaps for every tier), `inf` all at once.

Each request's time to first token, tokens cached by tier (the server's own `cached_tokens_details`) and output ids are
kept. One at a time, cached tokens must be as many as were stored, and the first token with its top-20 log
probabilities must equal, bit for bit, that of a device hit on as many tokens (a) and that of the DRAM tier wherever it
had as many cached. Anything else is listed under "failures", and the exit status is 1.

Results go to FILE (`--json`, rewritten after each case), serving.md and plots (PNG and SVG, if matplotlib is
installed) to `--out`. `--resume` keeps the cases that FILE holds. `--render` only writes page and plots from FILE,
without a server.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from typing import Any

import serving_plots
import serving_results as results
from common import Report, add_common_arguments, is_memory, machine_facts
from serving_client import OutOfTime
from serving_profile import Pools, Profile, profile
from serving_session import Session, lengths_of, too_long
from serving_tables import markdown
from serving_workloads import Workload, due_times
from sglang_server import ServerError


def parse(words: list[str] | None = None) -> tuple[argparse.Namespace, Profile]:
    """The command line; ends the program with a message if something does not fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--workloads", default="a,b,c,d,e,f", help="comma list of letters (default: all)")
    parser.add_argument("--tiers", default=",".join(results.TIERS), help="comma list (default %(default)s)")
    parser.add_argument("--loads", action="append", default=[], metavar="L:LOAD,...", help="loads of workload L")
    parser.add_argument("--set", action="append", default=[], metavar="L.FIELD=VALUE", help="a size of workload L")
    parser.add_argument("--trace", type=pathlib.Path, help="trace for (c) in JSON lines; without it one is drawn")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and arrivals (default %(default)s)")
    parser.add_argument("--resume", action="store_true", help="keep the complete cases that --json FILE holds")
    parser.add_argument("--render", action="store_true", help="no server: page and plots from --json FILE")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."), help="folder for page, plots and logs")
    parser.add_argument("--l3-dir", type=pathlib.Path, help="folder for all storage data, for example on tmpfs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model-path", type=pathlib.Path, help="a folder with config.json (weights are random)")
    parser.add_argument("--attention-backend", help="with a GPU (default fa3)")
    parser.add_argument("--layout", choices=("page_first_direct", "page_first"), default="page_first_direct")
    parser.add_argument("--device-tokens", type=int, help="tokens of the device pool")
    parser.add_argument("--dram-gb", type=float, help="GB of the DRAM tier, for all workloads (1 GB = 10^9 bytes)")
    parser.add_argument("--capacity", help="of a tardis store (default 56GiB, without a GPU 512MiB)")
    parser.add_argument("--server-flag", action="append", default=[], help="a further server flag (repeatable)")
    parser.add_argument("--launcher", help="command that starts and stops the server; see sglang_server.py")
    parser.add_argument("--port", type=int, default=31600)
    parser.add_argument("--deadline", type=float, default=36_000, metavar="S", help="end after this many seconds")
    parser.add_argument(
        "--start-seconds", type=float, default=150, metavar="S", help="least time left to start a server"
    )
    arguments = parser.parse_args(words)
    arguments.workloads = arguments.workloads.split(",")
    arguments.tiers = arguments.tiers.split(",")
    for name, given, known in (
        ("--workloads", arguments.workloads, tuple("abcdef")),
        ("--tiers", arguments.tiers, results.TIERS),
    ):
        unknown = [entry for entry in given if entry not in known]
        if unknown:
            parser.error(f"{name}: {unknown[0]!r} is not one of {', '.join(known)}")
    if (arguments.resume or arguments.render) and arguments.json is None:
        parser.error("--resume and --render need --json FILE")
    if arguments.l3_dir is None and not arguments.render:
        parser.error("--l3-dir is required: a folder for what the storage tiers store")
    if arguments.trace and not arguments.trace.is_file():
        parser.error(f"--trace {arguments.trace}: expected a file in JSON lines, found none")
    try:
        return arguments, profile(arguments)
    except ValueError as error:
        parser.error(str(error))


class Run:
    """The cases of one start of the program."""

    def __init__(self, arguments: argparse.Namespace, chosen: Profile) -> None:
        self.arguments, self.profile = arguments, chosen
        self.began = time.monotonic()
        self.out = arguments.out.resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.l3 = arguments.l3_dir.resolve()
        self.l3.mkdir(parents=True, exist_ok=True)
        self.skipped: list[str] = []
        self.problems: list[str] = []
        earlier: dict[str, Any] = {}
        if arguments.resume and arguments.json.exists():
            earlier = results.read(arguments.json)
        self.cases: dict[str, results.Case] = earlier.get("cases", {})
        self.runs: list[dict[str, Any]] = earlier.get("runs", [])
        others = self.made_otherwise()
        if others:
            raise ValueError(
                f"--resume: {len(others)} cases in {arguments.json} were made with other settings than these "
                f"({', '.join(others[:4])}): expected the same sizes, pools, seed and server flags; give those, or "
                "another --json FILE"
            )
        facts = machine_facts(self.l3)
        # Nothing may be written before the old content is in place.
        self.report = Report(None, facts, l3_in_memory=is_memory(self.l3))
        self.report.file = arguments.json
        self.runs.append({"machine": facts, "command": self.report.command, "servers": []})
        self.save()

    def left(self) -> float:
        return self.arguments.deadline - (time.monotonic() - self.began)

    def log(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:6.1f}] {text}", flush=True)

    def labels(self) -> list[str]:
        """What a reader must know before any number."""
        said = ["Random weights, random token ids."]
        if self.profile.device == "cpu":
            said.append("A tiny model on a CPU: this checks the program, its times mean nothing.")
        if is_memory(self.l3):
            said.append("The storage folder lies in memory (tmpfs): no disk was measured.")
        return said

    def save(self) -> None:
        """Everything so far, atomically."""
        self.report.rows = {(row["case"], row["system"], str(row["size"])): row for row in results.rows(self.cases)}
        self.report.note(
            labels=self.labels(),
            failures=self.problems + results.failures(self.cases),
            skipped=self.skipped,
            seconds=round(time.monotonic() - self.began, 1),
            token_bytes=self.profile.token_bytes,
            runs=self.runs,
            cases=self.cases,
        )

    def spec(self, workload: Workload, load: str) -> str:
        """Digest of what a case was made from."""
        letter = workload.letter
        return results.digest(
            [
                self.profile.setup(letter),
                self.arguments.layout,
                self.arguments.seed,
                workload.sizes(),
                load,
                self.profile.capacity,
                self.profile.flags,
            ]
        )

    def made_otherwise(self) -> list[str]:
        """Recorded cases of the workloads in hand that these settings would not make: never mixed with new ones."""
        return [
            name
            for name, case in self.cases.items()
            if case["workload"] in self.arguments.workloads
            and case["spec"] != self.spec(self.profile.workloads[case["workload"]], case["load"])
        ]

    def missing(self, letter: str, tier: str) -> list[str]:
        """Loads of a workload that are not done on a tier."""
        workload = self.profile.workloads[letter]
        return [
            load
            for load in self.profile.loads[letter]
            if not results.is_done(self.cases, results.key(letter, load, tier), self.spec(workload, load))
        ]

    def servers(self) -> list[tuple[Pools, list[str]]]:
        """Pool sizes and the workloads with cases left to measure there, in the order of `--workloads`."""
        groups: dict[Pools, list[str]] = {}
        for letter in self.arguments.workloads:
            if any(self.missing(letter, tier) for tier in self.arguments.tiers):
                groups.setdefault(self.profile.pools[letter], []).append(letter)
        return list(groups.items())

    def run(self) -> None:
        """Measure what is missing, until the deadline."""
        for pools, letters in self.servers():
            if self.left() < self.arguments.start_seconds:
                self.skip(f"server for {', '.join(letters)}: {self.left():.0f} s are left")
                continue
            session = Session(
                self.profile,
                pools,
                self.arguments.layout,
                self.l3,
                self.out / f"server-{pools.device_tokens}-{pools.dram_tokens}.log",
                self.arguments.port,
                self.arguments.launcher,
                self.left,
                self.arguments.seed,
            )
            self.runs[-1]["servers"].append(session.flags)
            try:
                self.log(f"server for {', '.join(letters)} is starting")
                self.log(f"healthy after {session.start(max(30.0, min(400.0, self.left() - 20))):.1f} s")
                used = [(self.profile.workloads[x], self.profile.setting(x, self.arguments.seed)) for x in letters]
                session.warm_up(lengths_of(used), self.arguments.tiers)
                self.log("warm")
                for letter in letters:
                    for tier in self.arguments.tiers:
                        self.guarded(session, letter, tier)
            except OutOfTime as error:
                self.skip(f"out of time: {error}")
            except (ServerError, RuntimeError, OSError) as error:
                self.problems.append(f"{', '.join(letters)}: {error!r}"[:3000])
                self.log(self.problems[-1])
            finally:
                session.stop()
                self.save()

    def guarded(self, session: Session, letter: str, tier: str) -> None:
        """One tier of a workload; what goes wrong with it costs no other, as long as the server lives."""
        try:
            self.tier(session, letter, tier)
        except (ServerError, RuntimeError, OSError) as error:
            if self.left() <= 0:
                raise OutOfTime(f"{letter}, {tier}: {error}"[:300]) from error
            if not session.server.alive():
                raise
            self.problems.append(f"{letter}, {tier}: {error!r}"[:3000])
            self.log(f"FAILED: {self.problems[-1]}")

    def skip(self, what: str) -> None:
        """Note that something was not measured."""
        self.skipped.append(what)
        self.log(f"skipped: {what}")

    def tier(self, session: Session, letter: str, tier: str) -> None:
        """All missing loads of a workload on one tier."""
        workload = self.profile.workloads[letter]
        setting = self.profile.setting(letter, self.arguments.seed)
        prepared: dict[str, Any] | None = None
        for load in self.missing(letter, tier):
            plan = workload.plan(setting, load)
            if prepared is None or not workload.keeps:
                prepared = session.prepare(plan, tier, setting)
            measured = session.run(workload, plan, load, tier, setting)
            offered = None
            if load not in ("seq", "waves", "inf"):
                due = due_times(plan.measure, load, setting.seed)
                offered = float(load) if load != "trace" else len(due) / max(due[-1], 1e-9)
            case: results.Case = {
                "workload": letter,
                "title": workload.title,
                "load": load,
                "tier": tier,
                "offered": offered,
                "settings": workload.sizes(),
                "setup": self.profile.setup(letter),
                "dram_holds_all": workload.dram_holds_all,
                "token_bytes": self.profile.token_bytes,
                "note": session.note(tier),
                "prepared": prepared,
                "spec": self.spec(workload, load),
                "run": len(self.runs) - 1,
                **measured,
                "done": not any("error" in request for request in measured["requests"]),
            }
            self.cases[results.key(letter, load, tier)] = case
            self.save()
            numbers = results.summary(case)
            good, asked = results.state(case)
            times = " ".join(f"{numbers[name]:8.1f}" for name in ("mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms"))
            tokens = " ".join(f"{name} {numbers[name]}" for name in (*results.LEVELS, "computed"))
            self.log(
                f"{letter} {results.load_title(load):22s} {tier:10s} {numbers['requests']:4d} requests  TTFT mean, "
                f"p50, p99 {times} ms  {numbers['request_throughput']:7.3f} req/s  {tokens}  expected {good}/{asked}  "
                f"(prepared in {prepared['seconds']:.1f} s)"
            )


def render(file: pathlib.Path | None, content: dict[str, Any], out: pathlib.Path) -> None:
    """Write serving.md and the plots into `out`."""
    names: list[str] = []
    if serving_plots.available():
        names = serving_plots.draw(content["cases"], out)
    else:
        print("no plots: matplotlib is not installed (`pip install matplotlib`, then --render)")
    out.mkdir(parents=True, exist_ok=True)
    (out / "serving.md").write_text(markdown(content, names), encoding="utf-8")
    print(f"{out / 'serving.md'}{', ' + str(file) if file else ''}{', plots: ' + ', '.join(names) if names else ''}")


def main() -> int:
    """Run; 0 if everything was measured and every check held."""
    arguments, chosen = parse()
    if arguments.render:
        try:
            content = results.read(arguments.json)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        render(arguments.json, content, arguments.out)
        return 0
    used = [(chosen.workloads[letter], chosen.setting(letter, arguments.seed)) for letter in arguments.workloads]
    problem = too_long(used, chosen)
    if problem:
        print(problem, file=sys.stderr)
        return 2
    try:
        run = Run(arguments, chosen)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    run.run()
    content = json.loads(
        json.dumps({"cases": run.cases, "runs": run.runs, "skipped": run.skipped, "labels": run.labels()})
    )
    render(arguments.json, content, run.out)
    wrong = run.problems + results.failures(run.cases)
    for text in wrong:
        print("FAILED:", text[:400])
    for text in run.skipped:
        print("SKIPPED:", text)
    print("every case measured and as expected" if not wrong + run.skipped else "see above", flush=True)
    return 1 if wrong or run.skipped else 0


if __name__ == "__main__":
    sys.exit(main())
