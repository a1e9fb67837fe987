# SPDX-License-Identifier: Apache-2.0
"""The patches that this package brings, one file for each SGLang release."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from .errors import PatchError
from .unified_diff import FileDiff, Hunk, parse

_NAME = re.compile(r"sglang-(\d+(?:\.\d+)*\w*)\.patch")
_HASHES = re.compile(rb"^before ([0-9a-f]{64})\nafter  ([0-9a-f]{64})$", re.MULTILINE)


class FilePatch(NamedTuple):
    """One file that a patch changes.

    Attributes:
        path: relative to the folder that holds the package ``sglang``.
        before: SHA-256 of the released file, hexadecimal.
        after: SHA-256 of the patched file.
        hunks: the changes.
    """

    path: str
    before: str
    after: str
    hunks: tuple[Hunk, ...]


class ReleasePatch(NamedTuple):
    """The patch of one release.

    Attributes:
        release: SGLang's version, such as "0.5.23".
        files: what it changes, in the order in which the files are replaced.
    """

    release: str
    files: tuple[FilePatch, ...]


def patches_folder() -> Path:
    """Where the patch files are: inside the installed package, or at the top of the source tree."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "patches", package.parents[1] / "patches"):
        if any(folder.glob("sglang-*.patch")):
            return folder
    raise PatchError(f"no patch files in {package / 'patches'}: reinstall sglang-tardis")


def load_patches(folder: Path | None = None) -> list[ReleasePatch]:
    """Every patch in a folder (by default the package's own), oldest release first."""
    folder = patches_folder() if folder is None else folder
    patches = []
    for file in folder.iterdir():
        name = _NAME.fullmatch(file.name)
        if name is not None:
            try:
                files = tuple(_with_hashes(diff) for diff in parse(file.read_bytes()))
            except (OSError, PatchError) as error:
                raise PatchError(f"{file}: {error}. Reinstall sglang-tardis.") from error
            patches.append(ReleasePatch(name[1], files))
    return sorted(patches, key=lambda patch: [int(number) for number in re.findall(r"\d+", patch.release)])


def _with_hashes(diff: FileDiff) -> FilePatch:
    hashes = _HASHES.findall(b"\n".join(diff.preamble))
    if len(hashes) != 1:
        raise PatchError(f"expected one 'before' and one 'after' line above {diff.path}, found {len(hashes)}")
    before, after = (value.decode() for value in hashes[0])
    if before == after or not diff.path.startswith("sglang/"):
        raise PatchError(f"{diff.path} is not changed, or not a file of the package sglang")
    return FilePatch(diff.path, before, after, diff.hunks)
