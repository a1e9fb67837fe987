# SPDX-License-Identifier: Apache-2.0
"""The store's counters on a Prometheus page, collected over processes as SGLang does it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

STATS = (
    "dict(capacity_bytes=1000, slots_live=5, get_pages_hit={hits}, get_pages_corrupt=1, set_pages_dropped=2, "
    "evicted_pages=3)"
)


def run(script, folder):
    import os

    import sglang_tardis

    environment = dict(
        os.environ, PROMETHEUS_MULTIPROC_DIR=str(folder), PYTHONPATH=str(Path(sglang_tardis.__file__).parents[1])
    )
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_page_of_another_process(tmp_path):
    """Written by the scheduler's process, read by the HTTP server's."""
    run(
        f"""
        from sglang_tardis.metrics import StoreMetrics
        report = dict(engine="io_uring", direct_io=True, filesystem="ext4", reason="x")
        metrics = StoreMetrics()
        assert metrics.enabled and metrics.due()
        metrics.set_path(report, "layer-major")
        metrics.update({STATS.format(hits=7)}, dict(read=4))
        assert not metrics.due()
        metrics.update({STATS.format(hits=9)}, dict(read=4))
        again = StoreMetrics()  # attached again in the same process: the counters of a new store start at nothing
        again.set_path(report, "layer-major")
        again.update({STATS.format(hits=1)})
        """,
        tmp_path,
    )
    page = run(
        """
        from prometheus_client import CollectorRegistry, generate_latest, multiprocess
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
        print(generate_latest(registry).decode())
        """,
        tmp_path,
    )
    lines = page.splitlines()
    assert "tardis_read_pages_hit_total 10.0" in lines  # 9 and 1
    assert "tardis_read_pages_corrupt_total 2.0" in lines
    assert "tardis_written_pages_dropped_total 4.0" in lines
    assert "tardis_evicted_pages_total 6.0" in lines
    assert "tardis_pages_live 5.0" in lines and "tardis_capacity_bytes 1000.0" in lines
    assert 'tardis_door_failures_total{kind="read"} 4.0' in lines
    assert 'tardis_path_info{direct_io="True",engine="io_uring",filesystem="ext4",layout="layer-major"} 1.0' in lines


def test_without_prometheus_client(tmp_path):
    run(
        f"""
        import sys
        sys.modules["prometheus_client"] = None
        from sglang_tardis.metrics import StoreMetrics
        metrics = StoreMetrics()
        assert not metrics.enabled
        metrics.set_path(dict(engine="sync"), "x")
        metrics.update({STATS.format(hits=1)}, dict(read=1))
        """,
        tmp_path,
    )


def test_every_metric_is_a_field_of_the_store(tmp_path):
    from sglang_tardis.metrics import _COUNTERS, _GAUGES
    from sglang_tardis.store import Store, StoreOptions

    store = Store(tmp_path / "store", StoreOptions(capacity_bytes=1 << 26, free_space_floor=0))
    try:
        fields = set(store.stats())
        report = store.path_report()
    finally:
        store.close()
    assert {field for field, _ in (*_GAUGES.values(), *_COUNTERS.values())} <= fields
    assert {"engine", "direct_io", "filesystem", "reason"} <= set(report)


def test_metrics_of_the_direct_door(tmp_path):
    page = run(
        """
        from prometheus_client import CollectorRegistry, generate_latest, multiprocess
        from sglang_tardis.metrics import LinkerMetrics
        metrics = LinkerMetrics()
        state = dict(loads=2, pages_from_memory=3, loader_missing=5, dram_slots=7, layer_wait_ns=1_500_000_000)
        metrics.update(state, 1000)
        metrics.update(state | dict(pages_from_memory=4, loader_missing=1), 1000)  # the loader was opened anew
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
        print(generate_latest(registry).decode())
        """,
        tmp_path,
    ).splitlines()
    assert 'tardis_direct_bytes_total{source="memory"} 4000.0' in page
    named = ("memory_pages_total 4.0", "missing_pages_total 6.0", "dram_slots 7.0", "layer_wait_seconds_total 1.5")
    for line in ("loads_total 2.0", *named):
        assert f"tardis_direct_{line}" in page, line
