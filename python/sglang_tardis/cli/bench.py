# SPDX-License-Identifier: Apache-2.0
"""`tardis bench`: how fast a store in this folder is, beside fio in the same folder."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..config import load_config
from . import choose
from .errors import EXIT_OK, CommandError
from .render import Progress, human_bytes, print_json, printable, table

if TYPE_CHECKING:
    from ..store import ObjectLayout

_BATCH_PAGES = 128
_BATCH_BYTES = 256 << 20
_PART_BYTES = 64 << 10  # a page is cut into parts of about this size, as layers are
_ROUNDS = 3
_CASES = ("write", "read")
_SEGMENTS_BESIDE = 64 << 20  # header tables and the last segment, half full
_DEFAULT_PAGE = 1 << 20
_FIO_DEPTH = 64


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "bench",
        help="measure the store's speed beside fio's",
        description="Store and read back pages in a scratch store inside the folder, then let fio (if it is installed) "
        "write and read there with the same page size. Existing pages are not touched, and everything is removed. A "
        "server that uses the same drive at the same time is slowed down, and slows this down.",
    )
    parser.add_argument("path", nargs="?", metavar="PATH", help="a folder, or a store's")
    parser.add_argument("--bytes", default="1GiB", metavar="SIZE", help="bytes in a round (default: 1GiB)")
    parser.add_argument(
        "--page", metavar="SIZE", help="size of a page (default: what most of the store's pages have, else 1MiB)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    folder = Path(args.path)
    if not folder.is_dir():
        raise CommandError(f"{printable(folder)}: no folder; name one on the drive to be measured")
    page = choose.size("--page", args.page) if args.page else _usual_page(args.path)
    if not 4096 <= page <= _BATCH_BYTES or page % 4096:
        raise CommandError(f"--page {page}: expected a multiple of 4096, at most {human_bytes(_BATCH_BYTES)}")
    total = choose.size("--bytes", args.bytes) // page * page
    if not total:
        raise CommandError(f"--bytes {printable(args.bytes)}: expected at least one page of {human_bytes(page)}")
    _refuse_without_space(folder, total + _store_bytes(total), args.path)
    scratch = Path(tempfile.mkdtemp(prefix="tardis-bench-", dir=folder))
    try:
        rates, how, without = _measure(scratch, page, total)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    rows = [
        {
            "case": case,
            "value": rates["store", case],
            "unit": "GB/s",
            "limit": rates.get(("fio", case)),
            "ratio": rates["store", case] / rates["fio", case] if ("fio", case) in rates else None,
        }
        for case in _CASES
    ]
    if args.json:
        print_json({"path": args.path, "page_bytes": page, "bytes": total, "rounds": _ROUNDS, "rows": rows,
                    "store_path": how, "fio": without or "ran"})  # fmt: skip
        return EXIT_OK
    direct = "O_DIRECT" if how["direct_io"] else "page cache"
    print(
        f"pages of {human_bytes(page)}, {human_bytes(total)} a round, median of {_ROUNDS}; store: {how['engine']}, "
        f"{direct}, on {how['filesystem']}, every page digested; "
        + (without or f"fio: io_uring, the same page size, depth {_FIO_DEPTH}")
    )
    cells = [
        (
            one["case"],
            f"{one['value']:.2f} GB/s",
            f"{one['limit']:.2f} GB/s" if one["limit"] else "-",
            f"{one['ratio']:.2f}" if one["ratio"] else "-",
        )
        for one in rows
    ]
    print(table(("", "achieved", "limit (fio)", "ratio"), cells, right=(1, 2, 3)))
    return EXIT_OK


def _usual_page(path: str) -> int:
    """Bytes of a page in the namespace that has most pages; a guess where there is no store."""
    from ..store import TardisError, inspect

    try:
        namespaces = inspect(path)["namespaces"]
    except TardisError:
        return _DEFAULT_PAGE
    most = max(namespaces, key=lambda one: one["objects"], default=None)
    if most is None or not most["objects"]:
        return _DEFAULT_PAGE
    return -(-most["payload_bytes"] // most["objects"] // 4096) * 4096


def _store_bytes(total: int) -> int:
    """Capacity that keeps `total` bytes of pages without evicting any."""
    return total + total // 4 + _SEGMENTS_BESIDE


def _refuse_without_space(folder: Path, needed: int, path: str) -> None:
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    floor = load_config({"path": os.path.abspath(path)}).free_space_floor_bytes
    if free < needed + floor:
        raise CommandError(
            f"{printable(folder)}: needs {human_bytes(needed)} for the time of the measurement, and free_space_floor "
            f"keeps {human_bytes(floor)} free; {human_bytes(free)} are free. Give a smaller --bytes"
        )


def _forget_cached(folder: Path) -> None:
    """Files that were written through the page cache must be read from the drive."""
    for file in folder.rglob("*"):
        if file.is_file():
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())  # only clean pages can be dropped
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _layout(page: int) -> ObjectLayout:
    """Parts of two regions (K and V) like a model's; one part where the page cannot be cut evenly."""
    from ..store import ObjectLayout

    parts = max(1, page // _PART_BYTES)
    return ObjectLayout(parts, (page // parts // 2,) * 2) if page % (2 * parts) == 0 else ObjectLayout(1, (page,))


def _measure(scratch: Path, page: int, total: int) -> tuple[dict[tuple[str, str], float], dict[str, Any], str]:
    """Median GB/s by (system, case), the path that the store took, and why fio is missing or "".

    The two take turns in every round, so that a drive that changes its speed changes it for both.
    """
    fio = _Fio(scratch, page, total)
    found: dict[tuple[str, str], list[float]] = {}
    progress = Progress("bench")
    try:
        with _ScratchStore(scratch / "store", page, total) as store:
            for done in range(_ROUNDS):
                for case in _CASES:
                    if not fio.missing and (rate := fio.run(case)) is not None:
                        found.setdefault(("fio", case), []).append(rate)
                    _forget_cached(scratch)
                for case in _CASES:
                    found.setdefault(("store", case), []).append(store.run(case))
                    _forget_cached(scratch)
                progress(2 * (done + 1) * total, 2 * _ROUNDS * total)
            how = {key: value for key, value in store.store.path_report().items() if key != "path"}
    finally:
        progress.end()
    return {key: statistics.median(rates) for key, rates in found.items() if len(rates) == _ROUNDS}, how, fio.missing


class _ScratchStore:
    """A store of its own, and memory for one batch of pages."""

    def __init__(self, folder: Path, page: int, total: int) -> None:
        import numpy as np

        from ..store import Store

        self._pages, self._page = total // page, page
        self._batch = max(1, min(_BATCH_PAGES, _BATCH_BYTES // page, self._pages))
        rng = np.random.default_rng(1)
        self._source = rng.integers(0, 256, self._batch * page, dtype=np.uint8)
        self._target = np.zeros_like(self._source)
        self._hashes = rng.integers(0, 256, (self._pages, 32), dtype=np.uint8)
        layout = _layout(page)
        pieces = layout.parts * len(layout.region_bytes)
        steps = np.arange(self._batch * pieces, dtype=np.uint64).reshape(self._batch, pieces)
        steps *= np.uint64(layout.region_bytes[0])
        self._from, self._to = (np.uint64(memory.ctypes.data) + steps for memory in (self._source, self._target))
        config = load_config({"path": os.path.abspath(folder)}).store_options()
        options = msgspec.structs.replace(
            config, capacity_bytes=_store_bytes(total), segment_bytes=0, object_bytes_hint=page, free_space_floor=0
        )
        self.store = Store(folder, options)
        self._space = self.store.namespace(b"tardis-bench".ljust(16), '{"model_name": "tardis bench"}', layout)

    def __enter__(self) -> _ScratchStore:
        return self

    def __exit__(self, *exc: object) -> None:
        choose.closing(self.store).__exit__(*exc)

    def run(self, case: str) -> float:
        """GB/s (1e9 bytes) of storing every page and flushing, or of reading every page back."""
        if case == "write":
            self.store.clear()
        self._target[:] = 0
        start = time.perf_counter()
        for first in range(0, self._pages, self._batch):
            hashes = self._hashes[first : first + self._batch]
            work, pieces = (self._space.set, self._from) if case == "write" else (self._space.get, self._to)
            if not work(hashes, pieces[: len(hashes)]).all():
                why = self.store.last_problem or "a page was refused or evicted"
                raise CommandError(f"the scratch store did not {case} everything: {why}")
        if case == "write":
            self.store.flush()
        rate = self._pages * self._page / (time.perf_counter() - start) / 1e9
        # Every batch holds the same bytes, so that the last one that was read tells.
        if case == "read" and (self._target != self._source).any():
            raise CommandError("the scratch store gave back other bytes than were stored")
        return rate


class _Fio:
    """fio in the same folder: sequential writes with a fdatasync for each 128 of them, and random reads."""

    def __init__(self, folder: Path, page: int, total: int) -> None:
        self.missing = "" if shutil.which("fio") else "fio is not installed: nothing to compare with"
        self._command = [
            "fio", "--name=page", f"--filename={folder / 'fio.bin'}", f"--bs={page}", f"--size={total}",
            "--ioengine=io_uring", f"--iodepth={_FIO_DEPTH}", f"--direct={int(_takes_direct(folder))}",
            "--fdatasync=128", "--randrepeat=0", "--output-format=json",
        ]  # fmt: skip

    def run(self, case: str) -> float | None:
        """GB/s (1e9 bytes); None, and `missing` says why, if fio fails."""
        pattern = {"write": "--rw=write", "read": "--rw=randread"}[case]
        result = subprocess.run([*self._command, pattern], capture_output=True, text=True, check=False)
        if result.returncode:
            last = (result.stderr.strip() or result.stdout.strip() or "no output").splitlines()[-1]
            self.missing = f"fio failed ({printable(last[:200])}): nothing to compare with"
            return None
        job = json.loads(result.stdout[result.stdout.index("{") :])["jobs"][0]
        return job[case]["io_bytes"] / (job[case]["runtime"] / 1e3) / 1e9


def _takes_direct(folder: Path) -> bool:
    probe = folder / "probe"
    with contextlib.suppress(OSError):
        os.close(os.open(probe, os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o600))
        return True
    return False
