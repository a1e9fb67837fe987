# SPDX-License-Identifier: Apache-2.0
"""A fingerprint of a checkpoint: which weights produced the KV that is stored.

Names, sizes and safetensors headers are not enough: two fine-tunes of one architecture agree in all of them. So content
is sampled too: the first, middle and last KiB of every tensor, and 64 places of a file whose format has no such header.
Hashing everything would read the whole checkpoint at each start. A change that touches none of the sampled places goes
unnoticed; training does not make such changes, a hex editor may: set `weights_revision` then.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .bridge.framing import encode, framed_digest

SAMPLE_BYTES = 1024
BLOB_SAMPLES = 64
BLOB_SAMPLE_BYTES = 4096
MAX_HEADER_BYTES = 100_000_000
"""The safetensors library's own limit."""

_DOMAIN = "sglang-tardis/weights/v1"
_CONFIG_DOMAIN = "sglang-tardis/model-config/v1"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".npz")
# Left behind by training; SGLang loads none of them.
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.bin", "scheduler.pt", "scaler.pt")
_NOT_WEIGHTS_PREFIXES = ("rng_state", "random_states")
# Small files that change what the same tensors compute. Tokenizer, chat template, generation defaults and README do
# not: KV is a function of token ids.
_SIDE_FILES = ("config.json", "params.json", "quantize_config.json", "hf_quant_config.json", "kv_cache_scales.json")
_SIDE_SUFFIXES = (".index.json", ".py")
# Differ between copies of one model and change nothing.
_VOLATILE_CONFIG_KEYS = frozenset({"_name_or_path", "transformers_version", "_commit_hash", "use_cache"})
_TENSORS_PER_TASK = 512


class WeightsError(Exception):
    """The checkpoint cannot be fingerprinted; the message names the file and what to do."""


def _error(path: Path | str, problem: str) -> WeightsError:
    return WeightsError(
        f"cannot fingerprint the weights: {path}: {problem}. Repair the checkpoint, or name its revision yourself with "
        "the setting weights_revision"
    )


def model_config_digest(config: Mapping[str, Any]) -> str:
    """Digest (64 hex digits) of a model configuration, such as config.json or `hf_config.to_dict()`.

    Independent of key order; keys that differ between copies of one model without changing it (`_name_or_path`,
    `transformers_version`, ...) are left out at the top level.
    """
    kept = {str(key): value for key, value in config.items() if key not in _VOLATILE_CONFIG_KEYS}
    text = json.dumps(kept, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=str)
    return framed_digest(_CONFIG_DOMAIN, text).hex()


def weights_fingerprint(
    model_dir: Path | str,
    *,
    dummy: bool = False,
    deadline_seconds: float | None = 300.0,
    threads: int | None = None,
) -> str:
    """Fingerprint of the checkpoint in a folder (or of one GGUF file): "weights-v1:<64 hex digits>".

    The same files give the same text on every machine: neither times nor absolute paths enter, symbolic links (Hugging
    Face snapshots) are followed, names are sorted. Only the folder itself is looked at, as SGLang does, not its
    subfolders. A folder without weights, or `dummy` (`--load-format dummy`), gives "dummy-v1:<...>" from config.json.

    Raises WeightsError, which names the file and the setting `weights_revision`, if a file is missing, unreadable,
    truncated or not what its name says, if there is nothing to fingerprint, and after `deadline_seconds` (None: no
    limit).
    """
    clock = _Deadline(deadline_seconds)
    root = Path(model_dir)
    names = _list(root)
    if names is None:
        weights, side, root = [root.name], [], root.parent
    else:
        weights = [name for name in names if _is_weight(name)]
        side = [name for name in names if _is_side(name)]
    if dummy or not weights:
        if "config.json" not in side:
            raise _error(root, "neither weights nor a config.json in this folder")
        return "dummy-v1:" + framed_digest(_DOMAIN + "/dummy", _side_file(root / "config.json", clock)).hex()

    workers = threads or min(16, 4 * (os.cpu_count() or 1))
    with ThreadPoolExecutor(workers, thread_name_prefix="tardis-weights") as pool:
        described = [[name, _weight_file(root / name, pool, clock)] for name in weights]
    facts = {"weights": described, "side": [[name, _side_file(root / name, clock)] for name in side]}
    return "weights-v1:" + framed_digest(_DOMAIN, facts).hex()


def tensor_names(model_dir: Path | str) -> frozenset[str] | None:
    """Names of all tensors of a checkpoint; None where a file of another format than safetensors does not tell them.

    Raises WeightsError as :func:`weights_fingerprint` does.
    """
    root = Path(model_dir)
    found: set[str] = set()
    for name in filter(_is_weight, _list(root) or [root.name]):
        if not name.endswith(".safetensors"):
            return None
        with _File(root / name) as file:
            found.update(_safetensors_header(file)[1])
    return frozenset(found - {"__metadata__"})


def changed_after(model_dir: Path | str, moment: float) -> Path | None:
    """A file of the checkpoint, or a link to it, that was written or replaced after a moment (Unix seconds); or None.

    What a running server holds is what these files said when they were loaded. Times in the future are left out: they
    come from the clock of a file server. Raises WeightsError if a file cannot be looked at.
    """
    root = Path(model_dir)
    links = [place for place in (root, *root.absolute().parents) if place.is_symlink()]
    names = _list(root)
    files = [root] if names is None else [root / n for n in names if _is_weight(n) or _is_side(n)]
    now = time.time()
    for path in (*links, *files):
        try:
            times = (os.lstat(path).st_ctime, os.stat(path).st_ctime)
        except OSError as error:
            raise _error(path, error.strerror or str(error)) from None
        if any(moment < changed <= now for changed in times):
            return path
    return None


class _Deadline:
    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._end = None if seconds is None else time.monotonic() + seconds

    def check(self, path: Path) -> None:
        if self._end is not None and time.monotonic() > self._end:
            raise _error(path, f"not finished after {self._seconds:g} s")


class _File:
    """A file open for positional reads; every short read is an error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not block the server
        except OSError as error:
            raise _error(path, error.strerror or str(error)) from None
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._fd)
            raise _error(path, "not a regular file")
        self.size = status.st_size

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def random_access(self) -> None:
        """Tell the kernel not to read ahead: samples are scattered."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)

    def read(self, offset: int, length: int) -> bytes:
        try:
            data = os.pread(self._fd, length, offset)
            while len(data) < length:  # a read may be cut short, at 2 GiB for instance
                more = os.pread(self._fd, length - len(data), offset + len(data))
                if not more:
                    raise _error(self.path, f"ends at byte {offset + len(data)}, expected {offset + length}")
                data += more
        except OSError as error:
            raise _error(self.path, error.strerror or str(error)) from None
        return data


def _list(root: Path) -> list[str] | None:
    """Sorted names in a folder; None if the path is a file."""
    try:
        return sorted(os.listdir(root))
    except NotADirectoryError:
        return None
    except OSError as error:
        raise _error(root, error.strerror or str(error)) from None


def _is_weight(name: str) -> bool:
    return (
        name.endswith(_WEIGHT_SUFFIXES)
        and name not in _NOT_WEIGHTS
        and not name.startswith(_NOT_WEIGHTS_PREFIXES)
        and not name.startswith(".")
    )


def _is_side(name: str) -> bool:
    return name in _SIDE_FILES or name.endswith(_SIDE_SUFFIXES)


def _side_file(path: Path, clock: _Deadline) -> str:
    clock.check(path)
    with _File(path) as file:
        if file.size > MAX_HEADER_BYTES:
            raise _error(path, f"{file.size} bytes is too large for such a file")
        data = file.read(0, file.size)
    if path.name == "config.json":
        try:
            config = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise _error(path, f"not JSON ({error})") from None
        if isinstance(config, dict):
            return model_config_digest(config)
    return hashlib.sha256(data).hexdigest()


def _weight_file(path: Path, pool: ThreadPoolExecutor, clock: _Deadline) -> list[Any]:
    with _File(path) as file:
        file.random_access()
        header_digest, places = (
            _safetensors_places(file) if path.name.endswith(".safetensors") else ("", _blob_places(file.size))
        )
        tasks = [places[i : i + _TENSORS_PER_TASK] for i in range(0, len(places), _TENSORS_PER_TASK)]
        digests = list(pool.map(lambda part: _sample(file, part, clock), tasks))
    return [file.size, header_digest, *digests]


def _sample(file: _File, places: Sequence[tuple[int, int, int]], clock: _Deadline) -> bytes:
    """SHA-256 over samples of (begin, end, sample bytes) ranges: first, middle and last, or all of a short one."""
    clock.check(file.path)
    digest = hashlib.sha256()
    for begin, end, sample in places:
        for offset, length in _sample_ranges(begin, end, sample):
            digest.update(file.read(offset, length))
    return digest.digest()


def _sample_ranges(begin: int, end: int, sample: int) -> Iterator[tuple[int, int]]:
    length = end - begin
    if length <= 3 * sample:
        if length:
            yield begin, length
        return
    yield begin, sample
    yield begin + (length - sample) // 2, sample
    yield end - sample, sample


def _blob_places(size: int) -> list[tuple[int, int, int]]:
    """64 evenly spaced places of 4 KiB, the first and the last bytes among them; the whole of a small file."""
    if size <= BLOB_SAMPLES * BLOB_SAMPLE_BYTES:
        return [(0, size, size)] if size else []
    last = size - BLOB_SAMPLE_BYTES
    offsets = (last * i // (BLOB_SAMPLES - 1) for i in range(BLOB_SAMPLES))
    return [(offset, offset + BLOB_SAMPLE_BYTES, BLOB_SAMPLE_BYTES) for offset in offsets]


def _safetensors_header(file: _File) -> tuple[bytes, dict[str, Any]]:
    """The header's bytes, and what they say."""
    path = file.path
    if file.size < 8:
        raise _error(path, f"{file.size} bytes is too short for a safetensors file")
    prefix = file.read(0, 8)
    if prefix == b"version ":
        raise _error(path, "a Git LFS pointer, not the weights (git lfs pull)")
    header_bytes = int.from_bytes(prefix, "little")
    if header_bytes > MAX_HEADER_BYTES or header_bytes > file.size - 8:
        raise _error(
            path,
            f"safetensors header of {header_bytes} bytes does not fit (file {file.size}, limit {MAX_HEADER_BYTES})",
        )
    raw = file.read(8, header_bytes)
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _error(path, f"safetensors header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise _error(path, "safetensors header is not a JSON object")
    return raw, header


def _safetensors_places(file: _File) -> tuple[str, list[tuple[int, int, int]]]:
    """Digest of the header and the byte range of every tensor, in file order."""
    path = file.path
    raw, header = _safetensors_header(file)
    start = 8 + len(raw)
    places = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
        if (
            not isinstance(offsets, list)
            or len(offsets) != 2
            or any(type(offset) is not int for offset in offsets)
            or not 0 <= offsets[0] <= offsets[1]
        ):
            raise _error(path, f"safetensors header: tensor {name!r:.100} has no valid data_offsets")
        if start + offsets[1] > file.size:
            raise _error(
                path,
                f"truncated: tensor {name!r:.100} ends at byte {start + offsets[1]}, the file has {file.size} bytes",
            )
        places.append((start + offsets[0], start + offsets[1], SAMPLE_BYTES))
    places.sort()
    return hashlib.sha256(encode(raw)).hexdigest(), places
