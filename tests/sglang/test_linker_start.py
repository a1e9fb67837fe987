# SPDX-License-Identifier: Apache-2.0
"""How a direct door begins: what it refuses, how large its tier is, what it says and counts."""

from __future__ import annotations

import re

import pytest
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang_tardis import metrics
from sglang_tardis.config import ConfigError
from sglang_tardis.gio_abi import GioError
from tree_server import prompt

REFUSALS = {
    "SWA": (
        {"components": (ComponentType.FULL, ComponentType.SWA)},
        "full attention in every layer, found one with SWA",
    ),
    "draft": ({"params": {"sidecar_draft_device_pools": (object(),)}}, "no draft model"),
    "stages": ({"stages": 2}, "expected one pipeline stage, found --pp-size 2"),
    "prefill alone": ({"overrides": {"disaggregation_mode": "prefill"}}, "found --disaggregation-mode prefill"),
    "no blocks": ({"page_size": 1, "heads": 1, "head_dim": 16}, "--page-size that is a multiple of 8"),
    "no page fits": ({"extra": {"dram": "4KiB"}}, "set a larger dram"),
    "more than the host has": ({"extra": {"dram": "900TiB"}}, "set dram, --hicache-size or --hicache-ratio"),
    "unknown setting": ({"extra": {"drm": 1}}, "Did you mean 'dram'"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_what_is_not_supported_is_refused_by_name(serve, kind):
    changes, message = REFUSALS[kind]
    with pytest.raises((NotImplementedError, MemoryError, ConfigError, GioError), match=re.escape(message)):
        serve(**changes)


def test_size_of_the_tier(serve):
    page = 4 * 2 * 16 * 2 * 64 * 2
    for extra, pages in (({"hicache_ratio": 0.5}, 64), ({"hicache_size": 0.01}, 10_000_000 // page)):
        server = serve(extra={"dram": "auto"} | extra, tokens=2048 - 16)
        assert server.linker._door.tier.slots == pages
        server.close()


def test_every_metric_is_a_field_of_the_linker(serve):
    server = serve()
    server.serve(prompt(1, 4))
    server.forget_dram()
    server.serve(prompt(1, 4))
    rare = {"failed_loads"}
    named = (metrics._LINKER_COUNTERS, metrics._LINKER_GAUGES, metrics._LINKER_TIMES)
    fields = {field for names in named for field, _ in names.values()}
    assert fields - rare <= set(server.linker.state())


def test_start_says_the_truth(serve, caplog):
    caplog.set_level("INFO", "sglang_tardis")
    server = serve()
    line = next(record.getMessage() for record in caplog.records if "direct mode" in record.getMessage())
    for part in ("not pinned: no GPU", "rings of a host thread: no GPU", "whose 1 host threads work for each command"):
        assert part in line
    assert server.linker._live.identity.fingerprint().hex() in line
