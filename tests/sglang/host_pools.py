# SPDX-License-Identifier: Apache-2.0
"""SGLang's own host pools and storage configuration, in host memory that is not registered with a GPU."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_kv_host_pool
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from tree_server import DTYPES, HOST_POISON


def publish(model, **overrides):
    """Publish server arguments as a scheduler process has them."""
    arguments = dict(model_path=str(model), served_model_name="served", device="cpu", enable_hierarchical_cache=True)
    server_args = ServerArgs(**arguments | overrides)
    set_global_server_args_for_scheduler(server_args)
    return server_args


def device_pool(*, mla=False, dtype="bf16", page_size=16, tokens=512, layers=3, heads=2, head_dim=32, v_head_dim=None):
    common = dict(
        size=tokens,
        page_size=page_size,
        dtype=DTYPES[dtype][0],
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )
    if mla:
        return MLATokenToKVPool(kv_lora_rank=head_dim, qk_rope_head_dim=8, **common)
    return MHATokenToKVPool(head_num=heads, head_dim=head_dim, v_head_dim=v_head_dim, **common)


def host_pool(model, mem_layout="page_first", *, page_size=16, dtype="bf16", **geometry):
    """(host pool, its device pool), the host memory filled with poison."""
    io_backend = "direct" if mem_layout == "page_first_direct" else "kernel"
    publish(
        model,
        page_size=page_size,
        kv_cache_dtype=DTYPES[dtype][1],
        hicache_mem_layout=mem_layout,
        hicache_io_backend=io_backend,
    )
    device = device_pool(page_size=page_size, dtype=dtype, **geometry)
    pool = build_kv_host_pool(kv_pool=device, page_size=page_size)
    assert pool.layout == mem_layout
    pool.pin_memory = False  # as it is: without a GPU nothing is registered, and further tensors cannot be pinned
    for tensor in buffers(pool):
        tensor.fill_(HOST_POISON)
    return pool, device


def buffers(pool):
    """All KV memory of a host pool, as bytes."""
    tensors = pool.kv_buffer if isinstance(pool.kv_buffer, tuple) else (pool.kv_buffer,)
    return [tensor.view(torch.uint8) for tensor in tensors]


def slots(pages, page_size):
    """Token slots of pages, in the given order, as SGLang passes them."""
    first = torch.tensor(pages, dtype=torch.int64)[:, None] * page_size
    return (first + torch.arange(page_size)).reshape(-1)


def storage_config(folder, *, mla=False, metrics=False, **changes):
    """HiCacheStorageConfig of a single rank."""
    extra = {"path": str(folder), "capacity": "64MiB", "free_space_floor": 0} | changes.pop("extra", {})
    values = dict(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=mla,
        enable_storage_metrics=metrics,
        is_page_first_layout=False,
        model_name="served",
        extra_config=extra,
    )
    return HiCacheStorageConfig(**values | changes)
