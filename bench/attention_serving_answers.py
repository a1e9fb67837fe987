# SPDX-License-Identifier: Apache-2.0
"""The case `equality` of attention_serving.py: asks all servers the same prompts, several at a time.

Every server but the reference decodes some tokens behind each prompt, then gets the prompt again, from its prefix. The
reference is asked the same, the prompt once more without a prefix, and, for what itself and others decoded, the log
probabilities of those tokens as a part of the prompt: from its prefill.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from attention_serving_equality import Comparison, bound_of, decode, encode, encode_steps, first, places, verdict
from attention_serving_profile import REFERENCE
from attention_serving_server import AttentionServer, Candidates, Scored, WrongAnswer
from serving_workloads import Request, full_hit

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Told:
    """What the reference says to one prompt."""

    first: Scored
    hit: Scored
    again: Scored
    """Without a prefix."""
    other: Scored | None
    """To its last page behind other tokens; None: the prompt is no longer than that."""
    scores: dict[str, tuple[Candidates, ...]]
    """By server: of the tokens that it decoded."""


def all_of(work: Callable[[Request], T], asked: Sequence[Request], clients: int) -> dict[str, T]:
    """By name, so many at a time; the first error ends it."""
    pool = ThreadPoolExecutor(clients)
    try:
        futures = {request.name: pool.submit(work, request) for request in asked}
        return {name: future.result() for name, future in futures.items()}
    finally:  # after an error without those that are in flight, which end with their server
        pool.shutdown(wait=False, cancel_futures=True)


class Equality:
    """The case on one server, and with the reference's answers the comparison."""

    def __init__(self, server: AttentionServer) -> None:
        self.server, self.campaign, self.profile = server, server.campaign, server.profile
        self.asked = self.profile.compared(self.campaign.arguments.seed)

    def seconds(self) -> float:
        """How long it may take."""
        tokens = sum(len(request.tokens) for request in self.asked)
        steps = len(self.asked) * self.profile.decoded
        often = 1 if self.server.name != REFERENCE else 3 + len(self.campaign.answers)
        return self.profile.seconds(tokens * often, tokens // len(self.asked), steps)

    def run(self) -> None:
        """Ask, and compare once the reference was asked."""
        if self.server.name != REFERENCE:
            told = all_of(self.answer, self.asked, self.profile.clients)
            self.check_hits({name: hit for name, (_, hit) in told.items()})
            kept = {name: {"first": encode(answer), "hit": encode(hit)} for name, (answer, hit) in told.items()}
            self.campaign.answers[self.server.name] = {"prompts": self.digest(), "answers": kept}
            return
        others = {server: self.kept(server) for server in self.campaign.answers}
        said = all_of(lambda request: self.tell(request, others), self.asked, self.profile.clients)
        self.check_hits({name: one.hit for name, one in said.items()})
        self.keep(said, others)
        self.compare(said, others)
        self.campaign.answers.clear()  # they are in the file beside the log

    def keep(self, said: dict[str, Told], others: dict[str, dict[str, tuple[Scored, Scored]]]) -> None:
        """Write all answers, a line for each prompt."""
        with open(self.campaign.out / "answers.jsonl", "w", encoding="utf-8") as file:
            for request in self.asked:
                one = said[request.name]
                line = {"name": request.name, "prompt_tokens": len(request.tokens), REFERENCE: encode(one.first)}
                scores = {f"scores_{server}": encode_steps(steps) for server, steps in one.scores.items()}
                answers = {server: encode(answered[request.name][0]) for server, answered in others.items()}
                file.write(json.dumps({**line, **answers, **scores}) + "\n")

    def digest(self) -> str:
        """Of all prompts."""
        return hashlib.sha256(json.dumps([request.tokens for request in self.asked]).encode()).hexdigest()[:16]

    def kept(self, server: str) -> dict[str, tuple[Scored, Scored]]:
        """What a server said, to these prompts."""
        kept = self.campaign.answers[server]
        if kept["prompts"] != self.digest():
            raise WrongAnswer(f"expected answers of {server} to the same prompts, found others; leave out --append")
        return {name: (decode(one["first"]), decode(one["hit"])) for name, one in kept["answers"].items()}

    # ---- requests ----

    def answer(self, request: Request) -> tuple[Scored, Scored]:
        """What a server decodes behind the prompt, and its first token from the prefix."""
        return self.server.ask(request.tokens, self.profile.decoded), self.server.ask(request.tokens, 1)

    def tell(self, request: Request, others: dict[str, dict[str, tuple[Scored, Scored]]]) -> Told:
        """What the reference says."""
        ask, tokens, page = self.server.ask, request.tokens, self.profile.page_size
        own, hit = self.answer(request)
        again = ask(tokens, 1, salt=request.name)
        if again.cached:
            raise WrongAnswer(f"{self.server.name}, with a salt: expected 0 cached tokens, found {again.cached}")
        other = None
        if len(tokens) > page:
            context = self.profile.request(self.campaign.arguments.seed, f"other/{request.name}", len(tokens) - page)
            other = ask(context.tokens + tokens[-page:], 1)
        decoded = {REFERENCE: own.ids, **{name: answers[request.name][0].ids for name, answers in others.items()}}
        scores = {name: ask(tokens + ids, 1, start=len(tokens) - 1).prompt for name, ids in decoded.items()}
        return Told(own, hit, again, other, scores)

    def check_hits(self, hits: dict[str, Scored]) -> None:
        """That what was to be hits were hits, but for a few that others pushed out of the pool."""
        wanted = {request.name: full_hit(len(request.tokens), self.profile.page_size) for request in self.asked}
        short = [name for name, hit in hits.items() if hit.cached < wanted[name]]
        if 4 * len(short) > len(hits):
            raise WrongAnswer(f"{self.server.name}: expected prefixes in the pool, found {len(short)} that are not")

    # ---- comparison ----

    def compare(self, said: dict[str, Told], others: dict[str, dict[str, tuple[Scored, Scored]]]) -> None:
        """The reference with itself, with the others, and what must not be the same."""
        again = {name: first(one.again, one.first) for name, one in said.items()}
        hits = {name: first(one.hit, one.first) for name, one in said.items() if one.hit.cached}
        steps = {}
        for name, one in said.items():
            steps.update(places(name, one.first, one.scores[REFERENCE]))
        near = bound_of([*again.values(), *hits.values()])
        near_steps = bound_of(steps.values())
        self.row("recomputed", REFERENCE, Comparison(again, near))
        self.row("prefix hit", REFERENCE, Comparison(hits, near))
        self.row("decoded", REFERENCE, Comparison(steps, near_steps))
        self.controls(said, near)
        for server, answers in others.items():
            steps = {}
            for name, (answer, _hit) in answers.items():
                steps.update(places(name, answer, said[name].scores[server]))
            found = {name: first(answer, said[name].first) for name, (answer, _hit) in answers.items()}
            from_prefix = {name: first(hit, said[name].first) for name, (_answer, hit) in answers.items() if hit.cached}
            self.row("first token", server, Comparison(found, near))
            self.row("prefix hit", server, Comparison(from_prefix, near))
            self.row("decoded", server, Comparison(steps, near_steps))

    def row(self, what: str, server: str, comparison: Comparison) -> None:
        """Add the largest difference; a failure if it is beyond the bound."""
        if not comparison.found:
            raise WrongAnswer(f"{server}, {what}: nothing was compared")
        summary = comparison.summary()
        self.campaign.report.add(
            f"equality, {what}", server, summary["compared"], summary["largest"], "nat", comparison.bound, **summary
        )
        if differing := comparison.differing:
            lengths = {request.name: len(request.tokens) for request in self.asked}
            named = [f"{name} ({lengths[name.split('/')[0]]} tokens)" for name in differing[:10]]
            self.campaign.fail(f"equality, {what}, {server}: {len(differing)} differ: {summary}: {', '.join(named)}")

    def controls(self, said: dict[str, Told], near: float) -> None:
        """Another prompt's answers must differ; so must some to the same last page behind other tokens, or the
        comparison says nothing of KV.
        """
        told = list(said.values())
        swapped = [first(one.first, told[number - 1].first) for number, one in enumerate(told)]
        context = [first(one.other, one.first) for one in told if one.other is not None]
        for what, found, least in (("another prompt", swapped, len(swapped)), ("another context", context, 1)):
            noticed = sum(verdict(one, near) == "differs" for one in found)
            self.campaign.report.add(f"control, {what}", REFERENCE, len(found), noticed, "noticed", least=least)
            if noticed < least:
                self.campaign.fail(
                    f"control, {what}: expected {least} or more of {len(found)} answers to differ, found {noticed}"
                )
