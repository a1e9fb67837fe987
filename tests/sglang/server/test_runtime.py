# SPDX-License-Identifier: Apache-2.0
"""Storage detached, attached, cleared, foreign or damaged while one real server runs."""

from __future__ import annotations

import corrupt
import pytest
from real_server import FROM_STORAGE, HIT, NOTHING, ON_DEVICE, PAGE, TOKENS, reference, text

DYNAMIC = {
    "backend_name": "tardis",
    "module_path": "sglang_tardis.sglang.storage",
    "class_name": "TardisStorage",
    "interface_v1": 1,
}
DAMAGED_PAGE = 10
# A page that was written before a crash and not read since counts as torn, any other as corrupt.
DAMAGED_COUNTERS = ("tardis_read_pages_corrupt_total", "tardis_read_pages_torn_total")
WRITTEN = "tardis_written_pages_total"


def test_detached_gives_nothing_attached_again_gives_everything(lives):
    lives.detach()
    try:
        assert lives.again(lives.prompts[0]).cached == NOTHING
    finally:
        status, answer = lives.server.attach_storage("tardis", lives.server.spec.extra_config)
    assert status == 200, answer
    restored = lives.again(lives.prompts[0])
    assert restored.cached == FROM_STORAGE
    assert restored.same_first_token(lives.device[0])


def test_clear_forgets_for_good(lives, tmp_path):
    ids = text(20)
    with lives.storage(path=str(tmp_path / "other")) as (status, answer):
        assert status == 200, answer
        before = lives.server.stored_tokens()
        assert lives.again(ids).cached == NOTHING
        lives.server.wait_until_stored(before + TOKENS)
        assert lives.again(ids).cached == FROM_STORAGE
        lives.server.flush_cache()
        status, answer = lives.server.clear_storage()
        assert status == 200, answer
        lives.detach()
        status, answer = lives.server.attach_storage("tardis", {"path": str(tmp_path / "other")})
        assert status == 200, answer
        assert lives.again(ids).cached == NOTHING
    # The store beside it kept everything.
    assert lives.again(lives.prompts[1]).cached == FROM_STORAGE


def test_other_weights_revision_finds_nothing_and_harms_nothing(lives):
    with lives.storage(weights_revision="another") as (status, answer):
        assert status == 200, answer
        assert lives.again(lives.prompts[0]).cached == NOTHING
    restored = lives.again(lives.prompts[0])
    assert restored.cached == FROM_STORAGE
    assert restored.same_first_token(lives.device[0])


def test_dynamic_route_opens_the_same_store(lives):
    with lives.storage("dynamic", **DYNAMIC) as (status, answer):
        assert status == 200, answer
        restored = lives.again(lives.prompts[0])
    assert restored.cached == FROM_STORAGE
    assert restored.storage_backend == "TardisStorage"
    assert restored.same_first_token(lives.device[0])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"capcity": "1GiB"}, ["capcity", "capacity"]),
        ({"queue_depth": "many"}, ["queue_depth", "many"]),
        ({"verify_reads": 1}, ["verify_reads", "true or false"]),
    ],
)
def test_wrong_setting_is_refused_by_name_and_the_server_lives_on(lives, settings, expected):
    logged = len(lives.server.log_text())
    lives.detach()
    try:
        status, answer = lives.server.attach_storage("tardis", {"path": str(lives.store), **settings})
        assert status != 200
        said = answer + lives.server.log_text()[logged:]
        assert all(word in said for word in expected), said[-2000:]
        assert lives.again(lives.prompts[0]).cached == NOTHING
    finally:
        status, answer = lives.server.attach_storage("tardis", lives.server.spec.extra_config)
    assert status == 200, answer
    assert lives.again(lives.prompts[0]).cached == FROM_STORAGE


def test_damaged_page_changes_answers_without_verification_and_is_a_miss_with_it(lives):
    """The negative control: equal answers prove equal bytes only if other bytes give other answers."""
    ids, device = lives.prompts[1], lives.device[1]

    with lives.storage(verify_reads=False) as (status, answer):
        assert status == 200, answer
        intact = lives.again(ids)
        assert intact.cached == FROM_STORAGE
        assert intact.same_first_token(device), "unverified reads of intact pages must equal a device hit"

    lives.detach()
    pages = corrupt.stored_pages(lives.store)
    corrupt.flip_signs(pages[corrupt.page_keys(ids, PAGE)[DAMAGED_PAGE]])
    status, answer = lives.server.attach_storage("tardis", lives.server.spec.extra_config)
    assert status == 200, answer

    with lives.storage(verify_reads=False) as (status, answer):
        assert status == 200, answer
        damaged = lives.again(ids)
        assert damaged.cached == FROM_STORAGE
        assert damaged.logprobs != device.logprobs, "one damaged page must show, else equality proves nothing"

    # With verification the prefix ends before the damaged page; the rest is computed.
    before = lives.server.metrics()
    shortened = lives.again(ids)
    assert shortened.cached == {"device": 0, "host": 0, "storage": DAMAGED_PAGE * PAGE}
    lives.server.wait_until(
        lambda now: any(now[name] > before[name] for name in DAMAGED_COUNTERS), "the damaged page to be counted"
    )
    # ... and stored anew.
    lives.server.wait_until(lambda now: now[WRITTEN] > before[WRITTEN], "the page to be written again")
    healed = lives.again(ids)
    assert healed.cached == FROM_STORAGE
    assert healed.same_first_token(device)

    lives.detach()
    try:
        assert reference(lives.server, ids, DAMAGED_PAGE * PAGE).same_first_token(shortened)
        assert reference(lives.server, ids, HIT).cached == ON_DEVICE
    finally:
        status, answer = lives.server.attach_storage("tardis", lives.server.spec.extra_config)
    assert status == 200, answer
