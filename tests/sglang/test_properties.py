# SPDX-License-Identifier: Apache-2.0
"""Random lives of SGLang's real tree against a dictionary: exactly what was stored is cached."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from tree_server import TreeServer, prompt, write_checkpoint

PAGE = 16
# A prompt is a path in a small tree of pages, so that prompts share prefixes and nodes split anywhere.
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=7)
NAMESPACES = st.sampled_from([(None, None), (None, "salt"), ("adapter", None)])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("prefill"), PATHS, NAMESPACES, st.integers(0, PAGE - 1)),
        st.tuples(st.sampled_from(["flush", "evict device", "evict host", "restart", "clear", "reattach"])),
    ),
    min_size=3,
    max_size=14,
)


def tokens_of(path, extra):
    pages = [prompt(1000 * depth + symbol, 1) for depth, symbol in enumerate(path)]
    return [token for page in pages for token in page] + prompt(7, 1)[:extra]


def leading(path, known):
    """Leading pages of a path that are in a set of prefixes."""
    count = 0
    while count < len(path) and tuple(path[: count + 1]) in known:
        count += 1
    return count


@pytest.mark.parametrize("core", ["python", "rust"])
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(steps=STEPS)
def test_lives_of_the_tree(core, steps):
    folder = Path(tempfile.mkdtemp(prefix="tardis-property-"))
    model = write_checkpoint(folder / "model")
    options = dict(core=core, layers=2, heads=1, head_dim=16, tokens=8192)
    server = TreeServer(folder / "store", model, **options)
    tree: dict = {}  # namespace -> prefixes on the device or the host
    stored: dict = {}  # namespace -> prefixes in storage
    try:
        for step in steps:
            if step[0] == "prefill":
                _, path, namespace, extra = step
                in_tree, in_store = tree.setdefault(namespace, set()), stored.setdefault(namespace, set())
                split = server.prefill(tokens_of(path, extra), *namespace)
                warm = leading(path, in_tree)
                cached = leading(path, in_tree | {p for p in in_store if len(p) > warm})
                assert split.device + split.host == warm * PAGE, (step, split)
                assert split.storage == (cached - warm) * PAGE, (step, split)
                assert split.computed == (len(path) - cached) * PAGE, (step, split)
                prefixes = [tuple(path[: i + 1]) for i in range(len(path))]
                in_store.update(prefixes[cached:])
                in_tree.update(prefixes)
            elif step[0] == "flush":
                server.flush()
                tree.clear()
            elif step[0] == "evict device":
                server.cache.evict(EvictParams(num_tokens=1 << 20))
            elif step[0] == "evict host":
                server.cache.evict(EvictParams(num_tokens=1 << 20))
                server.cache.evict_host(1 << 20)
                tree.clear()
            elif step[0] == "restart":
                server.close()
                server = TreeServer(folder / "store", model, **options)
                tree.clear()
            elif step[0] == "clear":
                assert server.cache.clear_storage_backend()
                stored.clear()
            else:
                assert server.cache.detach_storage_backend()[0]
                ok, message = server.attach()
                assert ok, message
        stats = server.storage._store.stats()
        assert stats["get_pages_corrupt"] == stats["get_pages_failed"] == stats["set_pages_failed"] == 0
        assert stats["slots_live"] == sum(len(prefixes) for prefixes in stored.values())
    finally:
        server.close()
        shutil.rmtree(folder)
