# SPDX-License-Identifier: Apache-2.0
"""Reading unified diffs, and applying them without any tolerance: every line must be where the diff says it is."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .errors import PatchError

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_NO_NEWLINE = b"\\ No newline at end of file"


class Hunk(NamedTuple):
    """One change: the lines it replaces and the lines it puts there, both with their context.

    Attributes:
        old_start: number of the first line of `old`, from 1; for an empty `old` the line after which `new` goes.
        new_start: the same for `new`.
        old: lines with their line ends.
        new: lines with their line ends.
    """

    old_start: int
    new_start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]


class FileDiff(NamedTuple):
    """The changes of one file.

    Attributes:
        path: relative to the folder that holds the package, with forward slashes.
        preamble: the lines before it that belong to no hunk.
        hunks: in the order of the file.
    """

    path: str
    preamble: tuple[bytes, ...]
    hunks: tuple[Hunk, ...]


def parse(text: bytes) -> list[FileDiff]:
    """The file changes of a unified diff with ``a/`` and ``b/`` prefixes.

    Raises:
        PatchError: it is not such a diff, creates or deletes a file, or leaves the folder it is applied in.
    """
    lines = text.split(b"\n")
    if lines.pop() != b"":
        raise PatchError("the last line of the patch has no line end; it was cut off")
    files: list[FileDiff] = []
    preamble: list[bytes] = []
    at = 0
    while at < len(lines):
        if not lines[at].startswith(b"--- "):
            preamble.append(lines[at])
            at += 1
            continue
        path = _path(lines, at)
        at += 2
        hunks = []
        while at < len(lines) and lines[at].startswith(b"@@"):
            hunk, at = _hunk(lines, at)
            hunks.append(hunk)
        if not hunks:
            raise PatchError(f"the patch of {path} has no hunks")
        if any(file.path == path for file in files):
            raise PatchError(f"the patch changes {path} twice")
        files.append(FileDiff(path, tuple(preamble), tuple(hunks)))
        preamble = []
    if not files:
        raise PatchError("the patch changes no file")
    return files


def _path(lines: Sequence[bytes], at: int) -> str:
    header = b"\n".join(lines[at : at + 2]).decode("utf-8", "replace")
    match = re.fullmatch(r"--- a/(\S+)\n\+\+\+ b/(\S+)", header)
    if match is None or match[1] != match[2]:
        raise PatchError(f"line {at + 1} of the patch: expected '--- a/PATH' and '+++ b/PATH', found {header!r}")
    if any(part in ("", ".", "..") for part in match[1].split("/")):
        raise PatchError(f"line {at + 1} of the patch: {match[1]!r} is not a path inside the package")
    return match[1]


def _hunk(lines: Sequence[bytes], at: int) -> tuple[Hunk, int]:
    header = _HUNK.match(lines[at])
    if header is None:
        raise PatchError(f"line {at + 1} of the patch: expected '@@ -N,N +N,N @@', found {lines[at]!r}")
    old_start, new_start = int(header[1]), int(header[3])
    old_count, new_count = (int(header[group] if header[group] is not None else 1) for group in (2, 4))
    old: list[bytes] = []
    new: list[bytes] = []
    first = at
    at += 1
    while len(old) < old_count or len(new) < new_count:
        tag, content = (lines[at][:1], lines[at][1:] + b"\n") if at < len(lines) else (b"", b"")
        if tag not in (b" ", b"-", b"+"):
            raise PatchError(f"line {at + 1} of the patch: the hunk of line {first + 1} ends too early")
        at += 1
        if at < len(lines) and lines[at] == _NO_NEWLINE:
            content = content[:-1]
            at += 1
        if tag != b"+":
            old.append(content)
        if tag != b"-":
            new.append(content)
    if len(old) != old_count or len(new) != new_count:
        raise PatchError(f"line {first + 1} of the patch: the hunk does not have the number of lines that it announces")
    return Hunk(old_start, new_start, tuple(old), tuple(new)), at


def apply_hunks(data: bytes, hunks: Sequence[Hunk], *, reverse: bool = False) -> bytes:
    """A file's content after its hunks (or before them, if `reverse`).

    Raises:
        PatchError: a line is not where the hunk expects it; no other place is tried.
    """
    lines = data.split(b"\n")
    # Lines with their ends; a last line without one is kept as it is, and "" after a last line end is none.
    lines = [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    return b"".join(_merged(lines, hunks, reverse))


def _merged(lines: list[bytes], hunks: Sequence[Hunk], reverse: bool) -> Iterator[bytes]:
    done = 0
    for hunk in hunks:
        number, here, there = (hunk.new_start, hunk.new, hunk.old) if reverse else (hunk.old_start, hunk.old, hunk.new)
        start = number - 1 if here else number
        if start < done or tuple(lines[start : start + len(here)]) != here:
            raise PatchError(f"line {number} and the {len(here)} lines from there are not what the hunk expects")
        yield from lines[done:start]
        yield from there
        done = start + len(here)
    yield from lines[done:]
