# SPDX-License-Identifier: Apache-2.0
"""Settings: the one place where each is named, typed, bounded, defaulted and documented.

docs/configuration.md is generated from `TardisConfig` (`python -m sglang_tardis.cli.config_docs --write <file>`).
"""

from __future__ import annotations

import difflib
import errno
import json
import os
import re
import stat
from collections.abc import Container, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from .config_text import ConfigError, parse_text, show

if TYPE_CHECKING:
    from .store import StoreOptions

ENVIRONMENT_VARIABLE = "TARDIS_CONFIG"
EXTRA_CONFIG_FLAG = "--hicache-storage-backend-extra-config"

SGLANG_KEYS: Mapping[str, str] = {
    "prefetch_threshold": "SGLang: shortest prefix, in tokens, that is fetched from storage",
    "prefetch_timeout_base": "SGLang: fetch time-out, constant part in seconds",
    "prefetch_timeout_per_ki_token": "SGLang: fetch time-out, seconds per 1024 tokens",
    "prefetch_timeout_max": "SGLang 0.5.16: upper bound of the fetch time-out in seconds",
    "hicache_storage_pass_prefix_keys": "SGLang: pass the keys of earlier pages to the backend",
    "tp_lcm_size": "SGLang: split heads so that several TP sizes can share pages (page_head layout)",
    "file_storage_path": "SGLang adds it by itself when --file-storage-path is given; for its own `file` backend",
    "allocator": "SGLang: host memory allocator of the `dynamic` backend",
    "backend_name": "SGLang: `dynamic` backend, its name",
    "module_path": "SGLang: `dynamic` backend, module to import",
    "class_name": "SGLang: `dynamic` backend, class in that module",
    "interface_v1": "SGLang: `dynamic` backend, use the zero-copy calls",
}
"""Keys of the extra config that belong to SGLang; they pass through, whether or not SGLang has taken them out."""

_MAX_BYTES = 2**63 - 1
_MAX_FOLDERS = 16
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power
_SIZE = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z]{0,3})\s*", re.ASCII)
_SIZE_HELP = 'bytes as an integer, or text with a unit such as "200GiB" (2^30) or "1.5 TB" (10^12)'


def parse_size(value: int | str) -> int:
    """Bytes from an integer, or from text with a unit: B, kB ... PB (powers of 1000), KiB ... PiB (powers of 1024).

    Units are taken in any case; fractions are rounded down to whole bytes. A bare letter ("200G") is refused because
    tools disagree on what it means. Raises ValueError.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"expected {_SIZE_HELP}, got {type(value).__name__}")
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is None:
            raise ValueError("not a size")
        number, unit = match.groups()
        factor = _UNITS.get(unit.lower())
        if factor is None:
            raise ValueError(f"unknown unit {unit!r}")
        value = int(Fraction(number) * factor)
    if not 0 <= value <= _MAX_BYTES:
        raise ValueError(f"out of range, expected 0 ... {_MAX_BYTES} bytes")
    return value


def _size(description: str, *, auto: bool = False, minimum: int = 0) -> Meta:
    return Meta(description=description, extra={"size": True, "auto": auto, "minimum": minimum})


class TardisConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every setting of sglang-tardis. Make one with `load_config`, which checks and expands values."""

    path: Annotated[
        Annotated[str, Meta(min_length=1)]
        | Annotated[tuple[Annotated[str, Meta(min_length=1)], ...], Meta(min_length=1, max_length=_MAX_FOLDERS)],
        Meta(
            description="Folder of the store; made if missing. `~` and environment variables are expanded, after which "
            "it must be absolute. Put it on local NVMe. All ranks and servers of a host may share it. A list of "
            "folders, best on different drives, spreads the store over them; the first is the store's own."
        ),
    ] = "~/.cache/sglang-tardis"
    """What is set; `folder` and `more_paths` are the same taken apart."""
    mode: Annotated[
        Literal["host", "direct"],
        Meta(
            description="How pages reach the GPU. `host`: through SGLang's pinned host pool, as HiCache storage. "
            "`direct`: without it, layer by layer into the KV pool ([direct](direct.md)); needs a release with "
            "SGLang's external linker, and is chosen when the server starts."
        ),
    ] = "host"
    capacity: Annotated[
        int | str,
        _size(
            "Hard cap on what the store allocates on disk: one number for the whole host and all folders, not per "
            "rank. `0` or `auto`: the smaller of 100 GiB and half of the free space; for an existing store, what it "
            "has.",
            auto=True,
        ),
    ] = "auto"
    segment_size: Annotated[
        int | str,
        _size(
            "Size of a data file, at least 4 MiB. `0` or `auto`: capacity / 256, within 4 MiB ... 1 GiB, more where "
            "eight pages would not fit, but then no more than a quarter of the capacity unless one page needs it.",
            auto=True,
        ),
    ] = "auto"
    free_space_floor: Annotated[
        int | str,
        _size(
            "Space that always stays free on the file system of each folder; the store does not grow below it there."
        ),
    ] = "2GiB"
    placement: Annotated[
        Literal["objects", "layers"],
        Meta(
            description="Where `path` is a list: `objects` puts each page into one folder, which is best for batches "
            "of pages; `layers` puts the layers of each page into all folders in turn, so that a single large page is "
            "read from all drives at once. Of what is allocated from now on."
        ),
    ] = "objects"
    engine: Annotated[
        Literal["auto", "io_uring", "sync"],
        Meta(
            description="How I/O is submitted. With O_DIRECT, `auto` takes io_uring if a self-test in the folder "
            "succeeds; otherwise, and for buffered I/O, a pool of threads (`sync`). Asking for io_uring where it does "
            "not work is an error."
        ),
    ] = "auto"
    direct_io: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description="O_DIRECT, which bypasses the page cache. `auto` uses it where the file system takes it; `on` "
            "makes its absence an error."
        ),
    ] = "auto"
    queue_depth: Annotated[
        int,
        Meta(
            ge=0,
            le=4096,
            description="I/O requests in flight. `0`: as many as the device gains from, found while it works.",
        ),
    ] = 0
    io_workers: Annotated[
        int,
        Meta(
            ge=0,
            le=256,
            description="Threads that copy, verify and do the `sync` engine's I/O. `0`: twice the CPUs, 8 to 16.",
        ),
    ] = 0
    bounce_buffers: Annotated[
        int,
        Meta(
            ge=1,
            le=4096,
            description="Aligned buffers for memory that O_DIRECT cannot reach. Bounced requests are counted.",
        ),
    ] = 32
    flush_interval_ms: Annotated[
        int,
        Meta(
            ge=1,
            le=60_000,
            description="Written pages become durable after at most this many milliseconds; a crash loses newer ones.",
        ),
    ] = 50
    flush_bytes: Annotated[
        int | str,
        _size("Written pages become durable before the interval ends once this much is waiting.", minimum=1),
    ] = "256MiB"
    checkpoint_interval_s: Annotated[
        int,
        Meta(
            ge=0,
            le=86_400,
            description="How often the index is saved while something is written, so that opening after a crash need "
            "not read every header. `0`: only when the store is closed.",
        ),
    ] = 300
    shared_memory: Annotated[
        str,
        Meta(
            min_length=1,
            description="Folder of a tmpfs for the index that all processes of a store share (about 100 bytes a page). "
            "It must be the same for all of them; containers that use one store must share it.",
        ),
    ] = "/dev/shm"
    verify_reads: Annotated[
        bool,
        Meta(
            description="Check the digests of every page that is read. `false` is for measurements only: corrupt bytes "
            "would be served."
        ),
    ] = True
    weights_revision: Annotated[
        Annotated[str, Meta(min_length=1, max_length=256)] | None,
        Meta(
            description="Names the weights yourself instead of the fingerprint of the checkpoint's files. Pages stored "
            "under one name are served under it: change the name whenever the weights change.",
        ),
    ] = None

    dram: Annotated[
        int | str,
        _size(
            "Direct door: pinned host memory of each rank that holds pages beside the store. `0` or `auto`: what "
            "SGLang's host pool would take, `--hicache-size`, else `--hicache-ratio` times the KV pool.",
            auto=True,
        ),
    ] = "auto"
    write_behind: Annotated[
        int | str,
        _size(
            "Direct door: how much of `dram` may wait to be written to the store. Pages beyond that are kept in memory "
            "alone. `0` or `auto`: half of `dram`.",
            auto=True,
        ),
    ] = "auto"
    controller_threads: Annotated[
        int,
        Meta(
            ge=0,
            le=64,
            description="Direct door: host threads of each rank that read the store's files for its rings, of the "
            "software NVMe controller. They sleep while nothing is loaded. `0`: three quarters of the host's CPUs "
            "shared by the ranks, 1 to 12.",
        ),
    ] = 0
    controller_queues: Annotated[
        int,
        Meta(
            ge=0,
            le=16,
            description="Direct door: queue pairs of each rank. `0`: as many as `controller_threads`, 1 to 12.",
        ),
    ] = 0
    load_deadline_ms: Annotated[
        int,
        Meta(
            ge=1,
            le=15_000,
            description="Direct door: how long a layer may take to come from the store's files before the host reads "
            "it again.",
        ),
    ] = 5_000
    attention_host: Annotated[
        int | str,
        _size(
            "`--attention-backend tardis`: host memory of each rank for KV of running requests. `0` or `auto`: as much "
            "as `--max-total-tokens` needs; without that, four fifths of what is available, and only with one rank.",
            auto=True,
        ),
    ] = "auto"
    attention_host_check: Annotated[
        bool,
        Meta(
            description="`--attention-backend tardis`: refuse a KV pool that is larger than the memory that the "
            "machine says is available. `false` is for guests whose memory grows as it is touched."
        ),
    ] = True

    @property
    def folder(self) -> str:
        """The store's own folder: `path`, or the first of its list."""
        return self.path if isinstance(self.path, str) else self.path[0]

    @property
    def more_paths(self) -> tuple[str, ...]:
        """The further folders of `path`, over which the store spreads its data as well."""
        return () if isinstance(self.path, str) else tuple(self.path[1:])

    @property
    def capacity_bytes(self) -> int:
        """`capacity` in bytes; 0 for automatic."""
        return _size_value(self.capacity)

    @property
    def dram_bytes(self) -> int:
        """`dram` in bytes; 0 for automatic."""
        return _size_value(self.dram)

    @property
    def write_behind_bytes(self) -> int:
        """`write_behind` in bytes; 0 for automatic."""
        return _size_value(self.write_behind)

    @property
    def attention_host_bytes(self) -> int:
        """`attention_host` in bytes; 0 for automatic."""
        return _size_value(self.attention_host)

    @property
    def segment_bytes(self) -> int:
        """`segment_size` in bytes; 0 for automatic."""
        return _size_value(self.segment_size)

    @property
    def free_space_floor_bytes(self) -> int:
        """`free_space_floor` in bytes."""
        return _size_value(self.free_space_floor)

    @property
    def flush_group_bytes(self) -> int:
        """`flush_bytes` in bytes."""
        return _size_value(self.flush_bytes)

    def store_options(self, object_bytes_hint: int = 0) -> StoreOptions:
        """Options for `store.Store`, which is to be opened in `folder`.

        They name the further folders exactly: none, if `path` is one folder.

        Args:
            object_bytes_hint: size in bytes of the largest page to be stored.
        """
        from .store import StoreOptions

        return StoreOptions(
            capacity_bytes=self.capacity_bytes,
            segment_bytes=self.segment_bytes,
            object_bytes_hint=object_bytes_hint,
            free_space_floor=self.free_space_floor_bytes,
            engine=self.engine,
            direct_io=self.direct_io,
            queue_depth=self.queue_depth,
            io_workers=self.io_workers,
            bounce_buffers=self.bounce_buffers,
            flush_bytes=self.flush_group_bytes,
            flush_milliseconds=self.flush_interval_ms,
            checkpoint_seconds=self.checkpoint_interval_s,
            shared_memory=self.shared_memory,
            verify_reads=self.verify_reads,
            more_paths=self.more_paths,
            placement=self.placement,
        )


_FIELDS = {field.name: field for field in msgspec.structs.fields(TardisConfig)}


def _meta(name: str) -> Meta:
    return next(part for part in _FIELDS[name].type.__metadata__ if isinstance(part, Meta))


def is_size(name: str) -> bool:
    """Whether a setting is a size in bytes that may be written with a unit."""
    return bool((_meta(name).extra or {}).get("size"))


def takes_auto(name: str) -> bool:
    """Whether a size may be "auto"."""
    return bool((_meta(name).extra or {}).get("auto"))


def allowed_values(name: str) -> str:
    """What a setting takes, in words, for messages and the documentation."""
    kind, meta = _FIELDS[name].type.__origin__, _meta(name)
    if is_size(name):
        return _SIZE_HELP + (', or "auto"' if takes_auto(name) else "")
    if kind is bool:
        return "true or false"
    if kind is int:
        return f"an integer from {meta.ge} to {meta.le}"
    if kind is str:
        return "text"
    if getattr(kind, "__origin__", None) is Literal:
        return "one of " + ", ".join(json.dumps(choice) for choice in kind.__args__)
    one, other = kind.__args__
    if other is not type(None):  # text or a list of texts
        bounds = other.__metadata__[0]
        return f"text, or a list of {bounds.min_length} to {bounds.max_length} texts"
    inner = one.__metadata__[0]
    return f"text of {inner.min_length} to {inner.max_length} characters, or null"


def _size_value(value: int | str) -> int:
    return 0 if isinstance(value, str) and value.strip().lower() == "auto" else parse_size(value)


def _check(key: str, value: object, source: str) -> Any:
    """One value, checked against its field."""
    try:
        value = msgspec.convert(value, _FIELDS[key].type, strict=True)
        if is_size(key):
            size = _size_value(value) if takes_auto(key) else parse_size(value)
            minimum = (_meta(key).extra or {}).get("minimum", 0)
            if size < minimum:
                raise ValueError(f"expected at least {minimum} bytes")
    except (msgspec.ValidationError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"setting {key!r} = {show(value)} from {source}: {error}. Allowed: {allowed_values(key)}"
        ) from None
    return value


def _check_keys(settings: Mapping[Any, Any], source: str, *, sglang_keys: bool) -> dict[str, Any]:
    checked = {}
    for key, value in settings.items():
        if key in _FIELDS:
            checked[key] = _check(key, value, source)
        elif key in SGLANG_KEYS:
            if not sglang_keys:
                raise ConfigError(
                    f"setting {key!r} = {show(value)} from {source} belongs to SGLang, which does not read it there; "
                    f"put it into {EXTRA_CONFIG_FLAG}"
                )
        else:
            close = difflib.get_close_matches(str(key)[:80], _FIELDS, n=1)
            hint = f"Did you mean {close[0]!r}? " if close else ""
            raise ConfigError(
                f"unknown setting {show(key)} = {show(value)} from {source}. {hint}Allowed: {', '.join(_FIELDS)}"
            )
    return checked


def load_config(
    extra_config: Mapping[str, Any] | str | None = None, environ: Mapping[str, str] | None = None
) -> TardisConfig:
    """Settings from the extra config, then `TARDIS_CONFIG`, then defaults; a key set earlier overrides that key only.

    `extra_config` is what `--hicache-storage-backend-extra-config` holds: the mapping that SGLang gives to a backend,
    or its text (JSON, or `@file` with a .json, .toml, .yaml or .yml name). SGLang's own keys in it are passed over.
    `TARDIS_CONFIG` in `environ` (default: the process's) is JSON or `@file` likewise.

    The result's `path` is absolute and expanded, each of its folders if it is a list. Raises ConfigError for anything
    unknown, ill-typed or out of bounds.
    """
    environ = os.environ if environ is None else environ
    sources: list[tuple[str, dict[str, Any]]] = []
    if extra_config is not None:
        source = EXTRA_CONFIG_FLAG
        if isinstance(extra_config, str):
            extra_config, source = parse_text(extra_config, source)
        if not isinstance(extra_config, Mapping):
            raise ConfigError(f"{source}: expected a mapping of settings, got {type(extra_config).__name__}")
        sources.append((source, _check_keys(extra_config, source, sglang_keys=True)))
    text = environ.get(ENVIRONMENT_VARIABLE, "")
    if text.strip():
        settings, source = parse_text(text, ENVIRONMENT_VARIABLE)
        sources.append((source, _check_keys(settings, source, sglang_keys=False)))

    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for source, settings in sources:
        for key, value in settings.items():
            if key not in merged:
                merged[key], origin[key] = value, source
    config = TardisConfig(**merged)
    origins = {key: origin.get(key, "the default settings") for key in ("path", "shared_memory")}
    path: str | tuple[str, ...] = _expand_path("path", config.folder, origins["path"], environ)
    if config.more_paths:
        path = (path, *_expand_further(config.more_paths, path, origins["path"], environ))
    shared_memory = _expand_path("shared_memory", config.shared_memory, origins["shared_memory"], environ)
    return msgspec.structs.replace(config, path=path, shared_memory=shared_memory)


_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})", re.ASCII)


# What the system says of a folder on a drive that has failed or gone away.
_DRIVE_FAILED = frozenset({errno.EIO, errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.ESTALE, errno.EREMOTEIO})


def _expand_further(paths: Sequence[str], first: str, source: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The further folders of `path`; a drive that fails is no error here, as the store goes on without it."""
    seen = [first]
    for path in paths:
        folder = _expand_path("path", path, source, environ, passed_over=_DRIVE_FAILED)
        if folder in seen:
            written = "" if path == folder else f", written {show(path)},"
            raise ConfigError(
                f"setting 'path' from {source}: the folder {show(folder)}{written} is given twice; name each "
                "folder of the list once"
            )
        seen.append(folder)
    return tuple(seen[1:])


def _expand_path(
    key: str, path: str, source: str, environ: Mapping[str, str], *, passed_over: Container[int] = ()
) -> str:
    """`passed_over`: numbers of errors of the folder itself, or one above it, that the caller can live with."""

    def fail(problem: str) -> ConfigError:
        return ConfigError(f"setting {key!r} = {show(path)} from {source}: {problem}")

    def variable(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if not environ.get(name):
            raise fail(f"environment variable {name} is not set")
        return environ[name]

    expanded = _VARIABLE.sub(variable, path)
    if expanded == "~" or expanded.startswith("~/"):
        expanded = (environ.get("HOME") or os.path.expanduser("~")) + expanded[1:]
    elif expanded.startswith("~"):
        expanded = os.path.expanduser(expanded)
    if "\0" in expanded:
        raise fail("contains a NUL character")
    try:
        expanded.encode("utf-8")
    except UnicodeEncodeError:
        raise fail("cannot be encoded as UTF-8") from None
    if not os.path.isabs(expanded):
        raise fail(f"expected an absolute path, got {show(expanded)} after expansion")
    expanded = os.path.normpath(expanded)
    for folder in (Path(expanded), *Path(expanded).parents):
        try:
            mode = os.stat(folder).st_mode
        except FileNotFoundError:
            continue
        except NotADirectoryError:
            continue  # a parent is a file: found further up
        except OSError as error:
            if error.errno in passed_over:
                break
            raise fail(f"{folder}: {error.strerror}") from None
        if not stat.S_ISDIR(mode):
            raise fail(f"{folder} is not a folder")
        break
    return expanded
