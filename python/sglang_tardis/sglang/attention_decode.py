# SPDX-License-Identifier: Apache-2.0
"""Decode steps of the attention backend: a kernel for each kind of layer, or the reference on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch

from sglang_tardis.attention import reference

__all__ = ["Decode", "KernelDecode", "ReferenceDecode", "kind_of"]


def kind_of(layer: Any) -> tuple[int, int, int, int]:
    """What kernels are made for: query heads, KV heads, dimension and window of a RadixAttention."""
    return layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim, layer.sliding_window_size


class Decode(Protocol):
    """One new token of each request over its KV."""

    def workspace(self, batch: int, *, largest: bool) -> torch.Tensor | None:
        """Memory for a batch, or with `largest` for any up to it."""

    def __call__(
        self,
        layer: Any,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        page_table: torch.Tensor,
        lengths: torch.Tensor,
        scales: tuple[float, float],
        workspace: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Enqueue it.

        Args:
            layer: RadixAttention.
            q: `[batch, heads, dim]`.
            keys: `[slots, kv_heads, dim]`.
            values: likewise.
            page_table: int32 `[batch, pages]`.
            lengths: int32 `[batch]`, the new token included.
            scales: what K and V of the pool are multiplied by.
            workspace: of :meth:`workspace`.
            out: as q.
        """


class ReferenceDecode:
    """In plain torch."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens

    def workspace(self, batch: int, *, largest: bool) -> None:
        """None."""

    def __call__(self, layer, q, keys, values, page_table, lengths, scales, workspace, out) -> None:
        """As `Decode`; waits for the device."""
        reference.decode(
            q,
            keys,
            values,
            page_table,
            lengths,
            self._page_tokens,
            layer.scaling,
            window=layer.sliding_window_size,
            k_scale=scales[0],
            v_scale=scales[1],
            out=out,
        )


class KernelDecode:
    """By libtardis_gpu.so; can be captured.

    Args:
        layers: RadixAttention, of the model.
        page_tokens: 16, 32, 64 or 128.
        dtype: of the pool.
        query_dtype: of the model.
        max_tokens: bound of the lengths.
        device: CUDA.

    Raises:
        NotImplementedError: a shape that was not built, or dtypes that do not go together.
        GpuLibraryMissingError: there is no libtardis_gpu.so.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        *,
        page_tokens: int,
        dtype: torch.dtype,
        query_dtype: torch.dtype,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        from sglang_tardis.attention import abi, decode

        self._device = device
        self._pool = decode.KvPool
        self._kernels = {
            kind: decode.DecodeAttention(
                query_heads=kind[0],
                kv_heads=kind[1],
                head_dim=kind[2],
                window_left=kind[3],
                page_tokens=page_tokens,
                dtype=dtype,
                max_tokens=max_tokens,
            )
            for kind in {kind_of(layer) for layer in layers}
        }
        for kernel in self._kernels.values():
            if kernel.query_dtype != query_dtype:
                raise NotImplementedError(
                    f"--attention-backend tardis: expected a model in {kernel.query_dtype} over KV in {dtype}, found "
                    f"{query_dtype}; set --dtype or --kv-cache-dtype"
                )
            kernel.workspace_bytes(1)  # says what was not built
        # One that is loaded at its first launch would wait for what runs, perhaps for a load that waits for it.
        code = abi.gpu().tardis_gpu_attention_load()
        if code != 0:
            raise RuntimeError(f"--attention-backend tardis: its kernels could not be loaded (CUDA error {code})")

    def workspace(self, batch: int, *, largest: bool) -> torch.Tensor:
        """Uint8, in HBM."""
        batches = range(1, batch + 1) if largest else (batch,)
        with torch.cuda.device(self._device):
            sizes = [kernel.workspace_bytes(size) for kernel in self._kernels.values() for size in batches]
        return torch.empty(max(16, *sizes), dtype=torch.uint8, device=self._device)

    def __call__(self, layer, q, keys, values, page_table, lengths, scales, workspace, out) -> None:
        """As `Decode`; one call into the library."""
        self._kernels[kind_of(layer)](
            q,
            [self._pool(keys, values)],
            page_table,
            lengths,
            workspace=workspace,
            scale=layer.scaling,
            key_scale=scales[0],
            value_scale=scales[1],
            out=out,
        )
