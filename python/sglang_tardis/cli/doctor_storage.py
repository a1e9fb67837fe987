# SPDX-License-Identifier: Apache-2.0
"""The part of `tardis doctor` that looks at the folders of a store and at what is in them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from ..config import TardisConfig
from .render import human_bytes

# Of the format (docs/on-disk-format.md): the least size of a segment, and what the capacity must hold beside segments.
_MIN_SEGMENT_BYTES = 4 << 20
_METADATA_BYTES = 1 << 20
_MOUNTS = "/proc/self/mountinfo"
_HUGE_OPTIONS = {"huge=always", "huge=within_size"}


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at."""

    name: str
    status: Literal["ok", "note", "problem"]
    """"problem": a server would not start or would not store; "note": worth knowing."""
    detail: str


class _Folder:
    """One of the store's folders, or what will hold it."""

    def __init__(self, path: str, number: int, *, missing: bool) -> None:
        self.path = Path(path)
        self.suffix = "" if number == 1 else f" {number}"  # of the names of its findings
        self.missing = missing  # the store has it, and it is not there
        # Nothing is made in the place of a missing one, and what lies above it is on another drive.
        candidates = (self.path,) if missing else (self.path, *self.path.parents)
        self.tested = next((parent for parent in candidates if parent.is_dir()), self.path)
        self.device: int | None = None
        self.free: int | None = None
        self.error = ""
        try:
            space = os.statvfs(self.tested)
            self.device = os.stat(self.tested).st_dev
            self.free = space.f_bavail * space.f_frsize
        except OSError as error:
            self.error = error.strerror
        self.usable = self.free is not None and os.access(self.tested, os.W_OK | os.X_OK)

    def finding(self, floor: int, full_is: Literal["note", "problem"]) -> Finding:
        """Whether something can be stored here."""
        name = f"folder{self.suffix}"
        if self.missing:
            return Finding(
                name,
                "note",
                f"{self.path} is missing (not mounted?): the store goes on without it, and its pages are misses until "
                "it is there when the store is opened",
            )
        if self.free is None:
            return Finding(name, "problem", f"{self.tested}: {self.error}")
        if not self.usable:
            return Finding(name, "problem", f"{self.tested} is not writable by this user")
        if self.free <= floor:
            return Finding(
                name,
                full_is,
                f"{human_bytes(self.free)} free in {self.tested}, not more than free_space_floor "
                f"({human_bytes(floor)})",
            )
        return Finding(
            name, "ok", f"{human_bytes(self.free)} free in {self.tested}, {human_bytes(floor)} of it kept free"
        )


def examine_storage(config: TardisConfig, *, further_are_known: bool) -> Iterator[Finding]:
    """Look at the folders, how I/O is done in each, and at the store.

    Args:
        config: the settings.
        further_are_known: `config` names all folders; otherwise those further ones count that the store has.
    """
    try:
        from ..store import TardisError, inspect
    except ImportError as error:
        for number, path in enumerate((config.folder, *config.more_paths), start=1):
            yield _Folder(path, number, missing=False).finding(config.free_space_floor_bytes, "problem")
        yield Finding("core", "problem", f"the C++ core cannot be loaded ({error}); reinstall the package")
        return
    facts: Mapping[str, Any] | None = None
    unread: TardisError | None = None
    try:
        facts = inspect(config.folder)
    except TardisError as error:
        unread = error
    had = {one["path"]: one for one in facts["paths"][1:]} if facts else {}
    further = config.more_paths if further_are_known else tuple(had)
    folders = [_Folder(config.folder, 1, missing=False)]
    folders += [
        _Folder(path, number, missing=path in had and had[path]["state"] == "missing")
        for number, path in enumerate(further, start=2)
    ]
    yield from _folders(folders, config)
    yield from _sizes(config)
    if folders[0].tested != folders[0].path:
        yield Finding("store", "note", f"none at {folders[0].path} yet; a server will make one")
    elif facts is None:
        yield Finding("store", "note" if unread.code == "not_found" else "problem", str(unread))
    else:
        yield from _store(facts, config)
        if further_are_known:
            yield from _changed_folders(facts, further, tuple(had))


def _folders(folders: Sequence[_Folder], config: TardisConfig) -> Iterator[Finding]:
    floor = config.free_space_floor_bytes
    room = any(folder.usable and folder.free > floor for folder in folders)
    direct: dict[bool, Path] = {}
    for folder in folders:
        # A full drive does not matter as long as there is room on another.
        yield folder.finding(floor, "note" if room else "problem")
        if not folder.missing and folder.usable:
            report, finding = _self_test(folder, config)
            yield finding
            if report is not None:
                direct.setdefault(report["direct_io"], folder.path)
                if report["filesystem"] == "tmpfs":
                    yield from _memory_pages(folder)
    if len(direct) > 1:
        yield Finding(
            "direct I/O",
            "problem",
            f"{direct[True]} takes O_DIRECT and {direct[False]} does not: the folders of a store must be alike; set "
            "direct_io to off, or leave one out",
        )
    yield from _same_devices(folders)


def _self_test(folder: _Folder, config: TardisConfig) -> tuple[dict[str, Any] | None, Finding]:
    from ..store import TardisError, probe

    name = f"storage path{folder.suffix}"
    where = (
        f"{folder.path}"
        if folder.tested == folder.path
        else f"{folder.tested}, since {folder.path} does not exist yet,"
    )
    try:
        report = probe(str(folder.tested), msgspec.structs.replace(config.store_options(), more_paths=None))
    except TardisError as error:
        return None, Finding(name, "problem", str(error))
    return report, Finding(name, "ok", f"self-test in {where} chose: {_path_in_words(report)}")


def _memory_pages(folder: _Folder) -> Iterator[Finding]:
    options = mount_options(folder.device) if folder.device is not None else None
    if options is not None and not _HUGE_OPTIONS & options:
        yield Finding(
            f"pages{folder.suffix}",
            "note",
            "a tmpfs of small pages: the first read of what was written takes twice as long as the next ones; mount it "
            "with huge=always, which also an existing one takes (mount -o remount,huge=always)",
        )


def mount_options(device: int, mounts: str = _MOUNTS) -> set[str] | None:
    """Options of the file system with that number (`st_dev`); None if it cannot be found."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path(mounts).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        mount, _, file_system = line.partition(" - ")  # see proc(5)
        if mount.split()[2:3] == [wanted]:
            return set(file_system.split()[-1].split(","))
    return None


def _path_in_words(report: Mapping[str, Any]) -> str:
    direct = "O_DIRECT" if report["direct_io"] else "through the page cache"
    return f"{report['engine']}, {direct}, on {report['filesystem']}; why: {report['reason']}"


def _same_devices(folders: Sequence[_Folder]) -> Iterator[Finding]:
    by_device: dict[int, list[str]] = {}
    for folder in folders:
        if folder.device is not None:
            by_device.setdefault(folder.device, []).append(str(folder.path))
    for paths in by_device.values():
        if len(paths) > 1:
            yield Finding(
                "drives",
                "note",
                f"{' and '.join(paths)} are on the same device: nothing is gained by naming each of them (is a drive "
                "not mounted?)",
            )


def _sizes(config: TardisConfig) -> Iterator[Finding]:
    needed = max(_MIN_SEGMENT_BYTES, config.segment_bytes)
    if 0 < config.segment_bytes < needed or 0 < config.capacity_bytes < needed + _METADATA_BYTES:
        yield Finding(
            "sizes",
            "problem",
            f"capacity {config.capacity}, segment_size {config.segment_size}: a segment takes at least 4 MiB, and the "
            "capacity must hold one and 1 MiB more",
        )


def _store(facts: Mapping[str, Any], config: TardisConfig) -> Iterator[Finding]:
    if config.segment_bytes not in (0, facts["segment_bytes"]):
        yield Finding(
            "sizes",
            "problem",
            f"segment_size is {config.segment_size}, the store has {human_bytes(facts['segment_bytes'])}; leave it out",
        )
    owner = f"in use by {facts['owner']}" if facts.get("owner") else "in use by nobody"
    yield Finding(
        "store",
        "ok",
        f"{facts['objects']} pages, {human_bytes(facts['payload_bytes'])} of {human_bytes(facts['capacity_bytes'])}, "
        f"{owner}",
    )


def _changed_folders(facts: Mapping[str, Any], named: Sequence[str], had: Sequence[str]) -> Iterator[Finding]:
    """What the next opening does to the store's list of folders."""
    if set(named) == set(had):
        return
    if facts.get("owner"):
        yield Finding(
            "paths",
            "problem",
            f"the store is in use with the further folders {_list(had)}, `path` names {_list(named)}: all processes of "
            "a store must name the same",
        )
        return
    forgotten = [path for path in had if path not in named]
    if forgotten:
        yield Finding(
            "paths",
            "note",
            f"the store has {_list(forgotten)}, which `path` does not name: the next start forgets what is there",
        )
    new = [path for path in named if path not in had]
    if new:
        yield Finding("paths", "note", f"the next start takes in {_list(new)}")


def _list(paths: Sequence[str]) -> str:
    return ", ".join(paths) or "(none)"
