# SPDX-License-Identifier: Apache-2.0
"""Decode attention over KV pages in pinned host memory, in HBM, or in both (docs/attention.md).

::

    attention = DecodeAttention(
        query_heads=32, kv_heads=8, head_dim=128, page_tokens=64, dtype=torch.bfloat16, max_tokens=131072
    )
    workspace = attention.workspace(batch, device)
    out = attention(q, [KvPool(k, v)], pages, lengths, workspace=workspace, scale=128**-0.5)

A call is one call of the host into libtardis_gpu.so, which enqueues on the current stream and neither allocates nor
waits: it can be captured in a CUDA graph. Lengths and page tables are read by the device when its turn comes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from sglang_tardis.attention import abi
from sglang_tardis.attention.abi import SECOND_POOL
from sglang_tardis.attention.calls import TYPES, KvPool, call, expect, expect_pools, row_bytes, set_pools

__all__ = ["SECOND_POOL", "DecodeAttention", "KvPool", "built_shapes"]

_MOST_TABLE_TOKENS = 1 << 30


def built_shapes() -> tuple[str, ...]:
    """What the library was built for, as "bf16:128" (KV dtype and head dimension).

    Raises:
        GpuLibraryMissingError: there is no libtardis_gpu.so.
    """
    return tuple(abi.gpu().tardis_gpu_attention_shapes().decode().split())


class DecodeAttention:
    """The attention of the last tokens of requests over their KV pages.

    Args:
        query_heads: heads of the queries, a multiple of kv_heads.
        kv_heads: heads in the pools.
        head_dim: 64, 128 or 256.
        page_tokens: 16, 32, 64 or 128.
        dtype: of K and V: torch.bfloat16, torch.float16, or torch.float8_e4m3fn with queries and output in bfloat16.
        max_tokens: bound of the lengths.
        query_tokens: of each request, the last of its tokens; query_tokens * query_heads / kv_heads is at most 64.
        window_left: so many tokens before its own does a query see; -1: all.
        soft_cap: 0: none; else products become soft_cap * tanh(product / soft_cap).
        splits: parts of a context that work beside each other; 0: chosen from batch, heads and max_tokens.

    Raises:
        ValueError: an argument that cannot be (with the library's sentence, where it is the one that says so).
        NotImplementedError: a shape that was not built, or a GPU that cannot run it.
        GpuLibraryMissingError: there is no libtardis_gpu.so.
    """

    def __init__(
        self,
        *,
        query_heads: int,
        kv_heads: int,
        head_dim: int,
        page_tokens: int,
        dtype: torch.dtype,
        max_tokens: int,
        query_tokens: int = 1,
        window_left: int = -1,
        soft_cap: float = 0.0,
        splits: int = 0,
    ) -> None:
        if dtype not in TYPES:
            raise NotImplementedError(
                f"dtype: expected one of {', '.join(map(str, TYPES))}, found {dtype}; use another attention backend"
            )
        for name, value in (
            ("query_heads", query_heads),
            ("kv_heads", kv_heads),
            ("head_dim", head_dim),
            ("page_tokens", page_tokens),
            ("query_tokens", query_tokens),
            ("max_tokens", max_tokens),
        ):
            if not 0 < value <= _MOST_TABLE_TOKENS:
                raise ValueError(f"{name}: expected 1 to 2^30, found {value}")
        self.dtype = dtype
        self.query_dtype = torch.float16 if dtype == torch.float16 else torch.bfloat16
        abi.gpu()
        self._fixed = abi.Decode(
            soft_cap=soft_cap,
            scale=1.0,
            key_scale=1.0,
            value_scale=1.0,
            window_left=window_left,
            batch=1,
            query_tokens=query_tokens,
            query_heads=query_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            page_tokens=page_tokens,
            type=TYPES[dtype],
            max_tokens=max_tokens,
            splits=splits,
        )

    def workspace_bytes(self, batch: int) -> int:
        """Bytes of HBM that a call for `batch` requests wants on the current device; may be 0.

        It need not grow with the batch: where several batch sizes share a workspace, take the largest.
        """
        parameters = self._with_batch(batch)
        found = ctypes.c_uint64()
        call("tardis_gpu_attention_workspace", parameters, ctypes.byref(found))
        return found.value

    def workspace(self, batch: int, device: torch.device | str) -> torch.Tensor:
        """Memory for `workspace_bytes(batch)`, uint8. Calls on one stream can share it."""
        with torch.cuda.device(device):
            return torch.empty(max(self.workspace_bytes(batch), 16), dtype=torch.uint8, device=device)

    def __call__(
        self,
        queries: torch.Tensor,
        pools: Sequence[KvPool],
        pages: torch.Tensor,
        lengths: torch.Tensor,
        *,
        workspace: torch.Tensor,
        scale: float,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Enqueues the attention on the current stream.

        Args:
            queries: `[batch * query_tokens, query_heads, head_dim]`, `query_dtype`.
            pools: one or two; `pages` says which page is in which.
            pages: int32 `[batch, n]`; entry i is the page of tokens i * page_tokens and on, with SECOND_POOL added
                if it is one of pools[1]. What lies behind a request's length is not read.
            lengths: int32 `[batch]`, tokens of each request, the query's own included. 0: zeros are the output.
            workspace: as `workspace()`; its contents do not matter.
            scale: of the products of queries and keys.
            key_scale: what a stored key is to be multiplied with.
            value_scale: likewise.
            out: as queries; made if None.
            lse: float32 `[batch * query_tokens, query_heads]`, filled with the natural logarithm of the sums of
                exponentials.

        Returns:
            `out`.

        Raises:
            ValueError: a tensor is not as above.
            NotImplementedError: a shape that was not built, or a GPU that cannot run it.
            RuntimeError: the launch failed.
        """
        parameters, batch = self._with_batch(lengths.shape[0]), lengths.shape[0]
        if out is None:
            out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        self._check(queries, pools, pages, lengths, workspace, out, lse)
        set_pools(parameters, pools)
        parameters.queries, parameters.output = queries.data_ptr(), out.data_ptr()
        parameters.lse = None if lse is None else lse.data_ptr()
        parameters.pages, parameters.lengths = pages.data_ptr(), lengths.data_ptr()
        parameters.workspace, parameters.workspace_bytes = workspace.data_ptr(), workspace.numel()
        parameters.query_row_bytes, parameters.output_row_bytes = row_bytes(queries, 0), row_bytes(out, 0)
        parameters.page_row = pages.stride(0) if batch > 1 else pages.shape[1]
        parameters.scale, parameters.key_scale, parameters.value_scale = scale, key_scale, value_scale
        call("tardis_gpu_attention_decode", parameters, torch.cuda.current_stream(queries.device).cuda_stream)
        return out

    def _with_batch(self, batch: int) -> abi.Decode:
        parameters = abi.Decode.from_buffer_copy(self._fixed)
        parameters.batch = batch
        return parameters

    def _check(
        self,
        queries: torch.Tensor,
        pools: Sequence[KvPool],
        pages: torch.Tensor,
        lengths: torch.Tensor,
        workspace: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        fixed, device, batch = self._fixed, queries.device, lengths.shape[0]
        rows = batch * fixed.query_tokens
        expect("queries", queries, self.query_dtype, (rows, fixed.query_heads, fixed.head_dim), device)
        expect("out", out, self.query_dtype, (rows, fixed.query_heads, fixed.head_dim), device)
        for name, tensor in (("queries", queries), ("out", out)):
            if fixed.query_heads > 1 and tensor.stride(1) != fixed.head_dim:
                raise ValueError(f"{name}: expected heads side by side, found strides {tensor.stride()}")
        expect_pools(pools, self.dtype, fixed.kv_heads, fixed.head_dim, device)
        expect("lengths", lengths, torch.int32, (batch,), device)
        expect("pages", pages, torch.int32, (batch, None), device)
        expect("workspace", workspace, torch.uint8, (None,), device)
        if lse is not None:
            expect("lse", lse, torch.float32, (rows, fixed.query_heads), device)
            if not lse.is_contiguous():
                raise ValueError(f"lse: expected a contiguous tensor, found strides {lse.stride()}")
        if device.type != "cuda":
            raise ValueError(f"queries: expected a tensor on a GPU, found one on {device}")
