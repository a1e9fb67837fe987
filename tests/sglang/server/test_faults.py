# SPDX-License-Identifier: Apache-2.0
"""SGLang's own fault injectors around the backend: requests complete, and their answers are right."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from real_server import PAGE, START_TIMEOUT, TOKENS, make_spec, reference, text
from server import Server

SEEDS = (31, 32, 33)
ROUNDS = 4


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Answers of a server whose storage fails three calls in ten and is late: one by one, and all at once."""
    folder = tmp_path_factory.mktemp("faults")
    spec = make_spec(
        folder / "store",
        layout="layer_first",
        io_backend="kernel",
        environment={
            "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.05",
            "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.3",
        },
    )
    with contextlib.closing(Server(spec, folder / "server.log")) as server:
        server.start(START_TIMEOUT)
        alone = []
        for _round in range(ROUNDS):
            for seed in SEEDS:
                alone.append((seed, server.generate(text(seed))))
            server.flush_cache()
        with ThreadPoolExecutor(len(SEEDS)) as pool:
            together = list(pool.map(lambda seed: server.generate(text(seed)), SEEDS))
        assert server.alive()
        server.flush_cache()
        log = server.log_text()
    return alone, together, log


def test_every_request_completes(answers):
    alone, together, _log = answers
    assert len(alone) == ROUNDS * len(SEEDS)
    assert all(len(answer.tokens) == 4 and len(answer.logprobs) == 20 for _seed, answer in alone)
    assert all(len(answer.tokens) == 4 for answer in together)


def test_faults_were_injected_and_something_still_came_from_storage(answers):
    alone, _together, log = answers
    assert "HiCacheStorageFailureInjector" in log or any(
        answer.storage_backend == "HiCacheStorageFailureInjector" for _seed, answer in alone
    )
    restored = [answer.cached["storage"] for _seed, answer in alone]
    assert any(restored), "no page came from storage: the faults hid the store"
    assert not all(restored[len(SEEDS) :]), "no call failed: the injectors did nothing"


def test_answers_are_those_of_device_hits_of_the_same_length(answers, lives):
    alone, _together, _log = answers
    assert {answer.prompt_tokens for _seed, answer in alone} == {TOKENS}
    lives.detach()
    try:
        expected = {}
        for seed, answer in alone:
            assert answer.cached_tokens % PAGE == 0
            key = (seed, answer.cached_tokens)
            if key not in expected:
                expected[key] = reference(lives.server, text(seed), answer.cached_tokens)
            assert answer.same_first_token(expected[key]), f"seed {seed}, cached {answer.cached}"
    finally:
        status, said = lives.server.attach_storage("tardis", lives.server.spec.extra_config)
    assert status == 200, said
