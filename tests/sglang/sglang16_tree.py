# SPDX-License-Identifier: Apache-2.0
"""SGLang 0.5.16's own tree and controller, as its scheduler uses them, for the checks beside this file."""

from __future__ import annotations

import hashlib
import inspect
import json
import time
from array import array

import numpy as np
import torch

PAGE = 16


def tokens(seed, pages):
    """A prompt of whole pages."""
    return np.random.default_rng(seed).integers(3, 1000, pages * PAGE).tolist()


class Server:
    """0.5.16's HiRadixCache and HiCacheController on CPU tensors."""

    def __init__(
        self,
        store,
        model,
        mla=False,
        layout="page_first",
        io="kernel",
        tp=(0, 1),
        metrics=False,
        backend="tardis",
        extra=None,
        **overrides,
    ):
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
        from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

        config = {"path": str(store), "capacity": "64MiB", "free_space_floor": 0, "prefetch_threshold": 1}
        config |= extra or {}
        self.shard = "" if mla else f"shard {tp}" * (tp[1] > 1)
        args = object.__new__(ServerArgs)  # its checks ask for a GPU; only the values matter here
        for name, parameter in inspect.signature(ServerArgs).parameters.items():
            default = parameter.default
            setattr(args, name, None if default is inspect.Parameter.empty or "factory" in repr(default) else default)
        values = dict(
            model_path=str(model),
            served_model_name="served",
            device="cpu",
            page_size=PAGE,
            kv_cache_dtype="auto",
            enable_hierarchical_cache=True,
            hicache_ratio=2.0,
            hicache_io_backend=io,
            hicache_mem_layout=layout,
            hicache_write_policy="write_through",
            hicache_storage_backend=backend,
            hicache_storage_prefetch_policy="wait_complete",
            hicache_storage_backend_extra_config=json.dumps(config),
            tp_size=tp[1],
        )
        for name, value in (values | overrides).items():
            setattr(args, name, value)
        set_global_server_args_for_scheduler(args)
        common = dict(
            size=1024, page_size=PAGE, dtype=torch.bfloat16, layer_num=3, device="cpu", enable_memory_saver=False
        )
        if mla:
            self.pool = MLATokenToKVPool(kv_lora_rank=32, qk_rope_head_dim=8, **common)
        else:
            self.pool = MHATokenToKVPool(head_num=2, head_dim=32, **common)
        self.allocator = PagedTokenToKVPoolAllocator(
            size=1024, page_size=PAGE, dtype=torch.bfloat16, device="cpu", kvcache=self.pool, need_sort=False
        )
        params = CacheInitParams(
            req_to_token_pool=ReqToTokenPool(size=4, max_context_len=1024, device="cpu", enable_memory_saver=False),
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            disable=False,
            enable_metrics=metrics,
        )
        self.cache = HiRadixCache(params=params, server_args=args)
        self.cache.load_back_threshold = 0
        self.controller = self.cache.cache_controller
        self.count = 0
        self.poison()

    def rows(self):
        pool = self.pool
        for buffer in pool.kv_buffer if hasattr(pool, "kv_buffer") else [*pool.k_buffer, *pool.v_buffer]:
            yield buffer.view(torch.uint8).view(buffer.shape[0], -1)

    def poison(self):
        self.controller.mem_pool_host.kv_buffer.view(torch.uint8).fill_(0xA5)
        for rows in self.rows():
            rows.fill_(0x5A)

    def content(self, tokens, end, extra_key):
        seed = hashlib.sha256(repr((self.shard, extra_key, tokens[:end])).encode()).digest()
        random = np.random.default_rng(np.frombuffer(seed, np.uint64))
        return [torch.from_numpy(random.integers(0, 256, (PAGE, rows.shape[1]), np.uint8)) for rows in self.rows()]

    def pump(self, done):
        deadline = time.monotonic() + 30
        while True:
            self.cache.check_hicache_events()
            if done():
                return
            assert time.monotonic() < deadline, "timed out"
            time.sleep(0.005)

    def match(self, tokens, extra_key):
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return self.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens), extra_key=extra_key)))

    def prefill(self, tokens, extra_key=None):
        """Returns (tokens in the tree, tokens from storage, tokens computed); compares every cached byte."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        cache = self.cache
        match = self.match(tokens, extra_key)
        node, had = match.last_host_node, len(match.device_indices) + match.host_hit_length
        self.count += 1
        request = f"request-{self.count}"
        prefix_keys = node.get_prefix_hash_values(node.parent) if cache.hicache_storage_pass_prefix_keys else None
        cache.prefetch_from_storage(request, node, array("q", tokens[had:]), node.get_last_hash_value(), prefix_keys)
        self.pump(lambda: cache.check_prefetch_progress(request))
        loaded = cache.pop_prefetch_loaded_tokens(request)
        match = self.match(tokens, extra_key)
        slots = match.device_indices
        if match.host_hit_length:
            fresh = cache.load_back(match.last_host_node)
            assert fresh is not None
            cache.ready_to_load_host_cache()
            self.pump(lambda: not cache.ongoing_load_back)
            slots = self.match(tokens, extra_key).device_indices
        cached = len(slots)
        for start in range(0, cached, PAGE):
            for rows, content in zip(self.rows(), self.content(tokens, start + PAGE, extra_key), strict=True):
                assert torch.equal(rows[slots[start : start + PAGE]], content), f"foreign bytes at token {start}"
        if cached < len(tokens):
            new = self.allocator.alloc(len(tokens) - cached)
            for start in range(cached, len(tokens), PAGE):
                for rows, content in zip(self.rows(), self.content(tokens, start + PAGE, extra_key), strict=True):
                    rows[new[start - cached : start - cached + PAGE]] = content
            value = torch.cat([slots, new])
            cache.insert(InsertParams(key=RadixKey(array("q", tokens), extra_key=extra_key), value=value))
            self.pump(lambda: not cache.ongoing_write_through and not cache.ongoing_backup)
        return had, loaded, len(tokens) - cached

    def flush(self):
        self.cache.reset()
        self.allocator.clear()
        self.poison()

    def close(self):
        import atexit

        self.cache.detach_storage_backend()
        atexit.unregister(self.cache.shutdown)
