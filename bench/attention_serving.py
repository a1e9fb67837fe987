# SPDX-License-Identifier: Apache-2.0
"""Real SGLang servers with KV of running requests in host memory, beside one with KV in HBM.

Servers (`--servers`; they run in this order):

host      --attention-backend tardis: KV in host memory, on a GPU 24 GiB of it
hicache   KV in HBM and SGLang's host tier with its defaults (not by default)
resident  KV in HBM, so few tokens of it: FlashAttention-3, on a CPU torch. The others' answers are compared with its

In turn, or all at once on the same GPU (`--beside`), where requests still go to one at a time. Cases (`--cases`, parts
of their names), most important first:

memory    HBM of each server's processes, tokens of its pool, KV in HBM
equality  prompts of 1 to 4,096 tokens and at a chunk's edge, several in flight, a third of them with shared prefixes:
          first tokens, computed and from prefixes, and 16 decoded tokens with the log probabilities of their
          candidates. The bound comes from resident against itself in the same run
beyond    a prompt that is longer than resident's pool
context   by context: TTFT of a recompute and of a prefix hit; times between tokens, and KV read by a step beside
          what the link carries
batch     requests in flight whose prefixes are in the pool: output, times between tokens, KV
rate      prompts that nobody has seen, at offered rates

What must hold, else it is listed under "failures" and the exit status is 1: answers within the bound, controls beyond
it, no KV of `host` in HBM, cached tokens as each case says. What is only aimed at is printed at the end, too; "checks"
has all of it.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import shlex
import signal
import sys
import threading
import time
from collections.abc import Sequence

from attention_serving_cases import CASES, Cases
from attention_serving_checks import checks
from attention_serving_profile import DEFAULT, KINDS, REFERENCE, Profile, profile
from attention_serving_server import AttentionServer, WrongAnswer, gpu_used
from campaign import BaseCampaign
from common import add_common_arguments
from serving_client import OutOfTime
from sglang_server import ServerError

STOPPING = 10.0
"""Seconds that servers may take to stop: requests end so long before the deadline."""
PORTS = 200
"""Between two servers: SGLang takes some behind its own."""


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--servers", default=",".join(DEFAULT), help="comma list (default %(default)s)")
    parser.add_argument("--cases", default="", help="comma list of parts of their names (default: all)")
    parser.add_argument("--beside", action="store_true", help="start all servers at once, on the same GPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model-path", type=pathlib.Path, help="a folder with config.json (weights are random)")
    parser.add_argument(
        "--tardis-config", type=json.loads, default={}, metavar="JSON", help='of `host`: {"attention_host": "64GiB"}'
    )
    parser.add_argument(
        "--server-flag", action="append", default=[], metavar="SERVER=FLAGS", help="further flags of one (repeatable)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of prompts (default %(default)s)")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."), help="folder for logs and requests")
    parser.add_argument("--append", action="store_true", help="keep what --json FILE holds already")
    parser.add_argument("--deadline", type=float, default=3600, metavar="S", help="start nothing that may end later")
    parser.add_argument("--start-seconds", type=float, metavar="S", help="least time to start a server (60; CPU 30)")
    parser.add_argument("--port", type=int, default=31800)
    arguments = parser.parse_args(words)
    asked = arguments.servers.split(",")
    if unknown := [name for name in asked if name not in KINDS]:
        parser.error(f"--servers: {unknown[0]!r} is not one of {', '.join(KINDS)}")
    arguments.servers = [name for name in KINDS if name in asked]
    parts = arguments.cases.split(",") if arguments.cases else []
    if unknown := [part for part in parts if not any(part in name for name in CASES)]:
        parser.error(f"--cases: {unknown[0]!r} is part of none of {', '.join(CASES)}")
    arguments.cases = [name for name in CASES if not parts or any(part in name for part in parts)]
    flags = collections.defaultdict(list)
    for text in arguments.server_flag:
        name, sign, words_of_it = text.partition("=")
        if name not in KINDS or not sign:
            parser.error(f"--server-flag: expected SERVER=FLAGS with one of {', '.join(KINDS)}, found {text!r}")
        flags[name] += shlex.split(words_of_it)
    arguments.server_flag = dict(flags)
    if arguments.start_seconds is None:
        arguments.start_seconds = 30.0 if arguments.device == "cpu" else 60.0
    return arguments


class Campaign(BaseCampaign):
    """One start of the program."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.profile: Profile = profile(arguments)
        super().__init__(arguments, arguments.out)
        labels = ["Random weights, random token ids."]
        if arguments.device == "cpu":
            labels.append(
                "A tiny model on a CPU: this checks the program, its times mean nothing. HBM was not looked at."
            )
        if arguments.beside:
            labels.append("All servers were on one GPU at once; requests went to one at a time.")
        self.report.note(labels=labels, token_bytes=self.profile.token_bytes)
        self.save()

    def left(self) -> float:
        """Seconds for requests: servers are stopped behind them."""
        return super().left() - STOPPING


class Run:
    """Servers, from their start to their end."""

    def __init__(self, campaign: Campaign) -> None:
        self.campaign = campaign
        self.up: list[tuple[AttentionServer, Cases]] = []

    def start(self, names: Sequence[str]) -> None:
        """Start servers at once. One that does not come up is a failure, and costs no other."""
        campaign, used = self.campaign, gpu_used()
        if not campaign.time_for(f"server {' and '.join(names)}", campaign.arguments.start_seconds):
            return
        begun = time.monotonic()
        starting, broken = [], []
        for name in names:
            port = campaign.arguments.port + PORTS * list(KINDS).index(name)
            server = AttentionServer(campaign, campaign.profile, KINDS[name], port)
            server.used_before, server.beside = used, names
            campaign.report.note(**{f"server_{name}": server.flags})
            campaign.log(f"{name} is starting: {server.kind.title}")
            self.up.append((server, Cases(server)))
            starting.append(self.up[-1])
            server.server.launch()
        for server, cases in starting:
            try:
                server.server.wait_until_healthy(max(1.0, campaign.left()))
                campaign.report.add("server start", server.name, "-", time.monotonic() - begun, "s")
                server.learn()
                cases.warm_up()
                campaign.log(f"{server.name} is up: a pool of {server.pool} tokens")
            except (OutOfTime, ServerError, WrongAnswer, OSError) as error:
                broken.append(server)
                if campaign.left() <= 0:
                    campaign.skip(f"{server.name}: out of time while it started")
                else:
                    campaign.fail(f"{server.name}: {error}")
        self.stop(broken)

    def stop(self, servers: Sequence[AttentionServer]) -> None:
        """End them at once, whatever happened."""
        begun = time.monotonic()
        threads = [threading.Thread(target=server.server.stop, kwargs={"timeout": STOPPING - 2}) for server in servers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if servers:
            self.campaign.log(
                f"{', '.join(server.name for server in servers)} stopped in {time.monotonic() - begun:.1f} s"
            )
        self.up = [(server, cases) for server, cases in self.up if server not in servers]

    def case(self, name: str, server: AttentionServer, cases: Cases) -> None:
        """One case on one server; what it raises is noted."""
        campaign, (seconds, call) = self.campaign, cases.plan()[name]
        what = f"{server.name}: {name}"
        if not campaign.time_for(what, seconds):
            return
        begun = time.monotonic()
        try:
            call()
        except OutOfTime as error:
            campaign.skip(f"{what}: out of time: {error}")
        except Exception as error:
            campaign.fail(f"{what}: {error!r}")
        took = round(time.monotonic() - begun, 1)
        campaign.report.note(
            case_seconds={**campaign.report.extra.get("case_seconds", {}), what: took},
        )
        campaign.log(f"{what}: {took} s, at most {seconds:.0f} were expected")
        campaign.save()
        if not server.server.alive():
            campaign.fail(f"{server.name}: the server is gone\n{server.server.log_tail()}")
            self.stop([server])

    def cases(self) -> None:
        """All cases of the servers that are up; each case on all of them before the next one."""
        for name in self.campaign.arguments.cases:
            for server, cases in list(self.up):
                if (server, cases) in self.up:
                    self.case(name, server, cases)


def conclude(campaign: Campaign) -> None:
    """Print and keep what follows from all rows; what must hold and does not becomes a failure."""
    rows, token_bytes = campaign.report.rows, campaign.profile.token_bytes
    pools = {system: row["value"] * token_bytes for (case, system, _), row in rows.items() if case == "pool"}
    found = checks(rows, int(pools.get(REFERENCE, 0)), int(pools.get("host", 0)))
    asked = campaign.arguments.servers
    if "equality" in campaign.arguments.cases and REFERENCE not in asked and not campaign.arguments.append:
        campaign.skip(f"equality: answers were not compared, for want of the server {REFERENCE}")
    for check in found:
        print(check.text())
        if not check.held and check.name.startswith("must"):
            campaign.failures.append(check.text())
    campaign.report.note(checks=[check.to_json() for check in found])
    campaign.save()
    for text in campaign.failures:
        print("FAILED:", text[:600])
    for text in campaign.skipped:
        print("SKIPPED:", text)
    print("see above" if campaign.failures + campaign.skipped else "all cases as expected", flush=True)


def main(words: list[str] | None = None) -> int:
    """Measure the servers that were asked for; 0 if everything held and nothing was skipped."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are stopped then, too
    arguments = parse(words)
    campaign = Campaign(arguments)
    if not campaign.limits:
        campaign.measure_limits()
    run = Run(campaign)
    for names in [arguments.servers] if arguments.beside else [[name] for name in arguments.servers]:
        try:
            run.start(names)
            run.cases()
        finally:
            run.stop([server for server, _ in run.up])
    conclude(campaign)
    return 1 if campaign.failures or campaign.skipped else 0


if __name__ == "__main__":
    sys.exit(main())
