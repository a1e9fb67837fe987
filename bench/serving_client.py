# SPDX-License-Identifier: Apache-2.0
"""Sends the requests of serving.py to a server, one at a time, in waves, or at given times.

SGLang's own `sglang.benchmark.serving` client does not fit here. It needs a tokenizer and takes the time to first
token from the first chunk with text, while these servers take and give token ids only (`--skip-tokenizer-init`); and
it sends the same extra fields with every request, while a recompute here needs a cache salt of its own for each. The
names of its results (`mean_ttft_ms`, `median_ttft_ms`, `p99_ttft_ms`, `request_throughput`) are used with the same
meaning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from serving_workloads import Request, due_times

TIERS = ("device", "host", "storage")
TOP = 20
"""Log probabilities of the first token that are compared."""


class OutOfTime(RuntimeError):
    """The run's deadline came before the case was complete; nothing of it is recorded."""


@dataclasses.dataclass
class Outcome:
    """What came of one request. Times in seconds, on the client's side."""

    name: str
    prompt_tokens: int
    due: float = 0.0
    """When it was to be sent, after the start."""
    sent: float = 0.0
    ttft: float = 0.0
    latency: float = 0.0
    cached: dict[str, int] = dataclasses.field(default_factory=dict)
    """Cached prompt tokens by tier, from the server's `cached_tokens_details`."""
    ids: tuple[int, ...] = ()
    """Generated token ids."""
    stamps: tuple[float, ...] = ()
    """When each streamed piece of the answer came, after it was sent; not recorded."""
    top: str | None = None
    """Digest of the first token's most probable candidates with their log probabilities; None if not asked for."""
    reference: dict[str, Any] | None = None
    """The answer to the same prompt from the device pool, asked right after."""
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        """As it is recorded: times in ms."""
        row: dict[str, Any] = {
            "name": self.name,
            "prompt_tokens": self.prompt_tokens,
            "sent_ms": round(self.sent * 1e3, 3),
            "late_ms": round((self.sent - self.due) * 1e3, 3),
            "ttft_ms": round(self.ttft * 1e3, 3),
            "latency_ms": round(self.latency * 1e3, 3),
            **{tier: self.cached.get(tier, 0) for tier in TIERS},
            "ids": " ".join(map(str, self.ids)),
        }
        for name in ("top", "reference", "error"):
            if getattr(self, name) is not None:
                row[name] = getattr(self, name)
        return row


class Client:
    """Sends prompts to `/generate`, greedy, streamed.

    The body is encoded before the clock starts, and nothing is decoded before it stops.
    """

    def __init__(self, port: int, left: Callable[[], float]) -> None:
        self._port, self._left = port, left

    @staticmethod
    def body(request: Request, salt: str | None, top: bool) -> bytes:
        """The request as JSON. A salt of its own keeps a prompt from hitting anything, and changes nothing else."""
        content: dict[str, Any] = {
            "input_ids": request.tokens,
            "stream": True,
            "return_logprob": True,
            "logprob_start_len": -1,
            "sampling_params": {"temperature": 0, "max_new_tokens": request.new_tokens, "ignore_eos": True},
        }
        if top:
            content["top_logprobs_num"] = TOP
        if salt is not None:
            content["cache_salt"] = salt
        return json.dumps(content).encode()

    def send(self, request: Request, body: bytes, start: float, due: float = 0.0) -> Outcome:
        """Send one request; `start` is the clock's zero. A failure is in the outcome, not raised."""
        outcome = Outcome(request.name, len(request.tokens), due)
        if self._left() <= 0:
            raise OutOfTime(request.name)
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=max(1.0, min(600.0, self._left())))
        chunks: list[bytes] = []
        stamps: list[float] = []
        status = 0
        try:
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            begin = time.perf_counter()
            outcome.sent = begin - start
            connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            status = response.status
            for line in iter(response.readline, b""):
                if status != 200:
                    chunks.append(line)
                elif line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    stamps.append(time.perf_counter() - begin)
                    chunks = [line]
            outcome.latency = time.perf_counter() - begin
        except (OSError, http.client.HTTPException) as error:
            outcome.error = f"the request broke off: {error!r}"
            return outcome
        finally:
            connection.close()
        outcome.stamps, outcome.ttft = tuple(stamps), stamps[0] if stamps else 0.0
        try:
            meta = json.loads(chunks[0][6:])["meta_info"]
            logprobs = meta["output_token_logprobs"]
            details = meta.get("cached_tokens_details") or {}
            outcome.cached = {tier: int(details.get(tier) or 0) for tier in TIERS}
            outcome.ids = tuple(entry[1] for entry in logprobs)
            ranks = (meta.get("output_top_logprobs") or [None])[0]
            if ranks:
                told = json.dumps([[entry[0], entry[1]] for entry in ranks])
                outcome.top = hashlib.sha256(told.encode()).hexdigest()[:16]
        except (ValueError, KeyError, IndexError, TypeError):
            outcome.error = f"POST /generate answered {status}: {b''.join(chunks)[:300]!r}"
        return outcome

    def one_by_one(
        self,
        requests: Sequence[Request],
        salt: Callable[[Request], str | None],
        before: Callable[[], object] | None = None,
        reference: bool = False,
        top: bool = True,
    ) -> tuple[list[Outcome], float]:
        """One request at a time, `before` called ahead of each.

        Returns outcomes and busy seconds: the latencies alone, without `before` and without the reference requests.
        """
        outcomes = []
        start = time.perf_counter()
        for request in requests:
            if before is not None:
                before()
            body = self.body(request, salt(request), top)
            outcome = self.send(request, body, start)
            outcome.due = outcome.sent
            outcomes.append(outcome)
            if reference and outcome.error is None:
                again = self.send(request, body, start)
                outcome.reference = {"device": again.cached.get("device", 0), "ids": again.ids[:1], "top": again.top}
        return outcomes, sum(outcome.latency for outcome in outcomes)

    def together(
        self, requests: Sequence[Request], due: Sequence[float], salt: Callable[[Request], str | None]
    ) -> tuple[list[Outcome], float]:
        """Send each request at its time, whether earlier ones are answered or not. Returns outcomes in the order of
        `requests`, and the seconds from the start to the last answer.
        """
        bodies = [self.body(request, salt(request), top=False) for request in requests]
        outcomes: list[Outcome | None] = [None] * len(requests)
        start = time.perf_counter()

        def work(index: int) -> None:
            # Short sleeps, so that a deadline ends the wait too.
            while (wait := start + due[index] - time.perf_counter()) > 0 and self._left() > 0:
                time.sleep(min(wait, 0.5))
            with contextlib.suppress(OutOfTime):
                outcomes[index] = self.send(requests[index], bodies[index], start, due[index])

        threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(len(requests))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if any(outcome is None for outcome in outcomes) or self._left() <= 0:
            raise OutOfTime("open loop")
        return [outcome for outcome in outcomes if outcome is not None], time.perf_counter() - start

    def closed_loop(
        self, requests: Sequence[Request], clients: int, salt: Callable[[Request], str | None]
    ) -> tuple[list[Outcome], float]:
        """So many clients send the requests in their order, each the next one when its last is answered. A request
        waits while one of the same name is in flight. Returns outcomes in the order of `requests`, and the seconds from
        the start to the last answer.
        """
        bodies = {request.name: self.body(request, salt(request), top=False) for request in requests}
        outcomes: list[Outcome | None] = [None] * len(requests)
        left = iter(range(len(requests)))
        flying: set[str] = set()
        changed = threading.Condition()
        start = time.perf_counter()

        def work() -> None:
            while True:
                with changed:
                    index = next(left, None)
                    if index is None:
                        return
                    name = requests[index].name
                    while name in flying:
                        changed.wait()
                    flying.add(name)
                try:
                    outcome = self.send(requests[index], bodies[name], start)
                    outcome.due = outcome.sent
                    outcomes[index] = outcome
                except OutOfTime:
                    return
                finally:
                    with changed:
                        flying.discard(name)
                        changed.notify_all()

        threads = [threading.Thread(target=work, daemon=True) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if any(outcome is None for outcome in outcomes) or self._left() <= 0:
            raise OutOfTime("closed loop")
        return [outcome for outcome in outcomes if outcome is not None], time.perf_counter() - start

    def waves(self, requests: Sequence[Request], salt: Callable[[Request], str | None]) -> tuple[list[Outcome], float]:
        """The requests of each wave together, the waves one after the other."""
        outcomes: list[Outcome] = []
        seconds = 0.0
        for wave in sorted({request.wave for request in requests}):
            members = [request for request in requests if request.wave == wave]
            answered, took = self.together(members, [0.0] * len(members), salt)
            for outcome in answered:
                outcome.due += seconds
                outcome.sent += seconds
            outcomes += answered
            seconds += took
        return outcomes, seconds

    def offered(
        self, requests: Sequence[Request], load: str, seed: int, salt: Callable[[Request], str | None]
    ) -> tuple[list[Outcome], float]:
        """An open loop: `trace`, or a rate in requests a second."""
        return self.together(requests, due_times(requests, load, seed), salt)
