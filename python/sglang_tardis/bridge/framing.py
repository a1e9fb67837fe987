# SPDX-License-Identifier: Apache-2.0
"""An injective byte encoding of small structured values, and digests over it.

Two different values never encode to the same bytes, so a digest of the encoding identifies the value up to a SHA-256
collision. Concatenating strings would not do: ("ab", "c") and ("a", "bc") must differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TypeAlias

Frame: TypeAlias = "bool | int | str | bytes | Sequence[Frame] | Mapping[str, Frame] | None"


def _frame(tag: bytes, payload: bytes) -> bytes:
    return tag + len(payload).to_bytes(8, "little") + payload


def encode(value: Frame) -> bytes:
    """Encode a value as tag, length and payload, recursively.

    None, bool, int, str, bytes, sequences and mappings with str keys are told apart by their tag; a mapping's order
    does not matter. Lone surrogates in a str are encoded too (names come from command lines). Raises TypeError for
    another type, which includes float: no setting that identifies bytes is one.
    """
    if value is None:
        return _frame(b"N", b"")
    if isinstance(value, bool):  # before int: bool is a subclass of it
        return _frame(b"B", b"\x01" if value else b"\x00")
    if isinstance(value, int):
        return _frame(b"I", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    if isinstance(value, str):
        return _frame(b"S", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _frame(b"Y", bytes(value))
    if isinstance(value, Mapping):
        items = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"mapping keys must be str, got {type(key).__name__}")
            items[key.encode("utf-8", "surrogatepass")] = item
        return _frame(b"M", b"".join(_frame(b"S", key) + encode(items[key]) for key in sorted(items)))
    if isinstance(value, Sequence):
        return _frame(b"L", b"".join(encode(item) for item in value))
    raise TypeError(f"cannot frame a value of type {type(value).__name__}")


def framed_digest(domain: str, value: Frame) -> bytes:
    """SHA-256 (32 bytes) over a domain tag and `encode(value)`.

    The domain names what is being identified and its version, so that digests for different purposes never meet.
    """
    return hashlib.sha256(_frame(b"D", domain.encode("utf-8")) + encode(value)).digest()
