# SPDX-License-Identifier: Apache-2.0
"""SGLang's page keys as the 256-bit block hashes that the store indexes."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from .framing import framed_digest

HASH_BYTES = 32

_HEX_KEY = re.compile(r"[0-9a-f]{64}", re.ASCII)
_DOMAIN = "sglang-tardis/page-key/v1"


def block_hash(key: str) -> bytes:
    """Block hash (32 bytes) of one page key; see `block_hashes`."""
    if not isinstance(key, str):
        raise TypeError(f"a page key must be str, got {type(key).__name__}")
    if _HEX_KEY.fullmatch(key):
        return bytes.fromhex(key)
    return framed_digest(_DOMAIN, key)


def block_hashes(keys: Sequence[str]) -> np.ndarray:
    """Turn page keys into block hashes, in order.

    A key of 64 lower-case hexadecimal digits (what SGLang's hash chain produces) becomes the 32 bytes it spells. Any
    other string (upper case, another length, a suffix) becomes SHA-256 over a domain tag and the length-framed text, so
    that it can equal another key's hash only by a SHA-256 collision; both kinds may be mixed.

    Returns an (n, 32) uint8 C-contiguous array; (0, 32) for no keys. Raises TypeError if a key is not a str or if one
    str is given in place of a sequence of them.
    """
    if isinstance(keys, (str, bytes)):
        raise TypeError(f"expected a sequence of page keys, got one {type(keys).__name__}")
    count = len(keys)
    if count == 0:
        return np.empty((0, HASH_BYTES), dtype=np.uint8)
    try:
        joined = "\n".join(keys)
    except TypeError as error:
        raise TypeError(f"page keys must be str: {error}") from None
    # fromhex skips white space and takes upper case; spelling the bytes out again and comparing accepts exactly the
    # lists of 64-digit lower-case keys. Two C calls for the whole batch instead of work per key.
    try:
        raw = bytearray.fromhex(joined)
    except ValueError:
        raw = bytearray()
    if len(raw) != count * HASH_BYTES or raw.hex("\n", HASH_BYTES) != joined:
        raw = bytearray().join(block_hash(key) for key in keys)
    return np.frombuffer(raw, dtype=np.uint8).reshape(count, HASH_BYTES)
