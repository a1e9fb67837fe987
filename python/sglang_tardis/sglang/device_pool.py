# SPDX-License-Identifier: Apache-2.0
"""The device pool of the direct door: what of it is supported, and who shares its pages.

Its pages are the same objects as those of the host door with `page_first_direct`: `[layer][K,V][token][head][dim]`, in
the same namespaces.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from sglang_tardis.bridge.pieces import LAYER_MAJOR, PieceLayout
from sglang_tardis.kv_pools import KvPools, PageLayout
from sglang_tardis.sglang.host_pool import HostPoolShape
from sglang_tardis.sglang.server_settings import ServerSettings

__all__ = ["dram_bytes", "host_shape", "page_layout", "piece_layout", "refuse_unsupported_server", "storage_config"]

_HOST_LAYOUT = "page_first_direct"
_WITHOUT_DRAFT = ("", "NONE", "NGRAM")  # of speculative algorithms: those that keep no KV of their own


def refuse_unsupported_server(settings: ServerSettings, params: Any, components: Any, pool: Any) -> None:
    """Raise NotImplementedError for what would be restored in part only, by name. The same on every rank.

    Args:
        settings: SGLang's.
        params: CacheInitParams.
        components: of the tree, ComponentType each.
        pool: the device pool.
    """
    others = sorted(getattr(part, "name", str(part)) for part in components if getattr(part, "name", "") != "FULL")
    if others:
        raise NotImplementedError(
            "tardis, direct mode: expected a model with full attention in every layer, found one with "
            f"{', '.join(others)}; its states are not stored by this release"
        )
    drafts = ("mtp_draft_device_pools", "sidecar_draft_device_pools", "mtp_draft_mamba_pools")
    algorithm = str(settings.get("speculative_algorithm", "") or "").upper()
    if any(getattr(params, name, ()) for name in drafts) or algorithm not in _WITHOUT_DRAFT:
        raise NotImplementedError(
            "tardis, direct mode: expected no draft model with KV of its own, found --speculative-algorithm "
            f"{algorithm}; use the host door"
        )
    stages = int(settings.get("pp_size", 1) or 1)
    if stages > 1:  # SGLang has the ranks of a stage agree on what is loaded, and no stage with another
        raise NotImplementedError(
            f"tardis, direct mode: expected one pipeline stage, found --pp-size {stages}; use the host door"
        )
    mode = str(settings.get("disaggregation_mode", "null") or "null")
    if mode != "null":
        raise NotImplementedError(
            "tardis, direct mode: expected a server that prefills and decodes, found --disaggregation-mode "
            f"{mode}; use the host door"
        )
    if int(params.page_size) != int(pool.page_size):
        raise NotImplementedError(
            f"tardis, direct mode: expected a tree with pages as the KV pool has them, {pool.page_size} tokens, found "
            f"{params.page_size}; pages that are shared between ranks are not supported"
        )


def page_layout(pools: KvPools) -> PageLayout:
    """Where the parts of a page lie in its object, in the largest blocks that divide them.

    Raises:
        NotImplementedError: parts that are no whole blocks.
    """
    part = pools.key_bytes + pools.value_bytes
    for block in (4096, 512):
        if part % block == 0:
            return pools.layout(block)
    raise NotImplementedError(
        "tardis, direct mode: expected K and V of a page in a layer to be whole blocks of 512 bytes, found "
        f"{part} bytes; use a --page-size that is a multiple of {512 // math.gcd(part // pools.page_tokens, 512)}"
    )


def piece_layout(layout: PageLayout) -> PieceLayout:
    """The same as the store has it."""
    regions = (layout.key_bytes, layout.value_bytes) if layout.value_bytes else (layout.key_bytes,)
    return PieceLayout(LAYER_MAJOR, layout.layers, regions)


def host_shape(pool: Any, page_tokens: int, layout: PageLayout) -> HostPoolShape:
    """Geometry of the host pool that SGLang would make for a device pool that `KvPools.of` takes."""
    mla = layout.value_bytes == 0
    return HostPoolShape(
        is_mla=mla,
        layers=layout.layers,
        draft_layers=0,
        start_layer=int(getattr(pool, "start_layer", 0) or 0),
        kv_heads=1 if mla else int(pool.head_num),
        head_dim=int(pool.kv_cache_dim) if mla else int(pool.head_dim),
        v_head_dim=0 if mla else int(pool.v_head_dim),
        page_tokens=page_tokens,
        bytes_per_token=layout.object_bytes // page_tokens,
    )


def storage_config(pool: Any, params: Any, settings: ServerSettings, extra_config: dict[str, Any]) -> Any:
    """HiCacheStorageConfig, made by SGLang's own cache controller, which a server with this door does not build."""
    from sglang.srt.managers.cache_controller import HiCacheController

    group = params.attn_cp_cache_group
    host = SimpleNamespace(layout=_HOST_LAYOUT, storage_format_tag=None)
    controller = SimpleNamespace(
        mem_pool_device=pool,
        mem_pool_host=host,
        storage_host_pool=host,
        attn_cp_group=group,
        enable_storage_metrics=bool(params.enable_metrics),
        page_size=params.page_size,
    )
    controller.get_attn_cp_rank_and_size = lambda: HiCacheController.get_attn_cp_rank_and_size(controller)
    return HiCacheController._generate_storage_config(controller, settings.get("served_model_name"), dict(extra_config))


def dram_bytes(pool_bytes: int, size_gb: Any, ratio: Any) -> int:
    """What SGLang's host pool would take: the size in units of 10^9 bytes, or a multiple of the device pool."""
    size_gb = float(size_gb or 0)
    return int(size_gb * 1e9) if size_gb > 0 else int(pool_bytes * float(ratio or 0))
