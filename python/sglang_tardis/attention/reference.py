# SPDX-License-Identifier: Apache-2.0
"""Decode attention in plain torch: what the kernel is compared with, and what servers on CPU tensors use."""

from __future__ import annotations

import torch

from sglang_tardis.attention.extend import gather
from sglang_tardis.attention.partial import attend

__all__ = ["decode"]


def decode(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    sm_scale: float,
    *,
    window: int = -1,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """One new token of each request over all of its KV. Reads the lengths on the host, so it waits for the device.

    Args:
        q: `[batch, heads, dim]`.
        k_pool: `[slots, kv_heads, dim]`.
        v_pool: `[slots, kv_heads, value_dim]`.
        page_table: int32 `[batch, pages]`, numbers of pages of `page_size` slots.
        seq_lens: int32 `[batch]`, tokens of each request, the new one included; 0: its output is 0.
        page_size: tokens of a page.
        sm_scale: of the scores.
        window: how many positions before its own the token sees; -1: all.
        k_scale: what K of the pool is multiplied by (fp8).
        v_scale: what V of the pool is multiplied by.
        workspace: not used.
        out: `[batch, heads, value_dim]`, to be written; None: a new tensor of q's dtype.
        lse: float32 `[batch, heads]`, to be written with the natural logarithm of the sum; -inf where nothing is seen.

    Returns:
        out.
    """
    if out is None:
        out = q.new_empty((*q.shape[:2], v_pool.shape[-1]))
    for index, length in enumerate(seq_lens.tolist()):
        if length == 0:
            out[index].zero_()
            if lse is not None:
                lse[index].fill_(-torch.inf)
            continue
        first = max(0, length - 1 - window) if window >= 0 else 0
        positions = torch.arange(first, length, device=q.device)
        slots = page_table[index, positions // page_size].long() * page_size + positions % page_size
        keys, values = gather(k_pool, slots, q.dtype), gather(v_pool, slots, q.dtype)
        output, log = attend(q[index : index + 1], keys, values, sm_scale * k_scale)
        out[index] = output[0].mul_(v_scale).to(out.dtype)
        if lse is not None:
            lse[index] = log[0]
    return out
