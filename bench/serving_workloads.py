# SPDX-License-Identifier: Apache-2.0
"""The requests of serving.py: six workloads, made from a seed alone, so that every tier answers the same ones.

A workload gives a :class:`Plan` for a load: what to store first (`prepare`) and what to measure. Prompts are token ids.
Nothing here talks to a server.
"""

from __future__ import annotations

import abc
import dataclasses
import json
import math
import pathlib
import random
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

FIRST_TOKEN = 16
"""The first few ids of a vocabulary are special, so prompts leave them out."""
TRACE_BLOCK = 512
"""Tokens that one hash id of a Mooncake-style trace stands for."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and what is known about it in advance."""

    name: str
    """Unique in its plan, and the same for every tier."""
    tokens: tuple[int, ...]
    new_tokens: int = 1
    wave: int = 0
    """With the load `waves`: the requests of a wave are sent together, once the wave before is answered."""
    arrival: float | None = None
    """Seconds in a recorded trace."""
    expect: int | None = None
    """Cached tokens that a tier holding everything stored before must report; None where that depends on the tier."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to send for one load of a workload."""

    prepare: tuple[Request, ...]
    measure: tuple[Request, ...]
    reset: bool = False
    """Between both: put what was stored into the tier under test alone (storage tiers drop device and DRAM pools)."""
    flush_each: bool = False
    """The same before every single request (one at a time only)."""
    reference: bool = False
    """Ask each prompt again at once, from the device pool, to compare the answers (one at a time only)."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a workload has to know about server and run."""

    page_size: int
    vocabulary: int
    dram_tokens: int
    """Tokens that the server's host pool (the DRAM tier) holds."""
    seed: int = 1


def token_ids(label: str, count: int, vocabulary: int) -> tuple[int, ...]:
    """`count` random token ids; the label is the seed."""
    return tuple(random.Random(label).choices(range(FIRST_TOKEN, vocabulary), k=count))


def full_hit(tokens: int, page_size: int) -> int:
    """Cached tokens that a hit on a complete prompt reports: the last token is always computed, so not its page."""
    return (tokens - 1) // page_size * page_size


@dataclasses.dataclass(frozen=True)
class Workload(abc.ABC):
    """Base of the six. Fields are the sizes that a profile or `--set` may change."""

    letter: ClassVar[str]
    title: ClassVar[str]
    loads: ClassVar[tuple[str, ...]]
    """Loads that fit: `seq` (one at a time), `waves`, `trace` (as recorded), `rate` (a number of requests a second)."""
    keeps: ClassVar[bool] = False
    """One preparation serves several loads."""
    dram_holds_all: ClassVar[bool] = False
    """Made for a DRAM tier that holds everything, which then is the bound for the storage tiers."""

    @abc.abstractmethod
    def plan(self, setting: Setting, load: str) -> Plan:
        """The requests for one load."""

    def sizes(self) -> dict[str, Any]:
        """The fields, as they are recorded."""
        return dataclasses.asdict(self)

    def longest_prompt(self, setting: Setting) -> int:
        """Tokens of the longest prompt: the device pool must hold it."""
        plan = self.plan(setting, self.loads[0])
        return max(len(request.tokens) for request in (*plan.prepare, *plan.measure))


@dataclasses.dataclass(frozen=True)
class LvEval(Workload):
    """Long prompts over one shared context (LV-Eval as in the TARDIS paper): all asked before, now asked again."""

    letter, title, loads = "a", "LV-Eval-like", ("seq", "rate")
    keeps, dram_holds_all = True, True
    prompts: int = 8
    shortest: int = 46_000
    longest: int = 56_000
    shared: int = 10_428

    def plan(self, setting: Setting, load: str) -> Plan:
        label = f"{setting.seed}/lveval"
        lengths = random.Random(f"{label}/lengths")
        shared = token_ids(f"{label}/shared", self.shared, setting.vocabulary)
        asked = []
        for number in range(self.prompts):
            length = lengths.randint(self.shortest, self.longest)
            own = token_ids(f"{label}/{number}", length - self.shared, setting.vocabulary)
            asked.append(Request(f"p{number}", shared + own, expect=full_hit(length, setting.page_size)))
        return Plan(tuple(asked), tuple(asked), reset=True, reference=True)


@dataclasses.dataclass(frozen=True)
class MultiTurn(Workload):
    """Conversations side by side: each round's prompt is the one before plus `added` tokens.

    All clients wait for each other after a round, so that every tier sees the same order. History is fixed, not what
    the model answered.
    """

    letter, title, loads = "b", "multi-turn", ("waves",)
    clients: int = 6
    rounds: int = 10
    added: int = 4096

    def plan(self, setting: Setting, load: str) -> Plan:
        asked = []
        talks = [
            token_ids(f"{setting.seed}/turns/{client}", self.rounds * self.added, setting.vocabulary)
            for client in range(self.clients)
        ]
        for number in range(self.rounds):
            for client, talk in enumerate(talks):
                asked.append(Request(f"c{client}r{number}", talk[: (number + 1) * self.added], wave=number))
        return Plan((), tuple(asked))


@dataclasses.dataclass(frozen=True)
class Trace(Workload):
    """The first requests of a Mooncake-style conversation trace, all lengths divided by `divisor`.

    A record has `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, one a block of 512 tokens; equal ids
    are equal tokens. Without a file, records of the same form are drawn (`synthetic_trace`).
    """

    letter, title, loads = "c", "conversation trace", ("trace", "rate")
    file: str = ""
    requests: int = 300
    divisor: int = 16

    def sizes(self) -> dict[str, Any]:
        return {**super().sizes(), "file": pathlib.Path(self.file).name if self.file else "drawn"}

    def records(self, setting: Setting) -> list[dict[str, Any]]:
        """The first records of the file, or drawn ones."""
        return read_trace(self.file, self.requests) if self.file else synthetic_trace(self.requests, setting.seed)

    def plan(self, setting: Setting, load: str) -> Plan:
        block = TRACE_BLOCK // self.divisor
        asked = []
        for number, record in enumerate(self.records(setting)):
            length = max(1, record["input_length"] // self.divisor)
            ids: list[int] = []
            for identity in record["hash_ids"]:
                ids += token_ids(f"{setting.seed}/trace/{identity}", block, setting.vocabulary)
            if len(ids) < length:  # a trace may leave out the last, partial block
                ids += token_ids(f"{setting.seed}/trace/end/{number}", length - len(ids), setting.vocabulary)
            asked.append(
                Request(
                    f"t{number}",
                    tuple(ids[:length]),
                    new_tokens=max(1, record["output_length"] // self.divisor),
                    arrival=record["timestamp"] / 1000,
                )
            )
        return Plan((), tuple(asked))


@dataclasses.dataclass(frozen=True)
class HitRate(Workload):
    """Prompts of which an exact share is stored: a stored document's beginning, then tokens nobody has seen.

    Highest share first: what a later prompt needs was used by all earlier ones, so that no pool evicts it. Documents
    take turns, so that the device pool (which must be smaller than the documents together) never holds the next one.
    """

    letter, title, loads = "d", "fixed hit rate", ("seq",)
    dram_holds_all = True
    documents: int = 4
    length: int = 32_000
    percents: tuple[int, ...] = (99, 95, 90, 75, 50)

    def plan(self, setting: Setting, load: str) -> Plan:
        pages = self.length // setting.page_size
        if self.length % setting.page_size or pages % 100:
            raise ValueError(
                f"workload d: length is {self.length}, expected a multiple of 100 pages ({100 * setting.page_size} "
                "tokens), so that each percentage is a whole number of pages"
            )
        label = f"{setting.seed}/rates"
        best = max(self.percents)
        documents = [
            token_ids(f"{label}/document/{number}", best * pages // 100 * setting.page_size, setting.vocabulary)
            for number in range(self.documents)
        ]
        measure = []
        for percent in sorted(self.percents, reverse=True):
            stored = percent * pages // 100 * setting.page_size
            for number, document in enumerate(documents):
                new = token_ids(f"{label}/new/{percent}/{number}", self.length - stored, setting.vocabulary)
                measure.append(Request(f"h{percent}d{number}", document[:stored] + new, expect=stored))
        prepare = tuple(Request(f"d{number}", document) for number, document in enumerate(documents))
        return Plan(prepare, tuple(measure), reset=True, flush_each=True)


@dataclasses.dataclass(frozen=True)
class WorkingSet(Workload):
    """`times` as many tokens of prompts as the DRAM tier holds, all asked once, then again in `rounds` shuffled rounds.

    Nothing is dropped in between: each tier keeps what it can.
    """

    letter, title, loads = "e", "working set over DRAM", ("seq", "rate")
    keeps = True
    times: float = 4.0
    length: int = 16_384
    rounds: int = 2

    def plan(self, setting: Setting, load: str) -> Plan:
        label = f"{setting.seed}/set"
        count = math.ceil(self.times * setting.dram_tokens / self.length)
        asked = [
            Request(f"w{number}", token_ids(f"{label}/{number}", self.length, setting.vocabulary))
            for number in range(count)
        ]
        order = random.Random(f"{label}/order/{load}")
        measure: list[Request] = []
        for number in range(self.rounds):
            turn = [dataclasses.replace(request, name=f"{request.name}r{number}") for request in asked]
            order.shuffle(turn)
            measure += turn
        return Plan(tuple(asked), tuple(measure))


@dataclasses.dataclass(frozen=True)
class Misses(Workload):
    """Prompts that nobody has seen, with other prompts stored: what looking in vain and storing cost."""

    letter, title, loads = "f", "misses only", ("seq", "rate")
    dram_holds_all = True
    stored: int = 4
    prompts: int = 16
    length: int = 8192

    def plan(self, setting: Setting, load: str) -> Plan:
        label = f"{setting.seed}/misses"

        def some(kind: str, count: int, expect: int | None) -> tuple[Request, ...]:
            return tuple(
                Request(f"{kind}{n}", token_ids(f"{label}/{kind}/{n}", self.length, setting.vocabulary), expect=expect)
                for n in range(count)
            )

        return Plan(some("s", self.stored, None), some("m", self.prompts, 0))


WORKLOADS: tuple[type[Workload], ...] = (LvEval, MultiTurn, Trace, HitRate, WorkingSet, Misses)


def read_trace(file: str | pathlib.Path, requests: int) -> list[dict[str, Any]]:
    """The first records of a trace in JSON lines. Errors name the file, the line and what is wrong with it."""
    records: list[dict[str, Any]] = []
    with open(file, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if len(records) == requests:
                break
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                record = {
                    **{name: int(record[name]) for name in ("timestamp", "input_length", "output_length")},
                    "hash_ids": [int(identity) for identity in record["hash_ids"]],
                }
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{file}, line {number}: expected an object with timestamp, input_length, output_length and "
                    f"hash_ids, found {line[:80]!r} ({error!r})"
                ) from error
            records.append(record)
    if not records:
        raise ValueError(f"{file}: expected a trace of JSON lines, found no record")
    return records


def synthetic_trace(requests: int, seed: int) -> list[dict[str, Any]]:
    """Records in a trace's form: conversations that go on at random behind one shared first block.

    Three arrivals a second on average, inputs of a few thousand tokens.
    """
    draw = random.Random(f"{seed}/synthetic trace")
    talks: list[list[int]] = []
    records = []
    identity, clock = 1, 0.0
    for _ in range(requests):
        clock += draw.expovariate(3.0)
        going = [talk for talk in talks if len(talk) < 200]
        if going and draw.random() < 0.4:
            talk = going[draw.randrange(len(going))]
        else:
            talk = [0]
            talks.append(talk)
        for _ in range(1 + min(40, int(draw.expovariate(1 / 8)))):
            talk.append(identity)
            identity += 1
        records.append(
            {
                "timestamp": int(clock * 1000),
                "input_length": len(talk) * TRACE_BLOCK - draw.randrange(TRACE_BLOCK),
                "output_length": 100 + int(draw.expovariate(1 / 300)),
                "hash_ids": list(talk),
            }
        )
    return records


def due_times(requests: Sequence[Request], load: str, seed: int) -> list[float]:
    """Seconds after the start at which each request is sent.

    `trace`: as recorded. A number: that many a second on average, with the recorded pattern if there is one, else at
    random (Poisson) with gaps that differ between rates by a factor only. `inf`: all at once.
    """
    rate = None if load == "trace" else float(load)
    if rate is not None and not rate > 0:
        raise ValueError(f"offered rate {load}: expected more than 0 requests a second")
    if rate == math.inf:
        return [0.0] * len(requests)
    recorded = [request.arrival for request in requests]
    times = [arrival - recorded[0] for arrival in recorded if arrival is not None and recorded[0] is not None]
    if len(times) < len(requests):
        if rate is None:
            raise ValueError("load `trace` is for requests with recorded arrivals; give a rate instead")
        draw, times, clock = random.Random(f"{seed}/arrivals"), [], 0.0
        for _ in requests:
            times.append(clock)
            clock += draw.expovariate(1.0)
        # A short draw is off its mean by several per cent; the rate that is reported must be the one that is offered.
        scale = (len(times) - 1) / times[-1] if len(times) > 1 else 1.0
        return [time * scale / rate for time in times]
    if rate is None:
        return times
    span = times[-1] - times[0]
    return [time / rate * len(times) / span if span > 0 else index / rate for index, time in enumerate(times)]


def shared_tokens(requests: Iterable[Request], page_size: int) -> int:
    """Tokens of whole pages that an unbounded cache would hit when the requests come one after the other."""
    seen: set[int] = set()
    found = 0
    for request in requests:
        chain, hits, going = 0, 0, True
        for begin in range(0, len(request.tokens) // page_size * page_size, page_size):
            chain = hash((chain, request.tokens[begin : begin + page_size]))
            going = going and chain in seen
            hits += page_size * going
            seen.add(chain)
        found += min(hits, full_hit(len(request.tokens), page_size))
    return found
