# SPDX-License-Identifier: Apache-2.0
"""The store's counters as Prometheus metrics, on SGLang's own ``/metrics`` page (``--enable-metrics``).

SGLang collects the metrics of all its processes through prometheus_client's multiprocess folder; metrics made here in
the scheduler's process appear on the page of the HTTP process. Without prometheus_client, or without the folder,
there are none.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

__all__ = ["LinkerMetrics", "StoreMetrics"]

_PERIOD_SECONDS = 1.0

# metric name -> (field of tardis_stats, documentation)
_GAUGES = {
    "tardis_capacity_bytes": ("capacity_bytes", "Hard cap on what the store allocates, in bytes."),
    "tardis_allocated_bytes": ("allocated_bytes", "Bytes that the store has allocated on disk."),
    "tardis_payload_bytes": ("payload_bytes", "Bytes of live pages."),
    "tardis_pages_live": ("slots_live", "Pages that can be read."),
    "tardis_pages_quarantined": ("slots_quarantined", "Slots kept aside because their bytes were corrupt."),
    "tardis_paths": ("paths", "Folders over which the store is spread."),
    "tardis_paths_out": ("paths_out", "Folders that are out: failed, or missing when the store was opened."),
    "tardis_processes": ("processes", "Processes that use the store."),
    "tardis_index_bytes": ("index_bytes", "Shared memory that the index takes."),
    "tardis_registered_bytes": ("registered_bytes", "Host memory registered with io_uring."),
    "tardis_io_peak_in_flight": ("io_peak_in_flight", "Most I/O requests that were in flight at once."),
}
_COUNTERS = {
    "tardis_lookup_pages": ("lookup_pages", "Pages asked for by queries."),
    "tardis_lookup_hit_pages": ("lookup_hit_pages", "Pages that queries found."),
    "tardis_read_pages_hit": ("get_pages_hit", "Pages read and verified."),
    "tardis_read_pages_missed": ("get_pages_missed", "Pages asked for that are not stored."),
    "tardis_read_pages_raced": ("get_pages_raced", "Pages that were replaced while they were read (misses)."),
    "tardis_read_pages_torn": ("get_pages_torn", "Pages half-written by a crash, found at a read (misses)."),
    "tardis_read_pages_corrupt": ("get_pages_corrupt", "Pages whose bytes did not match their digests (misses)."),
    "tardis_read_pages_failed": ("get_pages_failed", "Pages whose read failed (misses)."),
    "tardis_read_bytes": ("get_bytes", "Bytes of pages read."),
    "tardis_written_pages": ("set_pages_written", "Pages written."),
    "tardis_written_pages_present": (
        "set_pages_present",
        "Pages that were stored already when they were to be written.",
    ),
    "tardis_written_pages_dropped": ("set_pages_dropped", "Pages not written because there was no room in time."),
    "tardis_written_pages_failed": ("set_pages_failed", "Pages whose write failed."),
    "tardis_written_bytes": ("set_bytes", "Bytes of pages written."),
    "tardis_evicted_pages": ("evicted_pages", "Pages evicted to make room."),
    "tardis_cleared_pages": ("cleared_pages", "Pages deleted on request."),
    "tardis_checkpoints": ("checkpoints", "Times this process saved the index beside the data."),
    "tardis_read_batches": ("read_batches", "Batches of reads."),
    "tardis_read_batches_delayed": ("read_batches_delayed", "Batches of reads beside which a flush ran."),
    "tardis_write_batches_yielded": ("writes_yielded", "Batches of writes that held back for reads."),
    "tardis_flush_failures": ("flush_failures", "Flushes to disk that failed."),
    "tardis_io_errors": ("io_errors", "I/O requests that failed."),
    "tardis_bounced_requests": ("bounced_requests", "I/O requests that went through an aligned bounce buffer."),
}


# The direct door's: metric name -> (field of TardisLinker.state, documentation)
_LINKER_COUNTERS = {
    "tardis_direct_loads": ("loads", "Requests whose pages were loaded by the direct door."),
    "tardis_direct_failed_loads": ("failed_loads", "Requests of loads that failed; they are computed."),
    "tardis_direct_memory_pages": ("pages_from_memory", "Pages loaded from the DRAM tier."),
    "tardis_direct_file_pages": ("pages_from_files", "Pages loaded from the store's files."),
    "tardis_direct_copy_engine_loads": ("loads_by_copy_engine", "Loads by copy engines of a GPU."),
    "tardis_direct_copy_engine_runs": ("copy_engine_runs", "Runs of pages in those: few are fast."),
    "tardis_direct_mover_loads": ("loads_by_movers", "Loads by movers of a GPU."),
    "tardis_direct_missing_pages": ("loader_missing", "Pages that were gone when their load began."),
    "tardis_direct_unproven_pages": ("loader_unproven", "Pages whose digests proved nothing."),
    "tardis_direct_repaired_parts": ("loader_repaired_parts", "Layers of pages that the host read again."),
    "tardis_direct_renewals": ("renewals", "Times that queue pairs were made anew after a fault."),
    "tardis_direct_damaged_pages": ("loader_damaged_pages", "Pages whose bytes were wrong twice."),
    "tardis_direct_offloaded_pages": ("pages_offloaded", "Pages copied to the DRAM tier."),
    "tardis_direct_promoted_pages": ("pages_promoted", "Of them, pages that were stored already."),
    "tardis_direct_stored_pages": ("write_stored", "Pages stored from the DRAM tier, or found stored then."),
    "tardis_direct_not_stored_pages": ("write_not_stored", "Pages that the store did not take."),
    "tardis_direct_memory_only_pages": ("pages_in_memory_only", "Pages kept in DRAM alone: too much waited."),
    "tardis_direct_dropped_pages": ("pages_dropped_no_room", "Pages not kept: no room in DRAM."),
    "tardis_direct_evicted_pages": ("dram_evicted", "Pages that made room in the DRAM tier."),
}
# In seconds, of fields in nanoseconds
_LINKER_TIMES = {
    "tardis_direct_load_seconds": ("load_ns", "Time that loads took on the GPU's stream of loads."),
    "tardis_direct_layer_wait_seconds": ("layer_wait_ns", "Time that forwards stood still for layers under way."),
}
_LINKER_GAUGES = {
    "tardis_direct_dram_slots": ("dram_slots", "Pages that the DRAM tier has room for."),
    "tardis_direct_dram_pages": ("dram_published", "Pages in the DRAM tier."),
    "tardis_direct_dram_pinned_pages": ("dram_pinned", "Pages of the DRAM tier in use."),
    "tardis_direct_waiting_bytes": ("write_waiting_bytes", "Bytes in the DRAM tier that wait to be stored."),
    "tardis_direct_loads_under_way": ("loads_under_way", "Loads under way."),
}


class _Registered:
    """The metric objects; prometheus_client allows one of each name per process, so re-attaching uses the old ones."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge

        self.gauges = {name: Gauge(name, text, multiprocess_mode="mostrecent") for name, (_, text) in _GAUGES.items()}
        self.counters = {name: Counter(name, text) for name, (_, text) in _COUNTERS.items()}
        self.failures = Counter(
            "tardis_door_failures", "Pages of calls that failed before the store was asked.", ["kind"]
        )
        self.path = Gauge(
            "tardis_path_info",
            "1 for the path in use: how the store does its I/O, and how pages lie in it.",
            ["engine", "direct_io", "filesystem", "layout"],
            multiprocess_mode="mostrecent",
        )


_registered: _Registered | None = None


class _LinkerRegistered:
    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge

        self.gauges = {
            name: Gauge(name, text, multiprocess_mode="mostrecent") for name, (_, text) in _LINKER_GAUGES.items()
        }
        self.counters = {name: Counter(name, text) for name, (_, text) in _LINKER_COUNTERS.items()}
        self.times = {name: Counter(name, text) for name, (_, text) in _LINKER_TIMES.items()}
        self.bytes = Counter("tardis_direct_bytes", "Bytes moved by the direct door.", ["source"])


_linker_registered: _LinkerRegistered | None = None


class LinkerMetrics:
    """Publishes the direct door's counters; quietly does nothing where prometheus_client is missing."""

    def __init__(self) -> None:
        """Register the metrics with the process's default registry."""
        global _linker_registered
        if _linker_registered is None:
            try:
                _linker_registered = _LinkerRegistered()
            except ImportError:
                _linker_registered = None
        self._metrics = _linker_registered
        self._seen: dict[str, int] = {}

    def update(self, state: Mapping[str, int], page_bytes: int) -> None:
        """Publish counters (``TardisLinker.state``); `page_bytes`: of an object."""
        if self._metrics is None:
            return
        for name, (field, _) in _LINKER_GAUGES.items():
            self._metrics.gauges[name].set(state.get(field, 0))
        for name, (field, _) in _LINKER_COUNTERS.items():
            self._metrics.counters[name].inc(self._step(field, state.get(field, 0)))
        for name, (field, _) in _LINKER_TIMES.items():
            self._metrics.times[name].inc(self._step(field, state.get(field, 0)) / 1e9)
        for source, field in (("memory", "pages_from_memory"), ("files", "pages_from_files")):
            moved = self._step(f"bytes:{source}", state.get(field, 0) * page_bytes)
            self._metrics.bytes.labels(source).inc(moved)

    def _step(self, key: str, value: int) -> int:
        """By how much a sum has grown; one that begins anew (the loader's, with new weights) counts from there."""
        before, self._seen[key] = self._seen.get(key, 0), value
        return value - before if value >= before else value


class StoreMetrics:
    """Publishes one store's counters; quietly does nothing where prometheus_client is missing."""

    def __init__(self) -> None:
        """Register the metrics with the process's default registry."""
        global _registered
        if _registered is None:
            try:
                _registered = _Registered()
            except ImportError:
                _registered = None
        self._metrics = _registered
        self._seen: dict[str, int] = {}
        self._last = float("-inf")
        self._path_labels: tuple[str, ...] | None = None

    @property
    def enabled(self) -> bool:
        """Whether prometheus_client is there."""
        return self._metrics is not None

    def due(self) -> bool:
        """Whether the last update is long enough ago; cheap, so that it can be asked at every scheduler step."""
        return time.monotonic() - self._last >= _PERIOD_SECONDS

    def set_path(self, report: Mapping[str, Any], layout: str) -> None:
        """Say which path is in use (``Store.path_report``)."""
        if self._metrics is None:
            return
        labels = (*(str(report.get(name, "unknown")) for name in ("engine", "direct_io", "filesystem")), layout)
        if self._path_labels not in (None, labels):
            self._metrics.path.labels(*self._path_labels).set(0)
        self._path_labels = labels
        self._metrics.path.labels(*labels).set(1)

    def update(self, stats: Mapping[str, int], failures: Mapping[str, int] | None = None) -> None:
        """Publish the store's counters (``Store.stats``) and the number of pages by kind of failed call."""
        if self._metrics is None:
            return
        self._last = time.monotonic()
        for name, (field, _) in _GAUGES.items():
            if field in stats:
                self._metrics.gauges[name].set(stats[field])
        for name, (field, _) in _COUNTERS.items():
            if field in stats:
                self._increase(self._metrics.counters[name], field, stats[field])
        for kind, value in (failures or {}).items():
            self._increase(self._metrics.failures.labels(kind), f"failure:{kind}", value)

    def _increase(self, counter: Any, key: str, value: int) -> None:
        step = value - self._seen.get(key, 0)
        if step > 0:
            counter.inc(step)
        self._seen[key] = value
