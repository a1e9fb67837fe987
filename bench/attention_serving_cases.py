# SPDX-License-Identifier: Apache-2.0
"""What attention_serving.py measures on a server, beside the comparison of answers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from attention_serving_answers import Equality
from attention_serving_server import AttentionServer, WrongAnswer, gpu_used
from serving_client import Outcome
from serving_results import percentile
from serving_workloads import Request, due_times, full_hit

GIB = 2**30
TOO_LONG = "exceeds the maximum allowed length"


def together_gaps(outcomes: Sequence[Outcome]) -> list[float]:
    """Seconds between tokens of each answer, while all are being decoded."""
    begin = max(outcome.sent + outcome.ttft for outcome in outcomes)
    end = min(outcome.sent + outcome.latency for outcome in outcomes)
    gaps = []
    for outcome in outcomes:
        stamps = [outcome.sent + stamp for stamp in outcome.stamps]
        gaps += [after - before for before, after in itertools.pairwise(stamps) if begin <= before and after <= end]
    return gaps


class Cases:
    """The cases of one server."""

    def __init__(self, server: AttentionServer) -> None:
        self.server, self.campaign, self.profile = server, server.campaign, server.profile
        self.report, self.name, self.kind = self.campaign.report, server.name, server.kind
        self.equality = Equality(server)

    def plan(self) -> dict[str, tuple[float, Callable[[], None]]]:
        """By name, in the order of their worth: the seconds that a case may take, and what to call."""
        profile, longest = self.profile, max(self.profile.batches)
        batch = longest * profile.batch_context
        requests = profile.rate_requests * len(profile.rates)
        answered = profile.rate_requests * sum(1 / rate for rate in profile.rates)
        reads = 4 * profile.rate_prompt  # of a step, with some in flight
        return {
            "memory": (2.0, self.memory),
            "equality": (self.equality.seconds(), self.equality.run),
            "beyond": (self.profile.seconds(profile.beyond, profile.beyond, 4), self.beyond),
            "context": (self.context_seconds(profile.contexts[0]), self.context),
            "batch": (profile.seconds(min(batch, self.server.pool), profile.batch_context), self.batch),
            "rate": (answered + profile.seconds(requests * profile.rate_prompt, reads), self.rate),
        }

    def context_seconds(self, tokens: int) -> float:
        """How long one context may take."""
        often = self.profile.repetitions
        return self.profile.seconds(tokens, often * tokens)

    def add(
        self, case: str, size: object, value: float, unit: str, limit: float | None = None, **extra: object
    ) -> None:
        """A row of this server."""
        self.report.add(case, self.name, size, value, unit, limit, **extra)

    def warm_up(self) -> None:
        """Kernels, of a prompt and of its prefix, so that no measured request is a first one."""
        for tokens in (self.profile.page_size, self.profile.batch_context):
            request = self.profile.request(self.campaign.arguments.seed, f"warm-up/{tokens}", tokens)
            self.server.time(request, 0, "warm-up")
            self.server.time(request, full_hit(tokens, self.profile.page_size), "warm-up")

    # ---- memory ----

    def memory(self) -> None:
        """The pool's size, and where it lies."""
        self.add("pool", "tokens", self.server.pool, "tok", bytes=self.server.pool * self.profile.token_bytes)
        if self.profile.device == "cpu":
            return
        kv = self.server.kv_in_hbm()
        if kv is None:
            raise WrongAnswer(f"{self.name}: expected a line of the log that tells of its KV pool, found none")
        self.add("KV in HBM", "GiB", kv / GIB, "GiB", bytes=kv)
        self.hbm("serving")

    def hbm(self, when: str) -> None:
        """HBM of its processes, or of all servers where nvidia-smi does not tell processes apart."""
        weights = self.profile.weight_bytes
        if (used := self.server.hbm()) is not None:
            self.add("HBM", when, used / GIB, "GiB", bytes=used, weights=weights)
        elif (everything := gpu_used()) is not None:
            used = everything - (self.server.used_before or 0)
            servers = list(self.server.beside)
            self.report.add("HBM", "all servers", when, used / GIB, "GiB", bytes=used, weights=weights, servers=servers)
        else:
            raise WrongAnswer("nvidia-smi does not tell how much HBM is used")

    # ---- beyond ----

    def beyond(self) -> None:
        """A prompt that is longer than the pool in HBM."""
        profile, tokens = self.profile, self.profile.beyond
        request = profile.request(self.campaign.arguments.seed, "beyond", tokens, 4)
        if not profile.fits(1, tokens + 4, self.server.pool):
            try:
                self.server.ask(request.tokens, 4)
            except WrongAnswer as error:
                if TOO_LONG not in str(error):
                    raise
                self.add("beyond", tokens, 0, "ok", said=str(error)[:400])
                return
            raise WrongAnswer(f"{self.name}: expected a prompt of {tokens} tokens to be refused, found an answer")
        if profile.device != "cpu":
            self.hbm("before the long prompt")
        outcome = self.server.time(request, 0, "beyond")
        self.add("beyond", tokens, 1, "ok", ttft_ms=round(outcome.ttft * 1e3, 3))
        if profile.device != "cpu":
            self.hbm("after the long prompt")

    # ---- times ----

    def link(self) -> float | None:
        """GB/s at which KV can be read at most, where that is measured."""
        return self.campaign.limits.get("host_to_gpu_gbps") if self.kind.in_host else None

    def between_tokens(self, case: str, size: object, gaps: Sequence[float], step_tokens: float) -> None:
        """Rows of times between tokens, and of KV that was read meanwhile."""
        if not gaps:
            raise WrongAnswer(f"{self.name}, {case}, {size}: no two tokens came while all were decoded")
        median = percentile(gaps, 50)
        self.add(f"{case}: between tokens", size, median * 1e3, "ms", n=len(gaps))
        self.add(f"{case}: between tokens, p99", size, percentile(gaps, 99) * 1e3, "ms", n=len(gaps))
        self.add(f"{case}: KV", size, step_tokens * self.profile.token_bytes / median / 1e9, "GB/s", self.link())

    def context(self) -> None:
        """A prompt, and the prompt again with tokens behind it, by length."""
        profile = self.profile
        for tokens in profile.contexts:
            if not profile.fits(1, tokens + profile.new, self.server.pool):
                self.campaign.log(f"{self.name}: {tokens} tokens do not fit its pool of {self.server.pool}")
                continue
            if not self.campaign.time_for(f"{self.name}: context, {tokens} tokens", self.context_seconds(tokens)):
                return
            seed = self.campaign.arguments.seed
            cold = self.server.time(profile.request(seed, f"context/{tokens}", tokens, 1), 0, "recompute")
            self.add("context: recompute, TTFT", tokens, cold.ttft * 1e3, "ms")
            hits = [
                self.server.time(
                    profile.request(seed, f"context/{tokens}", tokens),
                    full_hit(tokens, profile.page_size),
                    "prefix hit",
                )
                for _ in range(profile.repetitions)
            ]
            self.add("context: prefix hit, TTFT", tokens, percentile([hit.ttft for hit in hits], 50) * 1e3, "ms")
            gaps = [gap for hit in hits for gap in together_gaps([hit])]
            self.between_tokens("context", tokens, gaps, tokens + profile.new / 2)

    def batch(self) -> None:
        """Requests in flight whose prefixes are in the pool."""
        profile, tokens = self.profile, self.profile.batch_context
        fitting = [count for count in profile.batches if profile.fits(count, tokens + profile.new, self.server.pool)]
        for count in set(profile.batches) - set(fitting):
            self.campaign.log(f"{self.name}: {count} requests of {tokens} tokens do not fit {self.server.pool}")
        seed = self.campaign.arguments.seed
        asked = [profile.request(seed, f"batch/{number}", tokens) for number in range(max(fitting, default=0))]
        for request in asked:
            self.server.time(Request(request.name, request.tokens, 1), 0, "batch, first")
        for count in fitting:
            if not self.campaign.time_for(f"{self.name}: batch of {count}", profile.seconds(0, count * tokens)):
                return
            outcomes, seconds = self.server.client.together(asked[:count], [0.0] * count, lambda _request: None)
            self.server.require(outcomes, full_hit(tokens, profile.page_size), f"batch of {count}")
            self.add("batch: output", count, count * profile.new / seconds, "tok/s")
            self.between_tokens("batch", count, together_gaps(outcomes), count * (tokens + profile.new / 2))

    def rate(self) -> None:
        """Prompts that nobody has seen, at given times."""
        profile, seed = self.profile, self.campaign.arguments.seed
        for rate in profile.rates:
            asked = [
                profile.request(seed, f"rate/{rate}/{number}", profile.rate_prompt)
                for number in range(profile.rate_requests)
            ]
            expected = len(asked) / rate + profile.seconds(profile.rate_prompt, 4 * profile.rate_prompt)
            if not self.campaign.time_for(f"{self.name}: {rate} requests a second", expected):
                return
            due = due_times(asked, str(rate), seed)
            outcomes, seconds = self.server.client.together(asked, due, lambda _request: None)
            self.server.require(outcomes, 0, f"{rate} requests a second")
            times = [outcome.ttft * 1e3 for outcome in outcomes]
            gaps = [after - before for outcome in outcomes for before, after in itertools.pairwise(outcome.stamps)]
            self.add("rate: TTFT", rate, percentile(times, 50), "ms", n=len(times))
            self.add("rate: TTFT, p99", rate, percentile(times, 99), "ms", n=len(times))
            self.add("rate: between tokens, p99", rate, percentile(gaps, 99) * 1e3, "ms", n=len(gaps))
            self.add("rate: output", rate, len(asked) * profile.new / seconds, "tok/s")


CASES = ("memory", "equality", "beyond", "context", "batch", "rate")
