# SPDX-License-Identifier: Apache-2.0
"""Typed face of the C++ object store. Every call that does work releases the GIL.

A store keeps objects: the bytes of one KV page of one namespace, found by a 256-bit block hash. See
docs/on-disk-format.md for what lies on disk and `cpp/include/tardis/tardis.h` for what each call promises.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from sglang_tardis import _core
from sglang_tardis.codes import CODES

__all__ = [
    "Namespace",
    "ObjectInfo",
    "ObjectLayout",
    "Store",
    "StoreBusyError",
    "StoreClosedError",
    "StoreFormatError",
    "StoreOptions",
    "StoreSettingError",
    "TardisError",
    "digest",
    "inspect",
    "list_objects",
    "probe",
    "verify",
    "verify_live",
]

HashArray = npt.NDArray[np.uint8]
PieceArray = npt.NDArray[np.uint64]


class TardisError(Exception):
    """The store refused or failed; the message says what was expected, what was found and what to do.

    Attributes:
        code: one of invalid_argument, not_found, io, corrupt, busy, no_space, unsupported_format, permission, closed,
            internal.
    """

    def __init__(self, message: str, code: str = "internal") -> None:
        super().__init__(message)
        self.code = code


class StoreBusyError(TardisError):
    """Another process has the store open and cannot be joined, or must be alone."""


class StoreFormatError(TardisError):
    """The bytes on disk were written by a newer release, or are not a store."""


class StoreSettingError(TardisError, ValueError):
    """A setting or an argument is wrong; the message names it."""


class StoreClosedError(TardisError):
    """The store was closed."""


_ERRORS: dict[str, type[TardisError]] = {
    "invalid_argument": StoreSettingError,
    "busy": StoreBusyError,
    "unsupported_format": StoreFormatError,
    "corrupt": StoreFormatError,
    "closed": StoreClosedError,
}


def _error(code: int, message: str) -> TardisError:
    name = CODES[code] if 0 <= code < len(CODES) else "internal"
    return _ERRORS.get(name, TardisError)(message or name, name)


class _translated:
    """Context: the core's exceptions leave as this module's."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, _core.CoreError):
            raise _error(*error.args) from None


def _folder(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise StoreSettingError(f"path: expected a name in UTF-8, found {text!r}", "invalid_argument") from None
    if "\0" in text:  # the core would see what comes before it, another folder
        raise StoreSettingError(f"path: expected a name without NUL characters, found {text!r}", "invalid_argument")
    return text


def _further_folders(paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Absolute, since the store remembers them for processes that work in other folders."""
    if isinstance(paths, (str, bytes, os.PathLike)):  # a text is a sequence of texts, too
        raise StoreSettingError(f"more_paths: expected a list of folders, found {paths!r}", "invalid_argument")
    folders = [_folder(path) for path in paths]
    if "" in folders:
        raise StoreSettingError("more_paths: expected names of folders, found an empty one", "invalid_argument")
    return [os.path.abspath(folder) for folder in folders]


class _ForkedCore:
    """Takes the core's place in a forked child: its threads and rings are the parent's, and closing would stop them."""

    def close(self) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        raise StoreClosedError("the store was opened before this process was forked; open it in one process", "closed")


_open_stores: weakref.WeakSet[Store] = weakref.WeakSet()


def _leave_to_the_parent() -> None:
    for store in list(_open_stores):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(store._core))  # never destroyed here: its destructor closes
        store._core = _ForkedCore()


os.register_at_fork(after_in_child=_leave_to_the_parent)


class ObjectLayout(msgspec.Struct, frozen=True):
    """How one object lies in memory: `parts` parts (layers), each of the same regions (K and V, or one).

    Attributes:
        parts: number of parts, >= 1.
        region_bytes: bytes of each region of one part, in stored order; 1 to 4 regions.
    """

    parts: int
    region_bytes: tuple[int, ...]

    @property
    def object_bytes(self) -> int:
        """Bytes of one object, without padding."""
        return self.parts * sum(self.region_bytes)


class StoreOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a store; sglang_tardis.config documents each. Bytes, unless the name says else; 0 = automatic.

    Attributes:
        more_paths: further folders, at most 15, over which the store spreads its data; best on other drives. None:
            those that the store has. A list is exact: a folder that the store has and that is not named is forgotten,
            with the pages there, so `()` leaves the store its own folder only. Every process that has the store open
            must name the same (or None).
        placement: with several folders, "objects" puts an object into one of them, "layers" its parts into all in
            turn. Of segments made from now on; both kinds may be in one store.
    """

    capacity_bytes: int = 0
    segment_bytes: int = 0
    object_bytes_hint: int = 0
    free_space_floor: int = 2 << 30
    engine: Literal["auto", "io_uring", "sync"] = "auto"
    direct_io: Literal["auto", "on", "off"] = "auto"
    queue_depth: int = 0
    io_workers: int = 0
    bounce_buffers: int = 32
    flush_bytes: int = 256 << 20
    flush_milliseconds: int = 50
    checkpoint_seconds: int = 300
    shared_memory: str = "/dev/shm"
    verify_reads: bool = True
    more_paths: Sequence[str | os.PathLike[str]] | None = None
    placement: Literal["objects", "layers"] = "objects"

    def _settings(self) -> dict[str, int | str | list[str] | None]:
        settings = msgspec.structs.asdict(self)
        settings["engine"] = ("auto", "io_uring", "sync").index(self.engine)
        settings["placement"] = ("objects", "layers").index(self.placement)
        settings["direct"] = ("auto", "on", "off").index(settings.pop("direct_io"))
        if self.more_paths is not None:
            settings["more_paths"] = _further_folders(self.more_paths)
        return settings


class Namespace:
    """The objects of one identity (model, weights, dtype, layout, ...). Made by `Store.namespace`."""

    def __init__(self, store: Store, handle: int, layout: ObjectLayout) -> None:
        self._store = store
        self._handle = handle
        self.layout = layout

    @property
    def handle(self) -> int:
        """Number of the namespace in its open store, for calls of the C ABI."""
        return self._handle

    def lookup(self, hashes: HashArray) -> int:
        """Length of the leading run of stored hashes. No I/O.

        Args:
            hashes: (n, 32) uint8, C-contiguous.

        Raises:
            StoreClosedError: the store was closed.
        """
        with _translated():
            return self._store._core.lookup(self._handle, hashes)

    def set(self, hashes: HashArray, pieces: PieceArray, parent: bytes | None = None) -> npt.NDArray[np.bool_]:
        """Store objects; their memory may be reused when the call returns. Durable after the next flush group.

        Args:
            hashes: (n, 32) uint8; hashes[i - 1] is the prefix of hashes[i].
            pieces: (n, parts * regions) uint64 addresses, [part][region].
            parent: 32-byte hash before hashes[0], if known.

        Returns:
            (n,) bool, True...True False...False. `store.last_problem` says why a suffix is missing.

        Raises:
            StoreSettingError, StoreClosedError: nothing was stored.
        """
        ok, code, message = self._store._core.set(self._handle, hashes, pieces, parent)
        self._store._note(code, message)
        return ok

    def get(self, hashes: HashArray, pieces: PieceArray) -> npt.NDArray[np.bool_]:
        """Load objects into memory and verify them against their digests.

        Args:
            hashes: (n, 32) uint8.
            pieces: (n, parts * regions) uint64 addresses, [part][region].

        Returns:
            (n,) bool; the memory of a False page has undefined contents. Pages after the first absent one are not read.

        Raises:
            StoreSettingError, StoreClosedError: nothing was read.
        """
        ok, code, message = self._store._core.get(self._handle, hashes, pieces)
        self._store._note(code, message)
        return ok


class Store:
    """The object store in a folder, which other processes may have open too: they share its index and capacity.

    Args:
        path: the store's own folder; made when missing. `options.more_paths` names further ones.
        options: see StoreOptions.
        create: make the store when the folder holds none.

    Raises:
        StoreBusyError: a process has it open that this one cannot share the index with. StoreFormatError: foreign or
            newer. StoreSettingError: a setting is wrong. TardisError: the operating system refused (code permission,
            no_space, io).
    """

    def __init__(
        self, path: str | os.PathLike[str], options: StoreOptions | None = None, *, create: bool = True
    ) -> None:
        self.path = _folder(path)
        with _translated():
            self._core = _core.Store(self.path, (options or StoreOptions())._settings(), create)
        _open_stores.add(self)
        self.last_problem: TardisError | None = None
        self._report: dict[str, Any] = json.loads(self._core.path_report())

    @property
    def handle(self) -> int:
        """Address of the tardis_store, for calls of the C ABI; as long as the object."""
        return self._core.handle

    def _note(self, code: int, message: str) -> None:
        if code == 0:
            return
        error = _error(code, message)
        if isinstance(error, StoreClosedError | StoreSettingError):
            raise error
        self.last_problem = error

    def namespace(self, fingerprint: bytes, description: str, layout: ObjectLayout) -> Namespace:
        """Open a namespace and write its readable description beside the data.

        Args:
            fingerprint: 16 bytes.
            description: JSON text that the fingerprint was made from.
            layout: of its objects.

        Raises:
            StoreSettingError: an object does not fit a segment, or the fingerprint already stands for something else.
        """
        with _translated():
            handle = self._core.open_namespace(fingerprint, description, layout.parts, list(layout.region_bytes))
        return Namespace(self, handle, layout)

    def register_memory(self, address: int, size: int) -> None:
        """Tell the store of memory that many calls will use, so that the kernel need not look its pages up each time.

        A hint: what cannot be registered works as before; `stats()["registered_bytes"]` says how much was.

        Args:
            address: of the first byte. Unregister the memory, or close the store, before it is freed.
            size: in bytes.

        Raises:
            TardisError: it overlaps memory that is registered.
        """
        with _translated():
            self._core.register_memory(address, size)

    def unregister_memory(self, address: int) -> None:
        """Undo `register_memory`; no call may be using the memory."""
        self._core.unregister_memory(address)

    def flush(self) -> None:
        """Return when all that this process stored before the call is durable.

        That includes the pages which it found stored already by another process: that one is asked to flush.

        Raises:
            TardisError: the device failed.
        """
        with _translated():
            self._core.flush()

    def repair_headers(self) -> int:
        """Free the slots whose headers fail their checks, durably; returns how many. Pages in them become misses.

        Raises:
            TardisError: a segment could not be read, written or had to itself (code busy: another process writes on).
        """
        with _translated():
            return self._core.repair_headers()

    def clear(self, fingerprint: bytes | None = None) -> int:
        """Delete every object, or those of one namespace (opened or not), durably; returns how many were published.

        Args:
            fingerprint: 16 bytes; None for all namespaces.

        Raises:
            TardisError: the device failed, or a segment that cannot be read may hold more (code corrupt).
        """
        with _translated():
            return self._core.clear(fingerprint)

    def remove(self, key_prefix: str = "", fingerprint: bytes | None = None) -> int:
        """Delete the objects whose key begins with these hexadecimal digits, durably; returns how many were published.

        Args:
            key_prefix: 0 to 64 hexadecimal digits, also an odd number of them; "" for every key.
            fingerprint: 16 bytes, of one namespace (opened or not); None for all.

        Raises:
            StoreSettingError: not hexadecimal digits, or too many.
            TardisError: the device failed, or a segment that cannot be read may hold more (code corrupt).
        """
        try:
            prefix = bytes.fromhex(key_prefix + "0" * (len(key_prefix) % 2))
        except ValueError:
            raise StoreSettingError(
                f"key prefix: expected hexadecimal digits, found {key_prefix!r}", "invalid_argument"
            ) from None
        with _translated():
            return self._core.remove(prefix, len(key_prefix), fingerprint)

    def prune(self, target_bytes: int, fingerprint: bytes | None = None) -> int:
        """Evict the least valuable objects until at most `target_bytes` of payload are stored; returns how many went.

        Eviction is not deletion: a crash may bring an object back. Objects being read, and prefixes of others that
        stay, are kept.

        Args:
            target_bytes: of all objects, or of one namespace.
            fingerprint: 16 bytes, of the namespace to take from; None for all.
        """
        with _translated():
            return self._core.prune(target_bytes, fingerprint)

    def stats(self) -> dict[str, int]:
        """Counters and sizes (fields of tardis_stats). No I/O; works after close()."""
        return self._core.stats()

    def path_report(self) -> dict[str, Any]:
        """How I/O is done, as the self-test at the start found it, notes of the recovery, and the folders as of now.

        `paths`: the store's own folder first; each with `path`, `state` ("in use", or "out": what is there is not
        served and nothing is written there, until a first process opens the store again), `reason` (why it is out, else
        ""), `segments` (data files) and `free_bytes` (of its file system). Works after close(), then as it was before.
        """
        with contextlib.suppress(StoreClosedError), _translated():
            self._report = json.loads(self._core.path_report())
        return self._report

    def close(self) -> None:
        """Wait for calls in flight, flush, mark the store clean and release it. Idempotent."""
        with _translated():
            self._core.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def inspect(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What the files of a store say, read without its lock. Raises TardisError (not_found, unsupported_format, ...)."""
    with _translated():
        try:
            text = _core.inspect(_folder(path))
        except UnicodeDecodeError as error:  # a damaged description; the rest is worth showing
            text = error.object.decode("utf-8", "replace")
        return json.loads(text)


def probe(path: str | os.PathLike[str], options: StoreOptions | None = None) -> dict[str, Any]:
    """Run the storage self-test in a folder: the engine and alignments a store there would use, and why."""
    with _translated():
        return json.loads(_core.probe(_folder(path), (options or StoreOptions())._settings()))


def verify(
    path: str | os.PathLike[str], *, repair: bool = False, progress: Callable[[int, int], bool] | None = None
) -> tuple[dict[str, int], list[str]]:
    """Read every header and payload of a store that no process uses.

    Args:
        path: the store's folder.
        repair: quarantine corrupt objects, free broken headers and torn objects.
        progress: called with (bytes done, bytes in all); False stops.

    Returns:
        Counts (fields of tardis_verify_report) and readable problem lines (at most 1000).

    Raises:
        StoreBusyError: a process uses it. TardisError: no store there, stopped, or the device failed.
    """
    with _translated():
        report, problems = _core.verify(_folder(path), repair, False, progress)
    return report, json.loads(problems)


def verify_live(
    path: str | os.PathLike[str], *, progress: Callable[[int, int], bool] | None = None
) -> tuple[dict[str, int], list[str]]:
    """Like `verify`, but of a store that is in use: takes no lock and changes nothing.

    A page that fails is read again later and judged only if nobody wrote its segment in between and since the store was
    last closed; otherwise it is counted as `torn` (a write in progress, or what an eviction left).

    Raises:
        TardisError: no store there, or stopped.
    """
    with _translated():
        report, problems = _core.verify(_folder(path), False, True, progress)
    return report, json.loads(problems)


class ObjectInfo(msgspec.Struct, frozen=True):
    """One stored object as its header describes it.

    Attributes:
        key: 32 bytes. fingerprint: 16 bytes, of its namespace.
        parent: first 8 bytes of the parent's key as a little-endian integer; 0: none known.
        generation: of its slot; rises whenever a slot is used again.
        payload_bytes: without padding. root_digest: over all of them. flush_group: durable once this group is.
        parts: number of parts (layers), each of payload_bytes / parts.
        segment, slot: where it lies.
        quarantined: it failed its digest; never served.
    """

    key: bytes
    fingerprint: bytes
    parent: int
    generation: int
    payload_bytes: int
    root_digest: int
    flush_group: int
    parts: int
    segment: int
    slot: int
    quarantined: bool


_OBJECT_INFO = struct.Struct("<32s16s5Q4I")  # tardis_object_info


def list_objects(path: str | os.PathLike[str]) -> Iterator[ObjectInfo]:
    """The objects of a store, by segment and slot, read without its lock: it may be in use.

    It then tells of a moment that has passed, and of evicted objects until their slot is used again.

    Raises:
        TardisError: no store there (code not_found), or the device failed.
    """
    with _translated():
        packed = _core.list_objects(_folder(path))
    for *fields, quarantined in _OBJECT_INFO.iter_unpack(packed):
        yield ObjectInfo(*fields, bool(quarantined))


def digest(layout: ObjectLayout, pieces: PieceArray) -> int:
    """Root digest of one object in memory; pieces: (parts * regions,) uint64 addresses."""
    with _translated():
        return _core.digest(layout.parts, list(layout.region_bytes), pieces)
