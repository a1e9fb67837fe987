# SPDX-License-Identifier: Apache-2.0
"""New rows of K and V into the slots of a layer's pools, in pinned host memory, in HBM, or in both."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_tardis.attention import abi
from sglang_tardis.attention.calls import TYPES, KvPool, call, expect, expect_pools, row_bytes, set_pools

__all__ = ["store_rows"]


def store_rows(
    keys: torch.Tensor,
    values: torch.Tensor,
    pools: Sequence[KvPool],
    slots: torch.Tensor,
    *,
    page_tokens: int,
    entries: torch.Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Enqueues the storing on the current stream: one kernel, which can be captured in a CUDA graph.

    Args:
        keys: `[tokens, kv_heads, head_dim]`, float16 for pools of that, else bfloat16; heads lie side by side.
        values: likewise.
        pools: one or two.
        slots: int64 `[tokens]`, page * page_tokens + the place in it, each once. Rows of slots outside of the pools (or
            of `entries`) are left out.
        page_tokens: 16, 32, 64 or 128.
        entries: int32 `[pages]`, the entry in page tables of each page that slots name (`SECOND_POOL`: it is in
            pools[1]); None: the page itself, in pools[0].
        key_scale: fp8: keys are divided by it and become the nearest number that there is.
        value_scale: likewise.

    Raises:
        ValueError: a tensor is not as above (with the library's sentence, where it is the one that says so).
        NotImplementedError: pools of another dtype than bfloat16, float16 and float8_e4m3fn.
        RuntimeError: the launch failed.
        GpuLibraryMissingError: there is no libtardis_gpu.so.
    """
    if len(pools) not in (1, 2):
        raise ValueError(f"pools: expected one or two, found {len(pools)}")
    dtype, device = pools[0].keys.dtype, keys.device
    if dtype not in TYPES:
        raise NotImplementedError(
            f"pools: expected one of {', '.join(map(str, TYPES))}, found {dtype}; use the pool's own writer"
        )
    if keys.dim() != 3:
        raise ValueError(f"keys: expected [tokens, kv_heads, head_dim], found {list(keys.shape)}")
    tokens, kv_heads, head_dim = keys.shape
    row_dtype = torch.float16 if dtype == torch.float16 else torch.bfloat16
    for name, tensor in (("keys", keys), ("values", values)):
        expect(name, tensor, row_dtype, (tokens, kv_heads, head_dim), device)
        if kv_heads > 1 and tensor.stride(1) != head_dim:
            raise ValueError(f"{name}: expected heads side by side, found strides {tensor.stride()}")
    expect_pools(pools, dtype, kv_heads, head_dim, device)
    expect("slots", slots, torch.int64, (tokens,), device)
    if entries is not None:
        expect("entries", entries, torch.int32, (None,), device)
    if device.type != "cuda":
        raise ValueError(f"keys: expected a tensor on a GPU, found one on {device}")
    parameters = abi.Store(
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        key_row_bytes=row_bytes(keys, 0),
        value_row_bytes=row_bytes(values, 0),
        slots=slots.data_ptr(),
        entries=None if entries is None else entries.data_ptr(),
        entry_count=0 if entries is None else entries.numel(),
        key_scale=key_scale,
        value_scale=value_scale,
        tokens=tokens,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_tokens=page_tokens,
        type=TYPES[dtype],
    )
    set_pools(parameters, pools)
    call("tardis_gpu_attention_store", parameters, torch.cuda.current_stream(device).cuda_stream)
