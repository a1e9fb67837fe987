# SPDX-License-Identifier: Apache-2.0
"""Prompts, servers and reference answers for the tests beside this file."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from server import MODELS, Answer, Server, ServerSpec, cached_by_a_hit, prompt

PAGE = 64
TOKENS = 1536
"""Length of a prompt: 24 pages."""
HIT = cached_by_a_hit(TOKENS, PAGE)
"""What a hit on a whole prompt reports: 23 pages, the last one is computed."""
MODEL = MODELS / "tiny-llama"
VOCABULARY = json.loads((MODEL / "config.json").read_text())["vocab_size"]
START_TIMEOUT = 400.0
"""Seconds; a start takes 25 to 35 on two idle cores."""
NOTHING = {"device": 0, "host": 0, "storage": 0}
ON_DEVICE = {"device": HIT, "host": 0, "storage": 0}
FROM_STORAGE = {"device": 0, "host": 0, "storage": HIT}


def text(seed: int) -> list[int]:
    """A prompt of random token ids."""
    return prompt(seed, TOKENS, VOCABULARY)


def free_port() -> int:
    """A port of the range that these tests keep to."""
    for port in range(32110, 32200):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port between 32110 and 32199")


def make_spec(store: Path, **changes) -> ServerSpec:
    """A server of the tiny model on a store; keyword arguments are fields of ServerSpec."""
    extra = {"path": str(store), "capacity": "1GiB", **changes.pop("extra_config", {})}
    return ServerSpec(model=MODEL, port=free_port(), page_size=PAGE, extra_config=extra, **changes)


def reference(server: Server, ids: list[int], cached: int) -> Answer:
    """The answer of a device hit on exactly `cached` tokens. The server must have no storage attached."""
    server.flush_cache()
    if cached:
        server.generate(ids[:cached], new_tokens=1)
    answer = server.generate(ids)
    assert answer.cached == {"device": cached, "host": 0, "storage": 0}
    return answer


@dataclass
class Lives:
    """Three servers on one store, one after another, and what they answered. The third still runs."""

    prompts: list[list[int]]
    store: Path
    server: Server | None = None
    cold: list[Answer] = field(default_factory=list)
    device: list[Answer] = field(default_factory=list)
    flushed: list[Answer] = field(default_factory=list)
    after_kill: list[Answer] = field(default_factory=list)
    device_after_kill: list[Answer] = field(default_factory=list)
    after_term: list[Answer] = field(default_factory=list)
    start_line: str = ""
    metrics: dict[str, float] = field(default_factory=dict)

    def spec(self) -> ServerSpec:
        return make_spec(self.store)

    @contextlib.contextmanager
    def storage(self, backend: str = "tardis", **settings: object) -> Iterator[tuple[int, str]]:
        """Another storage on the running server; afterwards the usual one again. Yields the attach call's answer."""
        server = self.server
        assert server is not None
        self.detach()
        try:
            extra = {"path": str(self.store), **settings}
            yield server.attach_storage(backend, extra)
        finally:
            self.detach()
            status, answer = server.attach_storage("tardis", server.spec.extra_config)
            assert status == 200, answer

    def detach(self) -> None:
        """Detach whatever is attached; waits until nothing is in flight."""
        self.server.flush_cache()
        status, answer = self.server.detach_storage()
        assert status == 200, answer

    def again(self, ids: list[int]) -> Answer:
        """Ask after emptying device and host pools, so that only the storage can help."""
        self.server.flush_cache()
        return self.server.generate(ids)
