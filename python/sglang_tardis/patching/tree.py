# SPDX-License-Identifier: Apache-2.0
"""An installed SGLang: where it is, and which of the known states its files are in."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

from .errors import PatchError
from .release import FilePatch, ReleasePatch

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Larger than any file of SGLang by far: what is larger is not one.
_MAX_FILE_BYTES = 64 << 20


class FileState(NamedTuple):
    """One file of a tree, compared with one patch.

    Attributes:
        path: relative to the folder that holds the package.
        state: "unknown" is every content but the two that the patch names, and what is no regular file.
        found: its SHA-256, or why it has none.
        before: SHA-256 that the release has.
        after: SHA-256 that the patched release has.
    """

    path: str
    state: Literal["original", "patched", "unknown"]
    found: str
    before: str
    after: str


class Tree(NamedTuple):
    """An installed SGLang.

    Attributes:
        package: the folder ``sglang``, without symbolic links.
        version: what its metadata says, for messages only; None if there is none.
        release: the release whose patch fits; for an unknown tree the one that comes closest, or None.
        state: "partial" if some files are patched and the others original, as an interrupted change leaves them.
        files: one for each file that the patch of `release` changes.
    """

    package: Path
    version: str | None
    release: str | None
    state: Literal["original", "patched", "partial", "unknown"]
    files: tuple[FileState, ...]


def find_package(site: str | os.PathLike[str] | None = None) -> Path:
    """The folder of the package ``sglang`` in `site`, or the one that this Python would import. Imports nothing.

    Raises:
        PatchError: there is none.
    """
    if site is not None:
        folder = Path(site)
        if not (folder / "sglang" / "__init__.py").is_file():
            hint = " It is the package itself; give the folder above it." if (folder / "srt").is_dir() else ""
            raise PatchError(f"--site {folder}: expected a folder that holds the package sglang.{hint}")
        return Path(os.path.realpath(folder / "sglang"))
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None or not os.path.isfile(spec.origin):
        raise PatchError(
            "SGLang is not installed in this Python environment. Run tardis from the environment of the server, or "
            "name the folder that holds the package with --site."
        )
    return Path(os.path.realpath(os.path.dirname(spec.origin)))  # __init__.py itself may be a link into a cache


def examine(package: Path, patches: Sequence[ReleasePatch]) -> Tree:
    """Compare a tree with every patch.

    Args:
        package: the folder ``sglang`` (:func:`find_package`).
        patches: those of :func:`sglang_tardis.patching.load_patches`.

    Raises:
        PatchError: a file cannot be read.
    """
    version = _version(package)
    best: tuple[tuple[int, bool], ReleasePatch | None, tuple[FileState, ...]] = ((0, False), None, ())
    for patch in patches:
        files = tuple(_file_state(package, file) for file in patch.files)
        states = [file.state for file in files]
        if "unknown" not in states:
            state = "partial" if len(set(states)) > 1 else states[0]
            return Tree(package, version, patch.release, state, files)
        rank = (len(states) - states.count("unknown"), patch.release == version)
        if rank > best[0]:
            best = (rank, patch, files)
    _, patch, files = best
    return Tree(package, version, patch.release if patch else None, "unknown", files)


def _version(package: Path) -> str | None:
    for distribution in metadata.distributions(name="sglang", path=[str(package.parent)]):
        return distribution.version
    return None


def _file_state(package: Path, file: FilePatch) -> FileState:
    try:
        with open_folder(package, file.path) as folder:
            found = hashlib.sha256(read_file(folder, Path(file.path).name)).hexdigest()
    except FileNotFoundError:
        return FileState(file.path, "unknown", "no such file", file.before, file.after)
    except NotPlainError as error:
        return FileState(file.path, "unknown", str(error), file.before, file.after)
    except OSError as error:
        raise PatchError(f"{package.parent / file.path} cannot be read: {error.strerror}") from error
    state = "original" if found == file.before else "patched" if found == file.after else "unknown"
    return FileState(file.path, state, found, file.before, file.after)


class NotPlainError(Exception):
    """A symbolic link or a special file stands where a file or folder of the release should be."""


@contextmanager
def open_folder(package: Path, path: str) -> Iterator[int]:
    """File descriptor of the folder that holds `path`, reached from `package` without following symbolic links.

    Args:
        package: the folder ``sglang``.
        path: relative to the folder above it.

    Raises:
        NotPlainError: a folder on the way is a symbolic link or a file.
        OSError: it cannot be opened.
    """
    _, *folders, _ = path.split("/")
    descriptor = os.open(package, _FOLDER_FLAGS)
    try:
        for name in folders:
            if not stat.S_ISDIR(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
                raise NotPlainError(f"{name} is not a folder but a symbolic link or a file")
            below = os.open(name, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        yield descriptor
    finally:
        os.close(descriptor)


def read_file(folder: int, name: str) -> bytes:
    """Content of a regular file in an open folder.

    Raises:
        NotPlainError: it is something else than a regular file, or too large to be one of SGLang's.
        OSError: it cannot be read.
    """
    kind = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    if not stat.S_ISREG(kind):
        raise NotPlainError("a symbolic link" if stat.S_ISLNK(kind) else "not a regular file")
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with open(descriptor, "rb") as stream:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_FILE_BYTES:
            raise NotPlainError(f"{status.st_size} bytes, not a source file")
        return stream.read()
