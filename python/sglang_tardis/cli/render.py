# SPDX-License-Identifier: Apache-2.0
"""Text for terminals: sizes, tables, progress."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO


def print_json(answer: Any) -> None:
    """What --json prints."""
    print(json.dumps(answer, indent=2))


def human_bytes(count: int) -> str:
    """A size in the largest binary unit that keeps it at or above one."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(value) < 1024 or unit == "PiB":
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def printable(text: object) -> str:
    """Text without characters that could steer a terminal: names in a store come from whoever wrote it."""
    return "".join(char if char.isprintable() else "?" for char in str(text))


def table(header: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[int] = ()) -> str:
    """Aligned columns; those numbered in `right` are aligned to the right."""
    cells = [list(header), *[[printable(cell) for cell in row] for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )


class Progress:
    """Progress of a pass over bytes: a bar that is redrawn on a terminal, a line for each tenth elsewhere."""

    def __init__(self, what: str, stream: TextIO | None = None) -> None:
        """`stream`: stderr by default, so that results on stdout can be piped."""
        self._what = what
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._start = self._drawn = time.monotonic()
        self._tenth = -1
        self._width = 0

    def __call__(self, done: int, total: int) -> bool:
        """Show that `done` of `total` bytes have been read. Always True: go on, also where nobody can be shown."""
        with contextlib.suppress(OSError):
            self._show(done, total)
        return True

    def _show(self, done: int, total: int) -> None:
        now = time.monotonic()
        share = min(1.0, done / total) if total else 1.0
        rate = human_bytes(int(done / max(now - self._start, 1e-3)))
        numbers = f"{share:4.0%}  {human_bytes(done)} of {human_bytes(total)}  {rate}/s"
        if self._terminal:
            if share < 1 and now - self._drawn < 0.1:
                return
            self._drawn = now
            line = f"{self._what} [{'#' * int(share * 30):<30}] {numbers}"
            self._stream.write("\r" + line.ljust(self._width))
            self._width = len(line)
            self._stream.flush()
        elif int(share * 10) != self._tenth:
            self._tenth = int(share * 10)
            self._stream.write(f"{self._what} {numbers.lstrip()}\n")
            self._stream.flush()

    def end(self) -> None:
        """Leave the bar's line."""
        if self._terminal and self._width:
            self._width = 0
            with contextlib.suppress(OSError):
                self._stream.write("\n")
                self._stream.flush()
