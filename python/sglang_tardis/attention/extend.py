# SPDX-License-Identifier: Apache-2.0
"""Attention of new tokens over a prefix in a KV pool that lies in host memory, and over themselves.

Right first: every token of the prefix crosses the link once for a request and layer, in pieces that fit a bounded
scratch in the device's memory, and no more of it is ever copied. Any device; on CPU tensors it is the same code.

Many short requests are attended together (`Together`, made once a step for all layers), so that launches do not count
by requests.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch

from sglang_tardis.attention.partial import attend, attend_together, flash_takes, merge

__all__ = ["DEFAULT_CHUNK", "Together", "extend", "gather"]

DEFAULT_CHUNK = 4096
"""Tokens of the prefix that are in the scratch at a time."""

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def gather(pool: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a pool `[slots, kv_heads, dim]` as `[n, kv_heads, dim]` of `dtype`, on the pool's device.

    Args:
        pool: of any dtype. bfloat16 and float16 have every number of fp8: nothing is rounded.
        slots: int32 or int64 `[n]`.
        dtype: of the result.
    """
    if pool.dtype in _FP8:
        return pool.view(torch.uint8).index_select(0, slots).view(pool.dtype).to(dtype)
    return pool.index_select(0, slots).to(dtype)


@dataclasses.dataclass(frozen=True)
class _Part:
    """A piece of the prefix of each of some requests whose new tokens are behind each other."""

    begin: int
    end: int
    slots: torch.Tensor
    query_starts: torch.Tensor
    key_starts: torch.Tensor
    most_queries: int
    most_keys: int


@dataclasses.dataclass(frozen=True)
class Together:
    """A batch of a step, in an order that takes few launches a layer.

    Attributes:
        tokens: new ones.
        starts: int32, on the device: where those of each request begin, and their end.
        most: new tokens that a request has.
        parts: of the prefixes.
    """

    tokens: int
    starts: torch.Tensor
    most: int
    parts: tuple[_Part, ...]

    @classmethod
    def of(
        cls,
        req_to_token: torch.Tensor,
        rows: torch.Tensor,
        prefix_lens: Sequence[int],
        extend_lens: Sequence[int],
        chunk: int = DEFAULT_CHUNK,
    ) -> Together:
        """Arguments as of `extend`."""
        device = req_to_token.device
        found: list[list[tuple[int, int, int]]] = []  # of each part: request, and what of its prefix
        room, before = 0, -1
        requests = [index for index, count in enumerate(extend_lens) if count]
        for place, index in enumerate(requests):
            for at in range(0, prefix_lens[index], chunk):
                end = min(at + chunk, prefix_lens[index])
                if at != 0 or before != place - 1 or end - at > room:
                    found.append([])
                    room = chunk
                found[-1].append((index, at, end))
                room -= end - at
                before = place
        begins = [0, *itertools.accumulate(extend_lens)]
        lists = [[0, *itertools.accumulate(extend_lens[index] for index in requests)]]
        for pieces in found:
            lists.append([begins[index] - begins[pieces[0][0]] for index, _, _ in pieces])
            lists[-1].append(begins[pieces[-1][0] + 1] - begins[pieces[0][0]])
            lists.append([0, *itertools.accumulate(end - at for _, at, end in pieces)])
        starts = _on(device, lists)
        parts = []
        for pieces, queries, keys in zip(found, starts[1::2], starts[2::2], strict=True):
            slots = [
                req_to_token.narrow(1, at, end - at).index_select(0, rows.narrow(0, index, 1)).view(-1)
                for index, at, end in pieces
            ]
            parts.append(
                _Part(
                    begin=begins[pieces[0][0]],
                    end=begins[pieces[-1][0] + 1],
                    slots=torch.cat(slots),
                    query_starts=queries,
                    key_starts=keys,
                    most_queries=max(extend_lens[index] for index, _, _ in pieces),
                    most_keys=max(end - at for _, at, end in pieces),
                )
            )
        return cls(begins[-1], starts[0], max(extend_lens, default=0), tuple(parts))


def _on(device: torch.device, lists: list[list[int]]) -> list[torch.Tensor]:
    """Int32, by one copy that nobody waits for."""
    flat = torch.tensor(list(itertools.chain(*lists)), dtype=torch.int32, pin_memory=device.type == "cuda")
    return list(flat.to(device, non_blocking=True).split([len(one) for one in lists]))


def extend(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    prefix_lens: Sequence[int],
    extend_lens: Sequence[int],
    *,
    scale: float,
    new: tuple[torch.Tensor, torch.Tensor] | None = None,
    window: int = -1,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    chunk: int = DEFAULT_CHUNK,
    together: Together | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of a ragged batch.

    Args:
        q: `[tokens, heads, dim]`, the new tokens of all requests behind each other; tokens beyond their sum (padding)
            are left out, and their outputs are 0.
        k_pool: `[slots, kv_heads, dim]`, readable by the device of q.
        v_pool: `[slots, kv_heads, value_dim]`.
        req_to_token: int32 `[requests, positions]`, the slot of each position.
        rows: int64 `[batch]`, which row of it is whose.
        prefix_lens: on the host: tokens of each request that are in the pool already.
        extend_lens: on the host: new tokens of each, behind its prefix; 0 is allowed.
        scale: of the scores.
        new: K and V of the new tokens, as q; None: they are in the pool as well.
        window: how many positions before its own a token sees; -1: all.
        k_scale: what K of the pool is multiplied by (fp8).
        v_scale: what V of the pool is multiplied by.
        chunk: tokens of the prefix that are on the device at a time.
        together: of the same batch and chunk; None: a request after the other. It is not used with a window, or where
            `new` is None.
        out: `[tokens, heads, value_dim]`, to be written; None: a new tensor of q's dtype.

    Returns:
        out.

    Raises:
        ValueError: shapes that do not fit.
    """
    tokens = sum(extend_lens)
    _check(q, k_pool, v_pool, req_to_token, rows, prefix_lens, extend_lens, chunk)
    if out is None:
        out = q.new_empty((q.shape[0], q.shape[1], v_pool.shape[-1]))
    if out.shape[0] > tokens:
        out[tokens:].zero_()
    if together is not None and together.tokens != tokens:
        raise ValueError(f"extend: expected `together` of {tokens} new tokens, found one of {together.tokens}")
    if together is not None and new is not None and window < 0 and (q.device.type == "cpu" or flash_takes(q, *new)):
        _extend_together(q, k_pool, v_pool, together, new, scale, k_scale, v_scale, out)
        return out
    begin = 0
    for index, (prefix, count) in enumerate(zip(prefix_lens, extend_lens, strict=True)):
        if count == 0:
            continue
        of_request = slice(begin, begin + count)
        queries = q[of_request]
        row = rows.narrow(0, index, 1)

        def slots(first: int, last: int, row: torch.Tensor = row) -> torch.Tensor:
            return req_to_token.narrow(1, first, last - first).index_select(0, row).view(-1)  # waits for nothing

        if new is not None:
            parts = _new_tokens(queries, new[0][of_request], new[1][of_request], scale, window, chunk)
        else:
            parts = None
        first = max(0, prefix - window) if window >= 0 else 0  # what no new token sees is not read
        end = prefix if new is not None else prefix + count
        for at in range(first, end, chunk):
            where = slots(at, min(at + chunk, end))
            keys, values = gather(k_pool, where, q.dtype), gather(v_pool, where, q.dtype)
            visible = at + keys.shape[0] <= prefix and (window < 0 or at >= prefix + count - 1 - window)
            where_they_are = {"first_query": prefix, "first_key": at, "causal": not visible, "window": window}
            output, log = attend(queries, keys, values, scale * k_scale, **where_they_are)
            part = output if v_scale == 1.0 else output.mul_(v_scale), log
            parts = part if parts is None else merge(parts, part)
        out[of_request] = parts[0].to(out.dtype)
        begin += count
    return out


def _extend_together(q, k_pool, v_pool, together, new, scale, k_scale, v_scale, out) -> None:
    if together.tokens == 0:
        return
    tokens = slice(0, together.tokens)
    output, log = attend_together(
        q[tokens],
        new[0][tokens],
        new[1][tokens],
        scale,
        query_starts=together.starts,
        key_starts=together.starts,
        most_queries=together.most,
        most_keys=together.most,
        causal=True,
    )
    for part in together.parts:
        of_part = slice(part.begin, part.end)
        seen, its_log = attend_together(
            q[of_part],
            gather(k_pool, part.slots, q.dtype),
            gather(v_pool, part.slots, q.dtype),
            scale * k_scale,
            query_starts=part.query_starts,
            key_starts=part.key_starts,
            most_queries=part.most_queries,
            most_keys=part.most_keys,
            causal=False,
        )
        part_of_all = seen if v_scale == 1.0 else seen.mul_(v_scale), its_log
        output[of_part], log[of_part] = merge((output[of_part], log[of_part]), part_of_all)
    out[tokens] = output.to(out.dtype)


def _new_tokens(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Over themselves, a chunk of queries at a time, each over all keys before it and over its own."""
    count = q.shape[0]
    outputs, logs = [], []
    for begin in range(0, count, chunk):
        end = min(begin + chunk, count)
        parts = attend(q[begin:end], k[begin:end], v[begin:end], scale, causal=True, window=window)
        for at in range(0, begin, chunk):
            last = min(at + chunk, begin)
            if window >= 0 and last <= begin - window:
                continue
            part = attend(
                q[begin:end],
                k[at:last],
                v[at:last],
                scale,
                first_query=begin,
                first_key=at,
                causal=window >= 0,
                window=window,
            )
            parts = merge(parts, part)
        outputs.append(parts[0])
        logs.append(parts[1])
    return torch.cat(outputs), torch.cat(logs)


def _check(q, k_pool, v_pool, req_to_token, rows, prefix_lens, extend_lens, chunk) -> None:
    if q.dim() != 3 or k_pool.dim() != 3 or v_pool.dim() != 3:
        raise ValueError(
            "extend: expected q [tokens, heads, dim] and pools [slots, kv_heads, dim], found "
            f"{tuple(q.shape)}, {tuple(k_pool.shape)} and {tuple(v_pool.shape)}"
        )
    if k_pool.shape[2] != q.shape[2] or q.shape[1] % k_pool.shape[1] != 0 or v_pool.shape[:2] != k_pool.shape[:2]:
        raise ValueError(
            f"extend: expected pools for {q.shape[1]} query heads of {q.shape[2]}, found K {tuple(k_pool.shape)} and V "
            f"{tuple(v_pool.shape)}"
        )
    if not len(prefix_lens) == len(extend_lens) == rows.shape[0]:
        raise ValueError(
            "extend: expected a row, a prefix and a length for each request, found "
            f"{rows.shape[0]}, {len(prefix_lens)} and {len(extend_lens)}"
        )
    if min([0, *prefix_lens, *extend_lens]) < 0 or sum(extend_lens) > q.shape[0]:
        raise ValueError(
            f"extend: expected lengths of 0 or more, {q.shape[0]} new tokens at most, found prefixes {prefix_lens} and "
            f"new {extend_lens}"
        )
    longest = max((p + n for p, n in zip(prefix_lens, extend_lens, strict=True)), default=0)
    if longest > req_to_token.shape[1]:
        raise ValueError(f"extend: expected at most {req_to_token.shape[1]} positions, found {longest}")
    if chunk < 1:
        raise ValueError(f"extend: expected a chunk of 1 token or more, found {chunk}")
