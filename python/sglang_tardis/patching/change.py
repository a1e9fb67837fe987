# SPDX-License-Identifier: Apache-2.0
"""Taking a tree from one known state to the other: all files or none, and nothing that a crash cannot leave behind.

Every new content is written beside its file and made durable before the first file is replaced; replacing is a rename.
A process killed between two renames leaves a tree whose files are each original or patched, which the next `apply` or
`revert` finishes. A rename also leaves alone what other environments share with this one by hard links (uv's cache).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from .errors import PatchError
from .release import FilePatch, ReleasePatch
from .tree import NotPlainError, Tree, examine, open_folder, read_file
from .unified_diff import apply_hunks

_WANTED = {"apply": "patched", "revert": "original"}


class _Replacement(NamedTuple):
    file: FilePatch
    old: bytes
    new: bytes


def change(
    package: Path, patches: Sequence[ReleasePatch], action: Literal["apply", "revert"]
) -> tuple[Tree, list[str]]:
    """Apply or revert the patch that fits a tree. Does nothing to a tree that is in the wanted state.

    Args:
        package: the folder ``sglang`` (:func:`sglang_tardis.patching.find_package`).
        patches: those of :func:`sglang_tardis.patching.load_patches`.
        action: which way.

    Returns:
        The tree as it is now, and the paths that were replaced, relative to the folder above `package`.

    Raises:
        PatchError: the tree is not recognised, is in use by another `change`, or cannot be written. Then nothing was
            changed; the message says so if that is not so.
    """
    with _locked(package):
        tree = examine(package, patches)
        if tree.state == "unknown":
            raise PatchError(refusal(tree, patches))
        patch = next(patch for patch in patches if patch.release == tree.release)
        _remove_leftovers(package, patch)
        if tree.state == _WANTED[action]:
            return tree, []
        replacements = [
            _prepare(package, file, action)
            for file, found in zip(patch.files, tree.files, strict=True)
            if found.state != _WANTED[action]
        ]
        try:
            _replace_all(package, replacements)
        except (OSError, NotPlainError) as error:
            raise PatchError(
                f"{getattr(error, 'filename', None) or package} cannot be replaced: {_why(error)}. Nothing was changed."
                " Run this as the user who installed SGLang, on a file system that can be written and has space left."
            ) from error
        return examine(package, patches), [replacement.file.path for replacement in replacements]


def refusal(tree: Tree, patches: Sequence[ReleasePatch]) -> str:
    """Why an unknown tree is left alone: the first file that differs, what was expected and found, and what to do."""
    known = ", ".join(patch.release for patch in patches)
    version = tree.version or "an unknown version"
    if tree.release is None:
        return (
            f"{tree.package} ({version}) is none of the releases that there is a patch for ({known}): not one file "
            "matches. Nothing was changed. Use the plugin or SGLang's dynamic backend, which need no patch, or install "
            "one of those releases."
        )
    unknown = [file for file in tree.files if file.state == "unknown"]
    others = f" (and {len(unknown) - 1} more of its files)" if len(unknown) > 1 else ""
    file = unknown[0]
    return (
        f"{tree.package.parent / file.path}{others} is not that of SGLang {tree.release}: expected SHA-256 "
        f"{file.before} (as released) or {file.after} (patched), found {file.found}. Nothing was changed. "
        f"{_advice(tree, known)}"
    )


def _advice(tree: Tree, known: str) -> str:
    if tree.version is not None and tree.version != tree.release:
        return f"This is SGLang {tree.version}; there are patches for {known}. The plugin needs none."
    undo = "If another version of tardis patched it, revert with that version; if you changed it, undo the change"
    return f"{undo}; or restore the release with: pip install --force-reinstall --no-deps sglang=={tree.release}"


@contextlib.contextmanager
def _locked(package: Path) -> Iterator[None]:
    """Keep a second `change` of the same tree out; the lock dies with its process."""
    try:
        descriptor = os.open(package, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise PatchError(f"{package} cannot be opened: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise PatchError(
            f"another tardis sglang-patch is changing {package}. Run this again when it is done."
        ) from error
    except OSError:
        pass  # a file system without locks: hashes are checked all the same
    try:
        yield
    finally:
        os.close(descriptor)


def _temporary(name: str) -> str:
    return f".{name}.tardis-patch"


def _remove_leftovers(package: Path, patch: ReleasePatch) -> None:
    """Delete what a killed process left beside the files. What cannot be deleted here cannot be replaced either."""
    for file in patch.files:
        with _opened(package, file) as (folder, name), contextlib.suppress(OSError):
            os.unlink(_temporary(name), dir_fd=folder)


def _prepare(package: Path, file: FilePatch, action: str) -> _Replacement:
    reverse = action == "revert"
    try:
        with _opened(package, file) as (folder, name):
            old = read_file(folder, name)
        new = apply_hunks(old, file.hunks, reverse=reverse)
    except (OSError, NotPlainError, PatchError) as error:
        raise PatchError(f"{package.parent / file.path}: {_why(error)}. Nothing was changed.") from error
    expected, found = (file.before if reverse else file.after), hashlib.sha256(new).hexdigest()
    if found != expected:
        raise PatchError(
            f"{file.path}: the patch promises SHA-256 {expected}, the result has {found}. Nothing was changed. "
            "Reinstall sglang-tardis: its patch file is damaged."
        )
    return _Replacement(file, old, new)


def _replace_all(package: Path, replacements: Sequence[_Replacement]) -> None:
    try:
        for one in replacements:
            with _opened(package, one.file) as (folder, name):
                _write_beside(folder, name, one.new)
                _forget_bytecode(folder, Path(name).stem)
        for one in replacements:
            with _opened(package, one.file) as (folder, name):
                _rename(folder, name)
                os.fsync(folder)
    except BaseException:
        _take_back(package, replacements)
        raise


def _take_back(package: Path, replacements: Sequence[_Replacement]) -> None:
    """Put the old content back wherever it is not there any more, and remove what was written beside."""
    for one in reversed(replacements):
        try:
            with _opened(package, one.file) as (folder, name):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(_temporary(name), dir_fd=folder)
                if read_file(folder, name) != one.old:
                    _write_beside(folder, name, one.old)
                    _rename(folder, name)
                    os.fsync(folder)
        except (OSError, NotPlainError) as error:
            raise PatchError(
                f"{package.parent / one.file.path} could not be put back ({_why(error)}), so the tree may be half "
                "changed. Remove the cause and run apply or revert again: either continues from here."
            ) from error


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


@contextlib.contextmanager
def _opened(package: Path, file: FilePatch) -> Iterator[tuple[int, str]]:
    """The open folder of a file, and its name there; errors name the whole path, not only its last part."""
    try:
        with open_folder(package, file.path) as folder:
            yield folder, Path(file.path).name
    except OSError as error:
        error.filename = str(package.parent / file.path)
        raise


def _write_beside(folder: int, name: str, content: bytes) -> None:
    """Write a file's new content under its temporary name, durably, with the owner and mode of the present one."""
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(_temporary(name), flags, 0o600, dir_fd=folder)
    with open(descriptor, "wb") as stream:
        stream.write(content)
        stream.flush()
        with contextlib.suppress(PermissionError):  # only root can give files away; the mode is what matters
            os.fchown(descriptor, status.st_uid, status.st_gid)
        os.fchmod(descriptor, stat.S_IMODE(status.st_mode))
        os.fsync(descriptor)


def _rename(folder: int, name: str) -> None:
    os.replace(_temporary(name), name, src_dir_fd=folder, dst_dir_fd=folder)


def _forget_bytecode(folder: int, module: str) -> None:
    """Delete the compiled forms of a module that Python would use without looking at the source.

    Others are recognised as stale by the size of the source, which every patch changes.
    """
    try:
        cache = os.open("__pycache__", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        for name in os.listdir(cache):
            if re.fullmatch(re.escape(module) + r"\.[^.]+(\.opt-[^.]+)?\.pyc", name):
                with open(os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=cache), "rb") as stream:
                    flags = int.from_bytes(stream.read(8)[4:], "little")
                if flags & 0b11 == 0b01:  # PEP 552: made from a hash of the source that is not to be checked
                    os.unlink(name, dir_fd=cache)
    finally:
        os.close(cache)
