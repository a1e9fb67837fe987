# SPDX-License-Identifier: Apache-2.0
"""Attention over a part of the keys, and how the parts become one.

A part is an output that is normalised by itself and the logarithm of what it was divided by (natural). Merging is exact
up to rounding, in any order. Queries that see nothing of a part have the output 0 and the logarithm -inf there.
"""

from __future__ import annotations

import torch

__all__ = ["attend", "attend_together", "flash_takes", "merge"]

_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_FLASH_MOST_DIM = 256
_BLOCK_SCORES = 1 << 26  # of one step of the plain way: 256 MiB


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    first_query: int = 0,
    first_key: int = 0,
    causal: bool = False,
    window: int = -1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of queries over the keys of one request.

    Args:
        q: `[queries, heads, dim]`.
        k: `[keys, kv_heads, dim]`; heads is a multiple of kv_heads.
        v: `[keys, kv_heads, value_dim]`.
        scale: of the scores.
        first_query: position of the first query in the request; the others follow.
        first_key: position of the first key.
        causal: whether a query sees keys up to its own position only.
        window: with causal: how many positions before its own it sees; -1: all.

    Returns:
        output `[queries, heads, value_dim]`, float32, and logarithm `[queries, heads]`, float32.
    """
    square = q.shape[0] == k.shape[0] and first_query == first_key
    if flash_takes(q, k, v) and window < 0 and (not causal or square):
        return _flash(q, k, v, scale, causal)
    return _plain(q, k, v, scale, first_query - first_key, causal, window)


def attend_together(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    most_queries: int,
    most_keys: int,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `attend`, of several requests behind each other: one launch where flash attention takes them.

    Args:
        q: `[queries, heads, dim]`.
        k: `[keys, kv_heads, dim]`.
        v: `[keys, kv_heads, value_dim]`.
        scale: of the scores.
        query_starts: int32 `[requests + 1]`, where the queries of each begin, and their end.
        key_starts: likewise. Each request has a query and a key at least.
        most_queries: that a request has.
        most_keys: likewise.
        causal: whether a query sees keys up to its own only; each request has as many keys as queries then.

    Returns:
        output `[queries, heads, value_dim]`, float32, and logarithm `[queries, heads]`, float32.
    """
    if not flash_takes(q, k, v):
        queries, keys = query_starts.tolist(), key_starts.tolist()
        parts = [
            attend(q[a:b], k[c:d], v[c:d], scale, causal=causal)
            for a, b, c, d in zip(queries[:-1], queries[1:], keys[:-1], keys[1:], strict=True)
        ]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    k, v = _for_each_head(q, k, v)
    output, log, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, query_starts, key_starts, most_queries, most_keys, 0.0, causal, False, scale=scale
    )
    if log.shape != (q.shape[1], q.shape[0]):  # older ones pad it to the longest request
        raise RuntimeError(
            f"attention of several requests: expected logarithms [heads, queries] of torch's flash attention, found "
            f"{list(log.shape)}; torch {torch.__version__} is not supported"
        )
    return output.float(), log.transpose(0, 1)


def merge(
    parts: tuple[torch.Tensor, torch.Tensor], more: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two parts of the same queries as one."""
    (output, log), (other, other_log) = parts, more
    most = torch.maximum(log, other_log)
    finite = torch.where(torch.isneginf(most), torch.zeros_like(most), most)  # nothing was seen: no -inf - -inf
    weight, other_weight = torch.exp(log - finite), torch.exp(other_log - finite)
    total = weight + other_weight
    divisor = torch.where(total > 0, total, torch.ones_like(total)).unsqueeze(-1)
    merged = (output * weight.unsqueeze(-1) + other * other_weight.unsqueeze(-1)) / divisor
    return merged, torch.log(total) + finite


def flash_takes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether torch's flash attention is used for such tensors (without a window)."""
    same = q.dtype == k.dtype == v.dtype and q.shape[-1] == v.shape[-1]
    return q.is_cuda and same and q.dtype in _FLASH_DTYPES and q.shape[-1] <= _FLASH_MOST_DIM and q.shape[-1] % 8 == 0


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = (x.transpose(0, 1).unsqueeze(0) for x in _for_each_head(q, k, v))
    result = torch.ops.aten._scaled_dot_product_flash_attention(
        q.transpose(0, 1).unsqueeze(0), keys, values, 0.0, causal, False, scale=scale
    )
    return result[0][0].transpose(0, 1).float(), result[1][0, :, : q.shape[0]].transpose(0, 1)


def _for_each_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    group = q.shape[1] // k.shape[1]
    return (k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)) if group > 1 else (k, v)


def _plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, ahead: int, causal: bool, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """In float32, a block of queries at a time. `ahead`: position of the first query, from that of the first key."""
    queries, heads = q.shape[:2]
    keys, kv_heads = k.shape[:2]
    group = heads // kv_heads
    output = torch.empty((queries, heads, v.shape[-1]), dtype=torch.float32, device=q.device)
    log = torch.empty((queries, heads), dtype=torch.float32, device=q.device)
    keys_across = k.float().permute(1, 2, 0).unsqueeze(1)  # [kv_heads, 1, dim, keys]
    values = v.float().transpose(0, 1).unsqueeze(1)  # [kv_heads, 1, keys, value_dim]
    step = max(1, _BLOCK_SCORES // max(1, heads * keys))
    positions = torch.arange(keys, device=q.device)
    for begin in range(0, queries, step):
        block = q[begin : begin + step].float().view(-1, kv_heads, group, q.shape[-1]).permute(1, 2, 0, 3)
        scores = (block @ keys_across).mul_(scale)
        if causal:
            own = torch.arange(begin, begin + block.shape[2], device=q.device).add_(ahead).unsqueeze(1)
            hidden = positions > own
            if window >= 0:
                hidden |= positions < own - window
            scores.masked_fill_(hidden, -torch.inf)
        logs = torch.logsumexp(scores, -1)
        base = torch.where(torch.isneginf(logs), torch.zeros_like(logs), logs)
        weighted = scores.sub_(base.unsqueeze(-1)).exp_() @ values
        output[begin : begin + step] = weighted.permute(2, 0, 1, 3).reshape(-1, heads, v.shape[-1])
        log[begin : begin + step] = logs.permute(2, 0, 1).reshape(-1, heads)
    return output, log
