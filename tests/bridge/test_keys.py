# SPDX-License-Identifier: Apache-2.0
"""Page keys to block hashes."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_tardis.bridge.keys import block_hash, block_hashes


def hex_key(seed: object) -> str:
    return hashlib.sha256(repr(seed).encode()).hexdigest()


def rows(array: np.ndarray) -> list[bytes]:
    return [row.tobytes() for row in array]


def test_hex_keys_become_the_bytes_they_spell():
    keys = [hex_key(i) for i in range(300)]
    hashes = block_hashes(keys)
    assert hashes.shape == (300, 32) and hashes.dtype == np.uint8 and hashes.flags.c_contiguous
    assert rows(hashes) == [bytes.fromhex(key) for key in keys]


def test_no_keys():
    hashes = block_hashes([])
    assert hashes.shape == (0, 32) and hashes.dtype == np.uint8
    assert block_hashes(()).shape == (0, 32)


@pytest.mark.parametrize(
    "other",
    [
        "",
        "page",
        hex_key(1).upper(),
        hex_key(1)[:-1],
        hex_key(1) + "0",
        hex_key(1) + "_k",
        hex_key(1)[:62] + "  ",
        " " + hex_key(1)[:63],
        hex_key(1) + "\n",
        hex_key(1) + "\n" + hex_key(2),
        hex_key(1)[:32] + "\n" + hex_key(1)[32:],
        "\uff11" * 64,  # full-width digits are no hexadecimal digits
        "\ud800",
        "é" * 64,
        "\0",
    ],
)
def test_other_strings_are_hashed_and_never_equal_a_hex_key(other):
    raw = [bytes.fromhex(hex_key(1)), bytes.fromhex(hex_key(2)), bytes.fromhex(hex_key(1)[:62] + "00")]
    hashes = rows(block_hashes([hex_key(1), other, hex_key(2)]))
    assert hashes[0] == raw[0] and hashes[2] == raw[1]
    assert hashes[1] not in raw
    assert hashes[1] == block_hash(other) == rows(block_hashes([other]))[0]
    assert hashes[1] != hashlib.sha256(other.encode("utf-8", "surrogatepass")).digest(), "the domain tag is missing"


def test_golden_vectors():
    """The hash of a key is part of the disk format: it may never change."""
    assert block_hash("ab" * 32) == bytes([0xAB]) * 32
    assert block_hash("AB" * 32).hex() == "338619f1fed446fe2e4c37b9930d4f06c09163915a2a3a25f5f177b34b7ae1d8"
    assert block_hash("").hex() == "48f16749ae730dc3914ed6021a481a7e2d2fd7a0e920099b8cc0b78a8742fa5a"
    assert block_hash("page-1_k").hex() == "87c1f2c57aadcd7137825e0eb9af77ea8f6f09f6239bc2416323e66b5cc956ef"


def test_wrong_types():
    for keys in ([1], ["ab", None], [b"ab" * 32], ["ab" * 32, 7], [["a"]]):
        with pytest.raises(TypeError, match="str"):
            block_hashes(keys)
    for keys in ("ab" * 32, b"ab" * 32):
        with pytest.raises(TypeError, match="sequence"):
            block_hashes(keys)
    with pytest.raises(TypeError):
        block_hash(b"ab")


any_key = st.one_of(
    st.text(alphabet="0123456789abcdef", min_size=64, max_size=64),
    st.text(alphabet="0123456789abcdefABCDEF \n", min_size=60, max_size=68),
    st.text(max_size=80),
)


@given(st.lists(any_key, max_size=20))
def test_order_is_kept_and_distinct_keys_stay_distinct(keys):
    hashes = rows(block_hashes(keys))
    assert hashes == [block_hash(key) for key in keys]
    assert len(set(hashes)) == len(set(keys))
