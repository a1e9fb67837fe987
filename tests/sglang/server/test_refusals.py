# SPDX-License-Identifier: Apache-2.0
"""Servers that must not start, and what they say."""

from __future__ import annotations

import contextlib

from real_server import START_TIMEOUT, make_spec
from server import Server


def _must_not_start(spec, log) -> str:
    """The log of a server that ends on its own with an error."""
    with contextlib.closing(Server(spec, log)) as server:
        server.launch()
        assert server.wait_for_exit(START_TIMEOUT) != 0
        return server.log_text()


def test_unknown_setting_stops_the_server_and_is_named(tmp_path):
    spec = make_spec(tmp_path / "store", extra_config={"flush_intervall_ms": 10})
    said = _must_not_start(spec, tmp_path / "server.log")
    assert "unknown setting 'flush_intervall_ms' = 10" in said
    assert "Did you mean 'flush_interval_ms'?" in said
    assert not (tmp_path / "store").exists()


def test_second_server_must_agree_on_the_capacity(lives, tmp_path):
    said = _must_not_start(make_spec(lives.store, extra_config={"capacity": "2GiB"}), tmp_path / "refused.log")
    assert str(lives.store) in said and f"{1 << 30}" in said and f"{2 << 30}" in said
