# SPDX-License-Identifier: Apache-2.0
"""How long something took where it ran: on a GPU's stream, or on the calling thread."""

from __future__ import annotations

import time
from typing import Protocol

import torch

__all__ = ["HostInterval", "Interval", "StreamInterval"]


class Interval(Protocol):
    """One measurement at a time."""

    def begin(self, stream: torch.cuda.Stream | None = None) -> None:
        """From here on; stream None: the current one."""

    def end(self, stream: torch.cuda.Stream | None = None) -> None:
        """Up to here."""

    def nanoseconds(self) -> int:
        """How long it took; 0 if the stream has not come to its end yet."""


class HostInterval:
    """Of the calling thread, whatever the stream."""

    def __init__(self) -> None:
        self._begin = self._end = 0

    def begin(self, stream: torch.cuda.Stream | None = None) -> None:
        """See `Interval`."""
        self._begin = self._end = time.monotonic_ns()

    def end(self, stream: torch.cuda.Stream | None = None) -> None:
        """See `Interval`."""
        self._end = time.monotonic_ns()

    def nanoseconds(self) -> int:
        """See `Interval`."""
        return self._end - self._begin


class StreamInterval:
    """Of a stream, by two events."""

    def __init__(self) -> None:
        self._begin, self._end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def begin(self, stream: torch.cuda.Stream | None = None) -> None:
        """See `Interval`."""
        self._begin.record(stream)

    def end(self, stream: torch.cuda.Stream | None = None) -> None:
        """See `Interval`."""
        self._end.record(stream)

    def nanoseconds(self) -> int:
        """See `Interval`."""
        return int(self._begin.elapsed_time(self._end) * 1e6) if self._end.query() else 0
