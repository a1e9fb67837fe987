# SPDX-License-Identifier: Apache-2.0
"""KV pools as transfers see them, and where the same bytes lie in an object.

A pool keeps each layer's K and V apart, `[tokens, heads, dim]` (SGLang's MHATokenToKVPool), or has one buffer a layer
(MLATokenToKVPool); a page is `page_tokens` tokens in a row. An object is `[layer][K,V][token][head][dim]`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["KvPools", "PageLayout", "pool_page_count"]

_ALIGNMENT = 16  # of addresses and sizes that a ring moves
_DIGESTED_BYTES = 16 << 10
_MOST_BYTES = (1 << 32) - 1  # of K or V of a page: 32 bits in the libraries
_POOLS = ("MHATokenToKVPool", "MLATokenToKVPool")
_POOLS_MODULE = "sglang.srt.mem_cache.memory_pool"
# Where pools of these kinds keep more of a page than K and V, or layers elsewhere.
_MORE = (
    "k_scale_buffer",
    "v_scale_buffer",
    "native_k_scale_buffer",
    "native_v_scale_buffer",
    "kv_scale_buffer",
    "layer_shard_enabled",
)


@dataclasses.dataclass(frozen=True)
class PageLayout:
    """Where the parts of a page lie in its object.

    Attributes:
        layers: how many.
        key_bytes: of K of a page in one layer (MLA: of its one buffer), a multiple of 16.
        value_bytes: of V; 0: there is none.
        block_bytes: of the drive, 512 or 4096. K and V of a page are whole blocks: a command moves nothing less.
    """

    layers: int
    key_bytes: int
    value_bytes: int = 0
    block_bytes: int = 4096

    def __post_init__(self) -> None:
        if self.layers < 1 or self.key_bytes < 1 or self.value_bytes < 0:
            raise ValueError(f"PageLayout: expected at least a layer and bytes of K, found {self}")
        if self.block_bytes not in (512, 4096):
            raise ValueError(f"PageLayout: expected blocks of 512 or 4096 bytes, found {self.block_bytes}")
        for name, size in (("K", self.key_bytes), ("V", self.value_bytes)):
            if size % _ALIGNMENT != 0:
                raise ValueError(
                    f"PageLayout: expected {name} of a page to be a multiple of {_ALIGNMENT} bytes, found {size}"
                )
            if size > _MOST_BYTES:
                raise ValueError(
                    f"PageLayout: expected {name} of a page to be below 4 GiB in a layer, found {size} bytes"
                )
        if self.layer_bytes % self.block_bytes != 0:
            raise NotImplementedError(
                f"PageLayout: expected K and V of a page to be whole blocks of {self.block_bytes} bytes, found "
                f"{self.layer_bytes} bytes; use larger pages, or block_bytes=512"
            )

    @property
    def layer_bytes(self) -> int:
        """K and V of a page in one layer: one read."""
        return self.key_bytes + self.value_bytes

    @property
    def object_bytes(self) -> int:
        """Bytes from one object to the next."""
        return self.layers * self.layer_bytes

    @property
    def object_blocks(self) -> int:
        """Blocks from one object to the next."""
        return self.object_bytes // self.block_bytes

    @property
    def digests(self) -> int:
        """Digests of a page in one layer: of each 16 KiB from its first byte."""
        return -(-self.layer_bytes // _DIGESTED_BYTES)

    def layer_offset(self, layer: int) -> int:
        """Bytes from the object's start to a layer's K."""
        return layer * self.layer_bytes

    def layer_block(self, layer: int) -> int:
        """Blocks from the object's start to a layer's K."""
        return self.layer_offset(layer) // self.block_bytes


def pool_page_count(pool: torch.Tensor, page_bytes: int, name: str) -> int:
    """How many whole pages a buffer of one layer holds.

    Raises:
        ValueError: a page of it is not a run of bytes that a ring can move.
    """
    if not pool.is_contiguous():
        raise ValueError(
            f"{name}: expected contiguous tokens, found shape {tuple(pool.shape)} with strides {pool.stride()}; keep K "
            "and V of each layer in buffers of their own"
        )
    return pool.numel() * pool.element_size() // page_bytes


class KvPools:
    """Views of a KV pool: per layer K and V, or one buffer.

    Args:
        keys: per layer `[tokens, heads, dim]` of any dtype (MLA: `[tokens, 1, dim]`), contiguous, at a multiple of 16
            bytes, all of one shape, dtype and device.
        values: the same of V, whose heads and dim may differ; None: MLA.
        page_tokens: tokens of a page. Tokens behind the last whole page belong to none.

    Raises:
        ValueError: buffers that cannot be moved, with what to change.
    """

    def __init__(
        self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor] | None = None, *, page_tokens: int
    ) -> None:
        if page_tokens < 1:
            raise ValueError(f"KvPools: expected page_tokens of 1 or more, found {page_tokens}")
        if not keys or (values is not None and len(values) != len(keys)):
            raise ValueError(
                f"KvPools: expected a K buffer for each layer and as many of V, found {len(keys)} and "
                f"{len(values) if values is not None else 'none'}"
            )
        self.page_tokens = page_tokens
        self.keys = list(keys)
        self.values = list(values) if values is not None else None
        self.device = self.keys[0].device
        self.key_bytes = self._check(self.keys, "K")
        self.value_bytes = self._check(self.values, "V") if self.values is not None else 0
        if self.values is not None and self.values[0].shape[0] != self.keys[0].shape[0]:
            raise ValueError(
                f"KvPools: expected as many tokens of V as of K, found {self.values[0].shape[0]} and "
                f"{self.keys[0].shape[0]}"
            )
        self.pages = self.keys[0].shape[0] // page_tokens
        if self.pages == 0:
            raise ValueError(
                f"KvPools: expected a page of {page_tokens} tokens at least, found {self.keys[0].shape[0]} tokens"
            )

    @classmethod
    def of(cls, pool: Any, page_tokens: int | None = None) -> KvPools:
        """Of SGLang's MHATokenToKVPool (`k_buffer`, `v_buffer`) or MLATokenToKVPool (`kv_buffer`), with a row for each
        token. Others, also those derived from them, keep more of a page than that: scales, keys of an indexer.

        Raises:
            NotImplementedError: another kind of pool.
        """
        kind = type(pool).__name__
        if kind not in _POOLS or type(pool).__module__ != _POOLS_MODULE:
            raise NotImplementedError(
                f"KvPools: expected SGLang's {' or '.join(_POOLS)}, found {type(pool).__module__}.{kind}, of "
                "which a part might be left behind; other pools are not supported"
            )
        more = [name for name in _MORE if getattr(pool, name, None) not in (None, False)]
        if more:
            raise NotImplementedError(
                f"KvPools: expected a {kind} with K and V alone, in every layer, found {', '.join(more)}; quantized "
                "pools and layers on several ranks are not supported"
            )
        buffers = [pool.k_buffer, pool.v_buffer] if kind == _POOLS[0] else [pool.kv_buffer]
        rows = pool.size + pool.page_size  # the first page is a dummy
        for buffer in (buffer for side in buffers for buffer in side):
            if buffer.dim() != 3 or buffer.shape[0] != rows:
                raise NotImplementedError(
                    f"KvPools: expected [tokens, heads, dim] with a row for each of {rows} tokens, found a buffer of "
                    f"shape {tuple(buffer.shape)}; use SGLang's default layout of KV pools"
                )
        return cls(*buffers, page_tokens=pool.page_size if page_tokens is None else page_tokens)

    @property
    def layers(self) -> int:
        """How many."""
        return len(self.keys)

    def layer(self, layer: int) -> list[torch.Tensor]:
        """What `batch_get` and `batch_put` take as pools: K and V of the layer, or its one buffer."""
        return [self.keys[layer]] if self.values is None else [self.keys[layer], self.values[layer]]

    def layout(self, block_bytes: int = 4096) -> PageLayout:
        """Where the parts of a page lie in its object."""
        return PageLayout(self.layers, self.key_bytes, self.value_bytes, block_bytes)

    def _check(self, buffers: list[torch.Tensor], kind: str) -> int:
        """Bytes of a page."""
        first = buffers[0]
        if first.dim() < 2:
            raise ValueError(f"{kind} of layer 0: expected [tokens, heads, dim], found {tuple(first.shape)}")
        page_bytes = first[0].numel() * first.element_size() * self.page_tokens
        for layer, buffer in enumerate(buffers):
            name = f"{kind} of layer {layer}"
            found = (tuple(buffer.shape), buffer.dtype, buffer.device)
            if found != (tuple(first.shape), first.dtype, self.device):
                raise ValueError(
                    f"{name}: expected {(tuple(first.shape), first.dtype, self.device)} as the first layer's K, found "
                    f"{found}"
                )
            pool_page_count(buffer, page_bytes, name)
            if buffer.data_ptr() % _ALIGNMENT != 0:
                raise ValueError(
                    f"{name}: expected an address that is a multiple of {_ALIGNMENT}, found {buffer.data_ptr():#x}; "
                    "allocate it by itself"
                )
        return page_bytes
