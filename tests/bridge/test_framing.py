# SPDX-License-Identifier: Apache-2.0
"""The encoding below fingerprints is injective."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_tardis.bridge.framing import encode, framed_digest

scalars = st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.text(max_size=6), st.binary(max_size=6))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
)


def typed(value):
    """A value as something whose equality tells True from 1 and a list from a dictionary."""
    if isinstance(value, dict):
        return ("dict", tuple(sorted((key, typed(item)) for key, item in value.items())))
    if isinstance(value, list):
        return ("list", tuple(typed(item) for item in value))
    return (type(value).__name__, repr(value))


def decode(data: bytes):
    """An independent reader: if everything decodes to what was encoded, no two values share an encoding."""

    def one(data: bytes):
        tag, length = data[:1], int.from_bytes(data[1:9], "little")
        payload, rest = data[9 : 9 + length], data[9 + length :]
        assert len(payload) == length
        if tag == b"N":
            return None, rest
        if tag == b"B":
            return payload == b"\x01", rest
        if tag == b"I":
            return int.from_bytes(payload, "little", signed=True), rest
        if tag == b"S":
            return payload.decode("utf-8", "surrogatepass"), rest
        if tag == b"Y":
            return payload, rest
        items = []
        while payload:
            item, payload = one(payload)
            items.append(item)
        if tag == b"L":
            return items, rest
        assert tag == b"M"
        return dict(zip(items[::2], items[1::2], strict=True)), rest

    value, rest = one(data)
    assert not rest
    return value


@given(values)
def test_decodes_to_what_was_encoded(value):
    assert typed(decode(encode(value))) == typed(value)


@given(values, values)
def test_equal_encodings_mean_equal_values(left, right):
    assert (encode(left) == encode(right)) == (typed(left) == typed(right))


def test_neighbours_that_concatenation_would_confuse():
    groups = [["ab", "c"], ["a", "bc"], ["abc"], "abc", b"abc", ["ab", b"c"], [["ab"], "c"], {"ab": "c"}]
    assert len({encode(value) for value in groups}) == len(groups)
    assert len({encode(value) for value in (0, False, None, "", b"", [], {}, "0", -1, 255, 256)}) == 11
    assert encode({"a": 1, "b": 2}) == encode({"b": 2, "a": 1})


def test_domains_separate():
    assert framed_digest("a", "x") != framed_digest("b", "x")
    assert framed_digest("a", "bx") != framed_digest("ab", "x")


def test_types_without_an_encoding():
    for value in (1.0, {1: 2}, object(), [1.5], {"a": {2}}):
        with pytest.raises(TypeError):
            encode(value)
