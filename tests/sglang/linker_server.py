# SPDX-License-Identifier: Apache-2.0
"""SGLang's real radix tree with the direct door on CPU tensors, without a model.

As `tree_server.TreeServer`, whose bytes it uses: the KV of a page follows from the weights and all tokens up to its
end, so that a byte of another page, layer or model is noticed wherever it turns up.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_parallel, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang_tardis.sglang.linker import TardisLinker
from tree_server import DEVICE_POISON, DTYPES, TreeServer, _content_digest, device_pool


class Served(NamedTuple):
    """Where the tokens of a prompt came from; `good` is False if a load failed and its part was computed."""

    device: int
    loaded: int
    computed: int
    good: bool


class LinkerServer(TreeServer):
    """One server process with the direct door, as far as its KV cache goes."""

    def __init__(
        self,
        folder,
        model,
        *,
        page_size=16,
        dtype="bf16",
        layers=4,
        heads=2,
        head_dim=64,
        mla=False,
        tokens=2048,
        extra=None,
        overrides=None,
        tp=(0, 1),
        stages=1,
        shard="",
        components=(ComponentType.FULL,),
        params=None,
    ):
        self.page_size, self.mla, self.eagle = page_size, mla, False
        self.weights = _content_digest(model) + shard
        torch_dtype, dtype_flag = DTYPES[dtype]
        rank, ranks = tp
        self._parallel = dict(tp_rank=rank, tp_size=ranks, pp_rank=0, pp_size=stages)
        self._parallel |= dict(attn_tp_rank=rank, attn_tp_size=ranks, moe_tp_size=ranks)
        config = {"path": str(folder), "capacity": "256MiB", "free_space_floor": 0, "dram": "8MiB"} | (extra or {})
        arguments = dict(
            model_path=str(model),
            served_model_name="served",
            device="cpu",
            page_size=page_size,
            kv_cache_dtype=dtype_flag,
        )
        self.server_args = ServerArgs(**arguments | (overrides or {}))
        publish(self.server_args, role="scheduler", ranks=None)
        self.device_pool, self.allocator = device_pool(
            tokens, page_size, torch_dtype, layers=layers, heads=None if mla else heads, head_dim=head_dim
        )
        self.requests = ReqToTokenPool(size=8, max_context_len=tokens, device="cpu", enable_memory_saver=False)
        self.params = CacheInitParams(
            req_to_token_pool=self.requests,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page_size,
            disable=False,
            tree_components=(ComponentType.FULL,),
            **(params or {}),
        )
        self.cache = UnifiedRadixCache(params=self.params)
        self._rids = 0
        with get_parallel().override(**self._parallel):
            self.linker = TardisLinker(
                self.server_args, self.params, components=set(components), extra_config=config, forward_stream=None
            )
        self.cache.init_cache_linker(self.linker)
        self.device_pool.register_layer_transfer_counter(self.cache.linker.layer_done_counter)
        self.poison()

    def poison(self):
        for buffers in self._device_buffers():
            for buffer in buffers:
                buffer.fill_(DEVICE_POISON)

    # ---- what the scheduler does ----

    def request(self, rid=None):
        self._rids += 1
        sampling = SamplingParams(temperature=0, max_new_tokens=1)
        return Req(
            rid=rid or f"request-{self._rids}",
            origin_input_text="",
            origin_input_ids=array("q"),
            sampling_params=sampling,
        )

    def key(self, tokens):
        return RadixKey(array("q", tokens)).page_aligned(self.page_size)

    def match(self, tokens, req):
        """The request's match: (tokens in the tree, tokens that can be loaded)."""
        match = self.cache.match_prefix(MatchPrefixParams(key=self.key(tokens), req=req))
        req.prefix_len, req.last_node = match.device_prefix_len, match.last_device_node
        req.last_host_node, req.best_match_node = match.last_host_node, match.best_match_node
        req.host_hit_length = match.host_hit_length
        return match.device_prefix_len, match.host_hit_length

    def queue(self, tokens, req):
        """Match and queue what can be loaded: (tokens in the tree, their slots, slots to be loaded)."""
        device, hit = self.match(tokens, req)
        slots = self.cache.path_device_indices(req.last_node)[:device] if device else torch.empty(0, dtype=torch.int64)
        loaded = torch.empty(0, dtype=torch.int64)
        if hit:
            params = InitLoadBackParams(best_match_node=req.best_match_node, host_hit_length=hit, req=req)
            count, _ = self.cache.init_load_back(params)
            assert count == hit
            loaded = self.cache.linker.private_load_indices[req.rid]
        return device, slots, loaded

    def forward(self, index):
        """Read every layer as a model does: what wait_until() promises is there behind it."""
        counter = self.cache.linker.layer_done_counter
        counter.set_consumer(index)
        for layer in range(self.device_pool.layer_num):
            self.device_pool.get_key_buffer(layer)
            if not self.mla:
                self.device_pool.get_value_buffer(layer)
        counter.set_consumer(-1)

    def serve(self, tokens, rid=None):
        """Serve one prompt: every byte that was cached or loaded has been compared."""
        tokens = list(tokens)
        req = self.request(rid)
        device, slots, loaded = self.queue(tokens, req)
        good = True
        if len(loaded):
            index = self.cache.ready_to_load_host_cache()
            assert index >= 0 and self.cache.linker.inflight_load_rids == [req.rid]
            self.forward(index)
            good = self.cache.linker.finish_loads() == []
            if not good:  # as a failed load's slots are freed: nothing of it enters the tree
                self.allocator.free(loaded)
                loaded = torch.empty(0, dtype=torch.int64)
        cached = torch.cat([slots, loaded])
        self.check(cached, tokens)
        key = self.key(tokens)
        fresh = self.allocator.alloc(len(key) - len(cached)) if len(key) > len(cached) else cached[:0]
        assert fresh is not None, "the device pool is full"
        self._fill(fresh, tokens, len(cached), None, None)
        self.cache.insert(InsertParams(key=key, value=torch.cat([cached, fresh]), prev_prefix_len=device))
        self.settle()
        return Served(device, len(loaded), len(fresh), good)

    def settle(self):
        """Until what was inserted is out of the pool."""
        self.pump(lambda: not self.cache.linker.pending_offloads, "offloads")

    def flush(self):
        """SGLang's /flush_cache."""
        self.cache.reset()
        self.allocator.clear()
        self.poison()

    def forget_dram(self):
        """Empty the DRAM tier alone, and the tree: what follows comes from files."""
        self.linker.drain()
        self.flush()

    def forget_device(self):
        """Empty the tree, as if all of it had been evicted; the DRAM tier stays."""
        self.linker.drain()
        self.pump(lambda: not self.cache.linker.pending_offloads, "offloads")
        self.cache._reset_full()
        self.allocator.clear()
        self.poison()

    def close(self):
        self.linker.close()
