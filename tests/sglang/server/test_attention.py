# SPDX-License-Identifier: Apache-2.0
"""A second server on the store of the first, with the other attention backend: on CPU tensors its code is the same
but for the decode kernel, of which the reference stands in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from real_server import FROM_STORAGE, NOTHING, ON_DEVICE, PAGE, START_TIMEOUT, TOKENS, make_spec, text
from server import Answer, Server

CHUNK = 512
NEAR = 0.1
"""Of log probabilities, between backends that round in other places: what is nearer is a tie."""


@pytest.fixture(scope="module")
def second(lives, tmp_path_factory) -> Iterator[Server]:
    flags = ("--attention-backend", "tardis", "--chunked-prefill-size", str(CHUNK), "--enable-mixed-chunk")
    spec = make_spec(lives.store, flags=flags)
    log = tmp_path_factory.mktemp("attention") / "server.log"
    with contextlib.closing(Server(spec, log)) as server:
        server.start(START_TIMEOUT)
        yield server


def likely(token: int, reference: Answer) -> bool:
    """Whether a token is the best one of a reference, or as good."""
    (best, _), *_ = reference.logprobs
    return any(token == candidate and log > best - NEAR for log, candidate in reference.logprobs)


def near(answer: Answer, reference: Answer) -> bool:
    """The first token and its candidates, up to rounding."""
    known = {token: log for log, token in reference.logprobs}
    both = [(log, known[token]) for log, token in answer.logprobs if token in known]
    same = len(both) >= len(known) - 4 and all(abs(one - other) < NEAR for one, other in both)
    return same and likely(answer.first_token, reference)


def test_two_servers_share_the_store(second, lives):
    """Pages that one backend computed serve the other."""
    for ids, device in zip(lives.prompts, lives.device, strict=True):
        answer = second.generate(ids)
        assert answer.cached == FROM_STORAGE and near(answer, device)
        assert lives.again(ids).cached == FROM_STORAGE
    assert not near(answer, lives.device[0]), "candidates tell prompts apart"


def test_hits_on_the_device_in_chunks_and_beside_each_other(second, lives):
    """Prefixes of whole pages in the pool, prompts of several chunks, and some of them in one batch."""
    prompts = [text(201), text(202)[: TOKENS - 300], text(203)[: PAGE + 1], text(204)[:1]]
    longer = prompts[0] + text(205)[:700]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(second.generate, prompts))
    assert answers[0].cached == NOTHING
    again = second.generate(prompts[0])
    assert again.cached == ON_DEVICE
    last = second.generate(longer, new_tokens=16)
    assert last.cached["device"] == TOKENS
    lives.detach()  # the store would hand over what the second server computed
    try:
        expected = [lives.server.generate(ids) for ids in prompts]
        assert all(near(*pair) for pair in zip(answers, expected, strict=True))
        assert near(again, expected[0]) and near(last, lives.server.generate(longer))
        for step in (1, 6, 15):  # the tokens that it decoded
            ids = longer + list(last.tokens[:step])
            assert likely(last.tokens[step], lives.server.generate(ids, new_tokens=1)), step
    finally:
        lives.server.flush_cache()  # waits until it is idle
        status, said = lives.server.attach_storage("tardis", lives.server.spec.extra_config)
        assert status == 200, said


def test_one_line_says_where_kv_is(second):
    said = [line for line in second.log_text().splitlines() if "tardis: attention backend" in line]
    assert len(said) == 1
