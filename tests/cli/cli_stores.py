# SPDX-License-Identifier: Apache-2.0
"""Stores for the tests of `tardis ls`, `rm`, `prune`, `verify` and `bench`, and a process that keeps one in use."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from command_line import environment, run

PARTS, REGION = 2, 8192
PAGE = PARTS * 2 * REGION
LLAMA, QWEN = b"\xaa" * 15 + b"\x01", b"\xab" * 15 + b"\x02"
MODELS = {LLAMA: "llama", QWEN: "qwen"}

# Keeps the store open until its input ends, without having read or written a page.
SERVER = """
import sys
from sglang_tardis.store import Store, StoreOptions
store = Store(sys.argv[1], StoreOptions(free_space_floor=0), create=False)
print("open", flush=True)
sys.stdin.read()
store.close()
"""


class Pages:
    """Pages whose bytes follow from their number, in memory."""

    def __init__(self, first: int, count: int) -> None:
        self.bytes = np.concatenate(
            [
                np.random.default_rng(number).integers(0, 256, PAGE, dtype=np.uint8)
                for number in range(first, first + count)
            ]
        )
        self.hashes = np.stack([key(number) for number in range(first, first + count)])
        steps = np.arange(count * PARTS * 2, dtype=np.uint64).reshape(count, -1) * np.uint64(REGION)
        self.pieces = np.uint64(self.bytes.ctypes.data) + steps


def key(number: int) -> np.ndarray:
    """32 bytes; numbers below 16 have keys that begin with their own digit."""
    bytes_ = np.random.default_rng(1000 + number).integers(0, 256, 32, dtype=np.uint8)
    if number < 16:
        bytes_[0] = number * 17
    return bytes_


def open_store(folder: Path, capacity: int = 64 << 20):
    from sglang_tardis.store import Store, StoreOptions

    return Store(folder, StoreOptions(capacity_bytes=capacity, free_space_floor=0))


def space_of(store, fingerprint: bytes):
    from sglang_tardis.store import ObjectLayout

    description = json.dumps({"model_name": MODELS[fingerprint]})
    return store.namespace(fingerprint, description, ObjectLayout(PARTS, (REGION, REGION)))


def fill(folder: Path, fingerprint: bytes, first: int, count: int) -> None:
    with open_store(folder) as store:
        pages = Pages(first, count)
        assert space_of(store, fingerprint).set(pages.hashes, pages.pieces).all()
        store.flush()


def stored(folder: Path, fingerprint: bytes) -> set[int]:
    """Which of the pages 0 ... 63 a later opening of the store gives back, whole."""
    found = set()
    with open_store(folder) as store:
        space = space_of(store, fingerprint)
        for number in range(64):
            wanted, page = Pages(number, 1), Pages(number, 1)
            page.bytes[:] = 0
            if space.get(page.hashes, page.pieces)[0]:
                assert (page.bytes == wanted.bytes).all()
                found.add(number)
    return found


def _flip_bit_in_file(folder: Path, needle: bytes) -> None:
    for path in (folder / "segments").iterdir():
        if (place := path.read_bytes().find(needle)) >= 0:
            with path.open("r+b") as file:
                file.seek(place + len(needle) // 2)
                file.write(bytes([needle[len(needle) // 2] ^ 1]))
                os.fsync(file.fileno())
            return
    raise AssertionError("not found on disk")


def flip_bit_of(folder: Path, number: int) -> None:
    """In the payload of a page that has been written, in the data file."""
    _flip_bit_in_file(folder, Pages(number, 1).bytes[:4096].tobytes())


def flip_header_bit_of(folder: Path, number: int) -> None:
    """In the slot header of a page that has been written: in the key."""
    _flip_bit_in_file(folder, key(number).tobytes())


@contextlib.contextmanager
def in_use(folder: Path) -> Iterator[int]:
    """Another process holds the store open; yields its pid."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()
    ) as process:
        assert process.stdout.readline() == b"open\n"
        try:
            yield process.pid
        finally:
            process.stdin.close()
            assert process.wait(30) == 0


def answer(capsys, *argv: object) -> dict:
    status, out, _ = run(capsys, *argv, "--json")
    assert status == 0
    return json.loads(out)
