# SPDX-License-Identifier: Apache-2.0
"""What was stored comes back: after a flush, after SIGKILL, after SIGTERM, with the answer of a device hit."""

from __future__ import annotations

import pytest
from real_server import FROM_STORAGE, HIT, NOTHING, ON_DEVICE, PAGE


def test_first_server_misses_then_hits_on_the_device(lives):
    assert [answer.cached for answer in lives.cold] == [NOTHING] * 2
    assert [answer.cached for answer in lives.device] == [ON_DEVICE] * 2


def test_logprobs_tell_prompts_apart(lives):
    first, second = lives.device
    assert len(first.logprobs) == len(second.logprobs) == 20
    assert first.logprobs != second.logprobs
    values = [value for value, _token in first.logprobs]
    assert values == sorted(values, reverse=True) and values[0] - values[-1] > 0.1, "near-constant logits prove nothing"


@pytest.mark.parametrize("when", ["flushed", "after_kill", "after_term"])
def test_comes_back_from_storage_with_the_answer_of_a_device_hit(lives, when):
    for restored, device in zip(getattr(lives, when), lives.device, strict=True):
        assert restored.cached == FROM_STORAGE
        assert restored.storage_backend == "TardisStorage"
        assert restored.first_token == device.first_token
        assert restored.logprobs == device.logprobs


def test_restored_pages_serve_device_hits(lives):
    for answer, device in zip(lives.device_after_kill, lives.device, strict=True):
        assert answer.cached == ON_DEVICE
        assert answer.same_first_token(device)


def test_start_line_tells_path_and_recovered_pages(lives):
    assert str(lives.store) in lives.start_line
    assert "engine io_uring" in lives.start_line or "engine sync" in lives.start_line
    assert ", 48 pages recovered," in lives.start_line


def test_metrics_count_what_was_restored(lives):
    assert lives.metrics["sglang:prefetched_tokens_total"] >= HIT * 2
    assert lives.metrics["tardis_read_pages_hit_total"] >= HIT * 2 / PAGE
    assert lives.metrics["tardis_read_pages_corrupt_total"] == 0
    assert lives.metrics["tardis_path_info"] == 1
