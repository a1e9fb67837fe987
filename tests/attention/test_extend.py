# SPDX-License-Identifier: Apache-2.0
"""Attention in parts over a pool, against the same in one piece in float64."""

from __future__ import annotations

import pytest
import torch
from sglang_tardis.attention import reference
from sglang_tardis.attention.extend import Together, extend, gather
from sglang_tardis.attention.partial import attend, merge

HEADS, KV_HEADS, DIM, SLOTS, POSITIONS = 6, 2, 32, 640, 256
SCALE = DIM**-0.5


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(7)


def whole(q, k, v, first, window=-1, scale=SCALE):
    """Causal attention in one piece, float64: queries at positions `first` and on, keys from position 0."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    own, seen = torch.arange(first, first + q.shape[0])[:, None], torch.arange(k.shape[0])[None]
    hidden = (seen > own) | ((seen < own - window) if window >= 0 else torch.zeros_like(own, dtype=torch.bool))
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
    return torch.einsum("hqk,khd->qhd", weights, v)


class Batch:
    """Requests whose tokens lie anywhere in a pool; what is not theirs is poison."""

    def __init__(self, rng, prefixes, extends, dtype=torch.float32, padding=0):
        self.prefixes, self.extends = prefixes, extends
        free = (torch.randperm(SLOTS - 1, generator=rng) + 1).tolist()  # any order; slot 0 is nobody's
        self.k_pool = torch.full((SLOTS, KV_HEADS, DIM), torch.nan, dtype=dtype)
        self.v_pool = torch.full((SLOTS, KV_HEADS, DIM), torch.nan, dtype=dtype)
        self.table = torch.zeros(len(prefixes) + 2, POSITIONS, dtype=torch.int32)
        self.rows = torch.randperm(len(prefixes) + 2, generator=rng)[: len(prefixes)]
        self.q = torch.randn(sum(extends) + padding, HEADS, DIM, generator=rng).to(dtype)
        self.k, self.v, self.new_k, self.new_v = [], [], [], []
        for row, prefix, count in zip(self.rows, prefixes, extends, strict=True):
            slots = torch.tensor([free.pop() for _ in range(prefix + count)], dtype=torch.int32)
            self.table[row, : prefix + count] = slots
            for pool, all_tokens, new in ((self.k_pool, self.k, self.new_k), (self.v_pool, self.v, self.new_v)):
                tokens = torch.randn(prefix + count, KV_HEADS, DIM, generator=rng).to(dtype)
                pool[slots.long()] = tokens
                all_tokens.append(tokens)
                new.append(tokens[prefix:])

    def expected(self, window=-1):
        results, begin = [], 0
        for k, v, prefix, count in zip(self.k, self.v, self.prefixes, self.extends, strict=True):
            results.append(whole(self.q[begin : begin + count], k, v, prefix, window))
            begin += count
        return torch.cat(results)

    def together(self, chunk):
        return Together.of(self.table, self.rows, self.prefixes, self.extends, chunk)

    def run(self, in_pool=False, **how):
        new = None if in_pool else (torch.cat(self.new_k), torch.cat(self.new_v))
        out = torch.full_like(self.q, torch.nan)
        pools = (self.q, self.k_pool, self.v_pool, self.table, self.rows)
        extend(*pools, self.prefixes, self.extends, scale=SCALE, new=new, out=out, **how)
        return out


SHAPES = {
    "empty prefix": ([0], [20]),
    "one token": ([17], [1]),
    "one token and nothing else": ([0], [1]),
    "ragged": ([0, 33, 5, 16], [1, 17, 0, 40]),
    "chunk edges": ([16, 15, 17, 32], [16, 1, 15, 17]),
    "short": ([3, 7, 0, 9, 2, 1, 4, 40, 6], [2, 5, 3, 1, 4, 0, 7, 8, 1]),
}


@pytest.mark.parametrize("in_pool", [False, True], ids=["new tokens given", "new tokens in the pool"])
@pytest.mark.parametrize("window", [-1, 0, 5, 16, 200])
@pytest.mark.parametrize("shape", SHAPES)
def test_parts_are_the_whole(rng, shape, window, in_pool):
    batch = Batch(rng, *SHAPES[shape])
    found = batch.run(in_pool, chunk=16, window=window)
    assert torch.allclose(found.double(), batch.expected(window), atol=2e-6, rtol=0)


@pytest.mark.parametrize("in_pool", [False, True], ids=["new tokens given", "new tokens in the pool"])
@pytest.mark.parametrize("window", [-1, 5])
@pytest.mark.parametrize("shape", SHAPES)
def test_together_is_the_same(rng, shape, window, in_pool):
    """Also where it is left aside."""
    batch = Batch(rng, *SHAPES[shape], padding=2)
    found = batch.run(in_pool, chunk=16, window=window, together=batch.together(16))
    expected = batch.expected(window)
    assert torch.allclose(found[: len(expected)].double(), expected, atol=2e-6, rtol=0)
    assert found[len(expected) :].count_nonzero() == 0


def test_short_prefixes_share_a_part(rng):
    batch = Batch(rng, *SHAPES["short"])
    parts = batch.together(16).parts
    assert [len(part.slots) for part in parts] == [10, 15, 16, 16, 14], "no part is longer than a chunk"
    assert [(part.begin, part.end) for part in parts] == [(0, 7), (10, 22), (22, 30), (22, 30), (22, 31)]
    assert [part.key_starts.tolist() for part in parts[1:2]] == [[0, 9, 11, 15]]
    assert [part.query_starts.tolist() for part in parts[1:2]] == [[0, 1, 5, 12]]
    assert [len(part.slots) for part in batch.together(4096).parts] == [10, 61]
    assert batch.together(4096).starts.tolist() == [0, 2, 7, 10, 11, 15, 22, 30, 31]


def test_together_of_another_batch_is_refused(rng):
    batch = Batch(rng, [3, 4], [5, 6])
    with pytest.raises(ValueError, match="of 11 new tokens, found one of 12"):
        batch.run(together=Together.of(batch.table, batch.rows, [3, 4], [5, 7]))


def test_chunks_do_not_matter(rng):
    batch = Batch(rng, [100, 7], [30, 60])
    for chunk in (1, 7, 64, 4096):
        for how in ({}, {"together": batch.together(chunk)}):
            assert torch.allclose(batch.run(chunk=chunk, **how).double(), batch.expected(), atol=2e-6, rtol=0), chunk


def test_padding_is_zero(rng):
    batch = Batch(rng, [9], [4], padding=3)
    found = batch.run()
    assert found[4:].count_nonzero() == 0
    assert torch.allclose(found[:4].double(), batch.expected(), atol=2e-6, rtol=0)


def test_bfloat16_is_rounded_once(rng):
    """The error is that of rounding the result, whatever the number of parts."""
    batch = Batch(rng, [90, 3], [20, 50], dtype=torch.bfloat16)
    expected = batch.expected()
    rounding = (expected.bfloat16().double() - expected).abs().max()
    for how in ({}, {"together": batch.together(16)}):
        assert (batch.run(chunk=16, **how).double() - expected).abs().max() <= 1.1 * rounding


def test_large_scores(rng):
    batch = Batch(rng, [60], [30])
    batch.q *= 300  # a softmax in which nearly all weights vanish
    assert torch.allclose(batch.run(chunk=16).double(), batch.expected(), atol=2e-4, rtol=0)


def test_fp8_is_scaled(rng):
    batch = Batch(rng, [40], [8])
    k8, v8 = (pool.nan_to_num().to(torch.float8_e4m3fn) for pool in (batch.k_pool / 4, batch.v_pool / 2))
    batch.k_pool, batch.v_pool = k8.float() * 4, v8.float() * 2
    expected = batch.run(in_pool=True)
    batch.k_pool, batch.v_pool = k8, v8
    assert torch.allclose(batch.run(in_pool=True, k_scale=4.0, v_scale=2.0), expected, atol=1e-6, rtol=0)
    for k_scale, v_scale in ((4.0, 1.0), (1.0, 2.0)):
        found = batch.run(in_pool=True, k_scale=k_scale, v_scale=v_scale)
        assert not torch.allclose(found, expected, atol=1e-3, rtol=0)
    slots = batch.table[batch.rows[0], :40]
    assert torch.equal(gather(k8, slots, torch.bfloat16).float(), k8.float()[slots.long()])


def test_merging_nothing_changes_nothing(rng):
    q = torch.randn(3, HEADS, DIM, generator=rng)
    k, v = torch.randn(2, 5, KV_HEADS, DIM, generator=rng)
    seen = attend(q, k, v, SCALE)
    nothing = attend(q, k, v, SCALE, first_key=10, causal=True)  # all keys are ahead
    assert nothing[0].count_nonzero() == 0 and torch.isneginf(nothing[1]).all()
    for merged in (merge(seen, nothing), merge(nothing, seen)):
        assert torch.equal(merged[0], seen[0]) and torch.allclose(merged[1], seen[1])
    none = merge(nothing, nothing)
    assert none[0].count_nonzero() == 0 and torch.isneginf(none[1]).all()


@pytest.mark.parametrize("window", [-1, 0, 15, 16, 40])
def test_decode_reference(rng, window):
    page, lengths = 16, [1, 15, 16, 17, 0, 50]
    pages = torch.randperm(SLOTS // page, generator=rng)[:24].view(6, 4).int()
    k_pool, v_pool = torch.randn(2, SLOTS, KV_HEADS, DIM, generator=rng)
    q = torch.randn(6, HEADS, DIM, generator=rng)
    keys, values = [], []
    for index, length in enumerate(lengths):
        slots = (pages[index].long()[:, None] * page + torch.arange(page)).view(-1)
        keys.append(k_pool[slots[:length]])
        values.append(v_pool[slots[:length]])
        if index == 3:  # what it must not read
            k_pool[slots[length:]] = v_pool[slots[length:]] = torch.nan
    out, lse = torch.full_like(q, torch.nan), torch.full((6, HEADS), torch.nan)
    args = (q, k_pool, v_pool, pages, torch.tensor(lengths, dtype=torch.int32), page, SCALE)
    assert reference.decode(*args, window=window, out=out, lse=lse) is out
    for index, length in enumerate(lengths):
        if length == 0:
            assert out[index].count_nonzero() == 0 and torch.isneginf(lse[index]).all()
            continue
        expected = whole(q[index : index + 1], keys[index], values[index], length - 1, window)
        assert torch.allclose(out[index : index + 1].double(), expected, atol=2e-6, rtol=0), length
        assert torch.isfinite(lse[index]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk": 0}, "expected a chunk of 1 token or more"),
        ({"prefix_lens": [1, 2]}, "a row, a prefix and a length for each request"),
        ({"extend_lens": [50]}, "new tokens at most"),
        ({"prefix_lens": [POSITIONS]}, "positions, found"),
        ({"prefix_lens": [-1]}, "lengths of 0 or more"),
        ({"q": torch.zeros(20, 5, DIM)}, "pools for 5 query heads"),
        ({"q": torch.zeros(20, HEADS * DIM)}, r"expected q \[tokens, heads, dim\]"),
    ],
)
def test_what_does_not_fit_is_refused(rng, change, message):
    batch = Batch(rng, [3], [20])
    names = ("q", "k_pool", "v_pool", "req_to_token", "rows", "prefix_lens", "extend_lens")
    values = (batch.q, batch.k_pool, batch.v_pool, batch.table, batch.rows, [3], [20])
    with pytest.raises(ValueError, match=message):
        extend(**{**dict(zip(names, values, strict=True)), **change}, scale=SCALE)
