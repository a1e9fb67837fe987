# SPDX-License-Identifier: Apache-2.0
"""The package's logger, and ways to log from a data path without flooding it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

__all__ = ["FolderLog", "RateLimitedLog", "logger"]

logger = logging.getLogger("sglang_tardis")


class RateLimitedLog:
    """Logs at most one message per topic and period, and says how many were left out.

    Args:
        period_seconds: shortest time between two messages of one topic.
        log: the logger; the package's by default.
    """

    def __init__(self, period_seconds: float = 30.0, log: logging.Logger = logger) -> None:
        self._period = period_seconds
        self._log = log
        self._lock = threading.Lock()
        self._state: dict[str, tuple[float, int]] = {}  # topic -> (time of the last message, left out since)

    def warning(self, topic: str, message: str, *args: object, exc_info: bool = False) -> None:
        """Log a warning unless one of the same topic was logged less than a period ago."""
        now = time.monotonic()
        with self._lock:
            last, skipped = self._state.get(topic, (float("-inf"), 0))
            if now - last < self._period:
                self._state[topic] = (last, skipped + 1)
                return
            self._state[topic] = (now, 0)
        if skipped:
            message += f" ({skipped} more of this kind since the last message)"
        self._log.warning(message, *args, exc_info=exc_info)


class FolderLog:
    """Logs each folder of a store that is taken out, once: its pages are misses, which nothing else would tell."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logged: set[str] = set()

    def look(self, store: Any, stats: Mapping[str, int]) -> None:
        """Log the folders that went out since the last call; cheap as long as there are none.

        Args:
            store: an open `store.Store`.
            stats: what its `stats()` says now.
        """
        if stats.get("paths_out", 0) <= len(self._logged):
            return
        reasons = {one["path"]: one["reason"] for one in store.path_report()["paths"] if one["state"] == "out"}
        with self._lock:  # not for the report, which asks the drives
            new = reasons.keys() - self._logged
            self._logged |= new
        for path in sorted(new):
            logger.warning(
                "tardis: folder %s is out (%s): its pages are misses, the store goes on without it; it is tried again "
                "when all servers have stopped and the store is next opened",
                path,
                reasons[path],
            )
