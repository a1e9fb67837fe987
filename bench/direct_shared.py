# SPDX-License-Identifier: Apache-2.0
"""Long prompts over one shared context: how many fit, in which order they are asked, and what was found."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence

from direct_server import DirectServer, WrongState
from serving_client import Outcome
from serving_results import percentile
from serving_workloads import Request, full_hit


def order(prompts: int, requests: int, together: int, seed: int) -> list[int]:
    """`requests` prompts in a random order in which none comes again within the `together` that follow it, so that
    it is neither in flight nor, as a rule, still in the device pool when it is asked again.

    Raises:
        ValueError: there are too few prompts for that.
    """
    if prompts <= together:
        raise ValueError(f"{together} clients at a time: expected more than as many prompts, found {prompts}")
    draw = random.Random(f"{seed}/shared context/order")
    chosen: list[int] = []
    for _ in range(requests):
        recent = chosen[-together:]
        chosen.append(draw.choice([number for number in range(prompts) if number not in recent]))
    return chosen


class SharedContext:
    """The cases over one shared context on one server. All prompts are in the DRAM tier before anything is timed."""

    def __init__(self, server: DirectServer, prompts: Sequence[Request]) -> None:
        self.server, self.prompts = server, list(prompts)
        self.profile, self.campaign = server.profile, server.campaign
        self.warm = False

    def asked(self) -> list[Request]:
        """The requests of both loads."""
        profile = self.profile
        numbers = order(len(self.prompts), profile.requests, profile.together, self.campaign.arguments.seed)
        return [self.prompts[number] for number in numbers]

    def prepare(self) -> None:
        """All prompts into an empty DRAM tier, and each asked once more: a hit on the whole of it, from there."""
        if self.warm:
            return
        server = self.server
        server.flush()
        for request in self.prompts:
            server.ask(request, "any", what="shared context, first")
            server.settle(quiet=0.3)
        for request in self.prompts:  # what an offload left out is offered again
            server.ask(request, "any", what="shared context, again")
        server.settle(quiet=0.3)
        outcomes = [server.ask(request, "any", what="shared context, whole") for request in self.prompts]
        short = self.not_whole(outcomes)
        if short:
            raise WrongState(f"{server.kind.name}: {short} of {len(outcomes)} prompts are not whole in the DRAM tier")
        self.warm = True

    def closed_loop(self) -> None:
        """One at a time, then a few clients that each send a request when the one before is answered."""
        self.prepare()
        client, asked = self.server.client, self.asked()
        self.measure(
            "one at a time",
            lambda: client.one_by_one(asked[: self.profile.alone], lambda _request: None, top=False),
        )
        self.measure(
            "closed loop",
            lambda: client.closed_loop(asked, self.profile.together, lambda _request: None),
            clients=self.profile.together,
        )

    def all_at_once(self) -> None:
        """The same requests, all sent at the same time: most are for a prompt that another one is just loading."""
        self.prepare()
        asked = self.asked()
        self.measure(
            "all at once", lambda: self.server.client.together(asked, [0.0] * len(asked), lambda _request: None)
        )

    def measure(self, load: str, send: Callable[[], tuple[list[Outcome], float]], **extra: object) -> None:
        """Rows of one load."""
        server, case = self.server, f"shared context, {load}"
        counted = server.published()
        outcomes, seconds = send()
        server.sent += server.pools.device  # whatever was pushed out: nothing of before counts as there
        broken = [outcome.error for outcome in outcomes if outcome.error]
        if broken:
            raise RuntimeError(f"{case}: {len(broken)} of {len(outcomes)} failed: {broken[0]}")
        for outcome in outcomes:
            self.campaign.record(server.kind.name, case, outcome, good=True)
        grown = server.grown(counted)
        tokens = {tier: sum(outcome.cached[tier] for outcome in outcomes) for tier in outcomes[0].cached}
        prompt_tokens = sum(outcome.prompt_tokens for outcome in outcomes)
        tokens["computed"] = prompt_tokens - sum(tokens.values())
        if server.kind.door == "direct":  # whose hits are all the host's for SGLang
            for where in ("memory", "file"):
                pages = grown.get(f"tardis_direct_{where}_pages_total", 0.0)
                tokens[f"from_{where}"] = round(pages * self.profile.page_size)
        count, times = len(outcomes), [outcome.ttft for outcome in outcomes]
        link = self.campaign.seconds_at("host_to_gpu_gbps", tokens["host"] + tokens["storage"])
        server.row(f"{case}: ttft", count, times, p99=round(percentile(times, 99) * 1e3, 3))
        add, name = self.campaign.report.add, server.kind.name
        add(f"{case}: mean ttft", name, count, statistics.fmean(times) * 1e3, "ms")
        add(f"{case}: wall", name, count, seconds, "s", link, limit_is="the host's tokens over the link alone")
        add(
            f"{case}: throughput",
            name,
            count,
            count / seconds,
            "req/s",
            prompts=len(self.prompts),
            prompt_tokens=prompt_tokens,
            not_whole_hits=self.not_whole(outcomes),
            **tokens,
            **extra,
        )

    def not_whole(self, outcomes: Sequence[Outcome]) -> int:
        """Requests of which not everything was cached that can be."""
        page = self.profile.page_size
        return sum(sum(found.cached.values()) != full_hit(found.prompt_tokens, page) for found in outcomes)
