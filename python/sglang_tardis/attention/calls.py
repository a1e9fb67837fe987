# SPDX-License-Identifier: Apache-2.0
"""What calls of decode attention and of stores share: pools, looks at tensors, errors of the library."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Sequence

import torch

from sglang_tardis.attention import abi

__all__ = ["TYPES", "KvPool", "call", "expect", "expect_pools", "row_bytes", "set_pools"]

TYPES = {torch.bfloat16: abi.BF16, torch.float16: abi.FP16, torch.float8_e4m3fn: abi.FP8_E4M3}
_CUDA_INVALID_VALUE, _CUDA_NOT_SUPPORTED = 1, 801


@dataclasses.dataclass(frozen=True)
class KvPool:
    """K and V of one layer, `[slots, kv_heads, head_dim]` each, in memory that the device reaches.

    The last dimension is contiguous; strides of the others and addresses are multiples of 16 bytes. A page is
    `page_tokens` slots one after the other, page p from slot p * page_tokens on; slots behind the last whole page are
    not used.
    """

    keys: torch.Tensor
    values: torch.Tensor


def expect(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int | None, ...], device: torch.device
) -> None:
    """Raises ValueError unless it is as told; None in a shape: any size."""
    fits = tensor.dim() == len(shape) and all(
        wanted is None or size == wanted for size, wanted in zip(tensor.shape, shape, strict=True)
    )
    if not fits or tensor.dtype != dtype or tensor.device != device or tensor.stride(-1) != 1:
        wanted = [size if size is not None else "n" for size in shape]
        raise ValueError(
            f"{name}: expected {dtype} {wanted} on {device}, its last dimension contiguous, found {tensor.dtype} "
            f"{list(tensor.shape)} on {tensor.device} with strides {tensor.stride()}"
        )


def row_bytes(tensor: torch.Tensor, dimension: int) -> int:
    """From one index of a dimension to the next; where there is only one, what lies side by side would have."""
    if tensor.shape[dimension] > 1:
        return tensor.stride(dimension) * tensor.element_size()
    return math.prod(tensor.shape[dimension + 1 :]) * tensor.element_size()


def expect_pools(
    pools: Sequence[KvPool], dtype: torch.dtype, kv_heads: int, head_dim: int, device: torch.device
) -> None:
    """Raises ValueError unless they are one or two pools of such heads."""
    if len(pools) not in (1, 2):
        raise ValueError(f"pools: expected one or two, found {len(pools)}")
    for pool in pools:
        for name, tensor in (("keys", pool.keys), ("values", pool.values)):
            expect(name, tensor, dtype, (pool.keys.shape[0], kv_heads, head_dim), device)


def set_pools(parameters: abi.Decode | abi.Store, pools: Sequence[KvPool]) -> None:
    """Puts their addresses, strides and whole pages into the parameters of a call."""
    page = parameters.page_tokens
    for side, pool in zip(parameters.pools, pools, strict=False):
        side.keys, side.values = pool.keys.data_ptr(), pool.values.data_ptr()
        side.slots = pool.keys.shape[0] // page * page
        side.key_slot_bytes, side.key_head_bytes = row_bytes(pool.keys, 0), row_bytes(pool.keys, 1)
        side.value_slot_bytes, side.value_head_bytes = row_bytes(pool.values, 0), row_bytes(pool.values, 1)


def call(name: str, parameters: abi.Decode | abi.Store, argument: object) -> None:
    """A function of the library that takes parameters, `argument`, and room for a sentence.

    Raises:
        ValueError: it says that the parameters cannot be.
        NotImplementedError: a shape that was not built, or a GPU that cannot run it.
        RuntimeError: another CUDA error.
    """
    text = ctypes.create_string_buffer(abi.ERROR_BYTES)
    code = getattr(abi.gpu(), name)(ctypes.byref(parameters), argument, text, abi.ERROR_BYTES)
    if code == 0:
        return
    sentence = text.value.decode(errors="replace")
    if code == _CUDA_INVALID_VALUE:
        raise ValueError(sentence)
    if code == _CUDA_NOT_SUPPORTED:
        raise NotImplementedError(sentence)
    raise RuntimeError(f"{sentence} (CUDA error {code})")
