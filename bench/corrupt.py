# SPDX-License-Identifier: Apache-2.0
"""Damage chosen pages of a closed store on purpose: the negative control of the equality checks.

Finds a page's payload from the segment and slot headers alone (docs/on-disk-format.md), without the product's code, and
flips the sign bit of every 16-bit value in it: for bf16 and fp16 that changes each number and makes no NaN.
"""

from __future__ import annotations

import hashlib
import pathlib
import struct
from typing import NamedTuple

import numpy as np

SEGMENT_MAGIC, SLOT_MAGIC = b"TARDISSG", b"TARDISSL"
HEADER_BYTES = 512
SEGMENT_HEAD = struct.Struct("<8sII16sIIQQIIQQQ")
SLOT_HEAD = struct.Struct("<8sIHH32s16sQQIIIIQQQQ")


class StoredPage(NamedTuple):
    """Where one page's payload lies."""

    file: pathlib.Path
    offset: int
    parts: int
    part_bytes: int
    part_stride: int
    generation: int


def page_keys(tokens: list[int], page_size: int) -> list[bytes]:
    """SGLang's chained page keys of a prompt without salt or LoRA.

    A key is SHA-256(key before, tokens as little-endian u32).
    """
    keys, previous = [], b""
    for first in range(0, len(tokens) - page_size + 1, page_size):
        page = np.asarray(tokens[first : first + page_size], dtype="<u4").tobytes()
        previous = hashlib.sha256(previous + page).digest()
        keys.append(previous)
    return keys


def stored_pages(store: pathlib.Path) -> dict[bytes, StoredPage]:
    """Every live page of a store by its 32-byte key. The store must be closed."""
    pages: dict[bytes, StoredPage] = {}
    for path in sorted(p for p in store.rglob("*") if p.is_file() and p.stat().st_size > 4096):
        with open(path, "rb") as file:
            head = file.read(SEGMENT_HEAD.size)
            if head[:8] != SEGMENT_MAGIC:
                continue
            (_, _, _, _, _, epoch, _, slot_bytes, slots, _, table, _, payload) = SEGMENT_HEAD.unpack(head)
            file.seek(table)
            headers = file.read(slots * HEADER_BYTES)
        for slot in range(slots):
            raw = headers[slot * HEADER_BYTES : slot * HEADER_BYTES + SLOT_HEAD.size]
            if raw[:8] != SLOT_MAGIC:
                continue
            (_, _, kind, flags, key, _, _, generation, _, _, slot_epoch, parts, _, part_bytes, stride, _) = (
                SLOT_HEAD.unpack(raw)
            )
            if kind != 1 or flags & 1 or slot_epoch != epoch:
                continue
            page = StoredPage(path, payload + slot * slot_bytes, parts, part_bytes, stride, generation)
            if key not in pages or pages[key].generation < generation:
                pages[key] = page
    return pages


def flip_signs(page: StoredPage) -> int:
    """Flip the sign bit of every 16-bit value of every part; returns the number of bytes changed."""
    with open(page.file, "r+b", buffering=0) as file:
        for part in range(page.parts):
            where = page.offset + part * page.part_stride
            file.seek(where)
            values = np.frombuffer(file.read(page.part_bytes), dtype="<u2") ^ np.uint16(0x8000)
            file.seek(where)
            file.write(values.tobytes())
    return page.parts * page.part_bytes
