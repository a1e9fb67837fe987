# SPDX-License-Identifier: Apache-2.0
"""Which of SGLang's host pools tardis stores, and their geometry."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["HostPoolShape", "UnsupportedPoolError", "anchor_pool", "inspect_pool"]

# Exact classes: a subclass keeps bytes elsewhere (scales, indexes, head groups), which would be lost without a word.
_MHA_CLASSES = ("MHATokenToKVPoolHost", "AsymmetricMHATokenToKVPoolHost")
_MLA_CLASSES = ("MLATokenToKVPoolHost",)


class UnsupportedPoolError(NotImplementedError):
    """A host pool of a kind that this release does not store."""


class HostPoolShape(msgspec.Struct, frozen=True, kw_only=True):
    """Geometry of a host pool.

    Attributes:
        is_mla: multi-head latent attention: one latent row a token instead of K and V.
        layers: layers in the pool, packed draft layers included.
        draft_layers: how many of them belong to a draft model.
        start_layer: first layer of this pipeline stage.
        kv_heads: KV heads of this rank; 1 for MLA.
        head_dim: elements of a key head, or of the latent row.
        v_head_dim: elements of a value head; 0 for MLA.
        page_tokens: tokens of a page as the radix tree counts them.
        bytes_per_token: bytes that the pool itself says a token takes.
    """

    is_mla: bool
    layers: int
    draft_layers: int
    start_layer: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    page_tokens: int
    bytes_per_token: int


def inspect_pool(pool: Any, name: str = "kv") -> HostPoolShape:
    """The geometry of a host pool, or UnsupportedPoolError naming what is not stored and why."""
    kind = type(pool).__name__
    if str(name) != "kv":
        raise UnsupportedPoolError(
            f"The host pool {str(name)!r} ({kind}) is not stored by this release of tardis, and restoring a prefix "
            "without it would give wrong results. Models that need it (sliding windows, state-space layers, "
            "sparse-attention indexes, separate draft KV) cannot be used with --hicache-storage-backend tardis yet."
        )
    if kind not in _MHA_CLASSES + _MLA_CLASSES:
        raise UnsupportedPoolError(
            f"Host pools of class {kind} are not stored by this release of tardis; it stores "
            f"{', '.join(_MHA_CLASSES + _MLA_CLASSES)}. Use another storage backend for this model or KV cache type."
        )
    if getattr(pool, "kv_buffer", None) is None:
        raise UnsupportedPoolError(
            f"The host pool ({kind}) has no memory of its own in this process; nothing can be stored. (SGLang keeps "
            "the host pages of MLA on one rank only if it is started without this backend; give "
            "--hicache-storage-backend tardis at start instead of attaching it later.)"
        )
    if getattr(pool, "_layer_shard_enabled", False) or getattr(pool, "head_group_num", 1) != 1:
        raise UnsupportedPoolError(
            "Host pools that are sharded by layer or by head group are not stored by this release."
        )
    is_mla = kind in _MLA_CLASSES
    layers = int(pool.layer_num)
    if is_mla:
        heads, head_dim, v_head_dim = 1, int(pool.kv_cache_dim), 0
    else:
        heads, head_dim = int(pool.head_num), int(pool.head_dim)
        v_head_dim = int(getattr(pool, "v_head_dim", head_dim))
    return HostPoolShape(
        is_mla=is_mla,
        layers=layers,
        draft_layers=layers - int(getattr(pool, "target_layer_num", layers)),
        start_layer=int(getattr(pool, "start_layer", 0) or 0),
        kv_heads=heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        page_tokens=int(getattr(pool, "logical_page_size", pool.page_size)),
        bytes_per_token=int(pool.size_per_token),
    )


def anchor_pool(pool: Any) -> Any:
    """The target model's KV pool of a pool group, or the pool itself."""
    entry = getattr(pool, "anchor_entry", None)
    return pool if entry is None else entry.host_pool
