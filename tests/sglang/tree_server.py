# SPDX-License-Identifier: Apache-2.0
"""SGLang's real radix tree, cache controller, host pools and storage threads on CPU tensors, without a model.

:class:`TreeServer` does what the scheduler does with a prompt (match, fetch from storage, match again, load back,
compute the rest, insert) and plays the model itself: the KV of a page is a fixed function of the weights and of
everything the page may depend on (adapter, salt, all tokens up to its end). So every cached byte can be compared with
what a recompute would give, and a page of another model, prompt or adapter is noticed at its first byte. Memory is
filled with a poison pattern before anything is loaded into it.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import time
from array import array
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
from sglang.srt.server_args import ServerArgs

HOST_POISON, DEVICE_POISON = 0xA5, 0x5A

DTYPES = {
    "bf16": (torch.bfloat16, "auto"),
    "fp8_e4m3": (torch.float8_e4m3fn, "fp8_e4m3"),
    "fp8_e5m2": (torch.float8_e5m2, "fp8_e5m2"),
}


class Split(NamedTuple):
    """Where the cached tokens of a prompt came from, and how many were computed."""

    device: int
    host: int
    storage: int
    computed: int


def device_pool(tokens, page_size, dtype, *, layers, heads, head_dim):
    """SGLang's KV pool on the CPU and its allocator; `heads` None: MLA."""
    common = dict(
        size=tokens, page_size=page_size, dtype=dtype, layer_num=layers, device="cpu", enable_memory_saver=False
    )
    if heads is None:
        pool = MLATokenToKVPool(kv_lora_rank=head_dim, qk_rope_head_dim=16, **common)
    else:
        pool = MHATokenToKVPool(head_num=heads, head_dim=head_dim, **common)
    allocator = PagedTokenToKVPoolAllocator(
        size=tokens, page_size=page_size, dtype=dtype, device="cpu", kvcache=pool, need_sort=False
    )
    return pool, allocator


class TreeServer:
    """One server process, as far as its KV cache goes.

    Args:
        folder: folder of the store; None for a server without storage.
        model: folder of a checkpoint (see :func:`write_checkpoint`); its content decides the KV.
        dtype: a key of DTYPES.
        mem_layout, io_backend: SGLang's ``--hicache-mem-layout`` and ``--hicache-io-backend``.
        core: implementation of the tree, "python" or "rust".
        extra: further keys of the extra config.
        overrides: further server arguments.
        tp: rank and size of tensor parallelism; with several ranks, torch.distributed's world.
        shard: what tells this rank's KV from that of the others.
    """

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
        mem_layout="page_first",
        io_backend="kernel",
        core="python",
        eagle=False,
        tokens=2048,
        extra=None,
        overrides=None,
        backend="tardis",
        served_name="served",
        prefetch_policy="wait_complete",
        tp=(0, 1),
        shard="",
    ):
        self.folder, self.page_size, self.eagle = folder, page_size, eagle
        self.weights = _content_digest(model) + shard
        self.mla = mla
        torch_dtype, dtype_flag = DTYPES[dtype]
        self._stack = ExitStack()
        self._requests = 0
        rank, ranks = tp
        if ranks == 1:
            self._stack.enter_context(get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1))
        config = {"path": str(folder), "prefetch_threshold": 1, "capacity": "256MiB", "free_space_floor": 0}
        config |= extra or {}
        self.config = config
        arguments = dict(
            model_path=str(model),
            served_model_name=served_name,
            device="cpu",
            page_size=page_size,
            kv_cache_dtype=dtype_flag,
            enable_hierarchical_cache=True,
            hicache_io_backend=io_backend,
            hicache_mem_layout=mem_layout,
            hicache_write_policy="write_through",
            hicache_storage_prefetch_policy=prefetch_policy,
        )
        if folder is not None:
            arguments |= dict(hicache_storage_backend=backend, hicache_storage_backend_extra_config=json.dumps(config))
        arguments |= overrides or {}
        server_args = ServerArgs(**arguments, tp_size=ranks)
        publish(
            server_args,
            role="scheduler",
            ranks=SpawnRanks(world_rank=rank, gpu_id=0, dp_rank=None) if ranks > 1 else None,
        )
        self.device_pool, self.allocator = device_pool(
            tokens, page_size, torch_dtype, layers=layers, heads=None if mla else heads, head_dim=head_dim
        )
        requests = ReqToTokenPool(size=8, max_context_len=tokens, device="cpu", enable_memory_saver=False)
        params = CacheInitParams(
            req_to_token_pool=requests,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page_size,
            disable=False,
            tp_cache_group=torch.distributed.group.WORLD if ranks > 1 else None,
            tree_components=(ComponentType.FULL,),
            is_eagle=eagle,
            tree_core_backend=core,
        )
        self.cache = UnifiedRadixCache(params=params)
        try:
            self.cache.init_hicache(server_args, params)
        except BaseException:
            self._stack.close()
            raise
        atexit.unregister(self.cache.shutdown)
        self.cache.load_back_threshold = 0
        self.controller = self.cache.cache_controller
        self.host_pool = self.controller.mem_pool_host.anchor_entry.host_pool
        self.poison()

    # ---- memory ----

    def _device_buffers(self):
        """Per layer, the device buffers as (slots, bytes of a row)."""
        pool = self.device_pool
        streams = [pool.kv_buffer] if self.mla else [pool.k_buffer, pool.v_buffer]
        for layer in zip(*streams, strict=True):
            yield [buffer.view(torch.uint8).view(buffer.shape[0], -1) for buffer in layer]

    def poison(self):
        """Overwrite all device and host KV memory; only for an empty cache."""
        for buffers in self._device_buffers():
            for buffer in buffers:
                buffer.fill_(DEVICE_POISON)
        self.host_pool.kv_buffer.view(torch.uint8).fill_(HOST_POISON)

    def page_content(self, tokens, end, extra_key=None, salt=None):
        """KV of the page that ends before token `end`: [layer][stream] -> (page_size, bytes of a row)."""
        seen = tokens[: end + (1 if self.eagle else 0)]
        seed = hashlib.sha256(repr((self.weights, extra_key, salt, list(seen))).encode()).digest()
        random = np.random.default_rng(np.frombuffer(seed, np.uint64))
        return [
            [torch.from_numpy(random.integers(0, 256, (self.page_size, buffer.shape[1]), np.uint8)) for buffer in layer]
            for layer in self._device_buffers()
        ]

    def _fill(self, slots, tokens, begin, extra_key, salt):
        for start in range(begin, begin + len(slots), self.page_size):
            content = self.page_content(tokens, start + self.page_size, extra_key, salt)
            rows = slots[start - begin : start - begin + self.page_size]
            for layer, buffers in enumerate(self._device_buffers()):
                for stream, buffer in enumerate(buffers):
                    buffer[rows] = content[layer][stream]

    def check(self, slots, tokens, extra_key=None, salt=None):
        """Compare cached KV, byte for byte, with what computing it would give."""
        for start in range(0, len(slots), self.page_size):
            content = self.page_content(tokens, start + self.page_size, extra_key, salt)
            rows = slots[start : start + self.page_size]
            for layer, buffers in enumerate(self._device_buffers()):
                for stream, buffer in enumerate(buffers):
                    if not torch.equal(buffer[rows], content[layer][stream]):
                        raise AssertionError(f"foreign bytes: page at token {start}, layer {layer}, stream {stream}")

    # ---- what the scheduler does ----

    def _key(self, tokens, extra_key, salt):
        key = RadixKey(array("q", tokens), extra_key=extra_key, cache_salt=salt, is_bigram=self.eagle)
        return key.page_aligned(self.page_size)

    def _match(self, tokens, extra_key, salt):
        return self.cache.match_prefix(MatchPrefixParams(key=self._key(tokens, extra_key, salt)))

    def pump(self, done, what, timeout=30.0):
        """Run the scheduler's event rounds until done() holds."""
        deadline = time.monotonic() + timeout
        while True:
            self.cache.check_hicache_events()
            if done():
                return
            if time.monotonic() > deadline:
                raise AssertionError(f"{what} did not finish")
            time.sleep(0.002)

    def settle(self):
        """Wait until everything inserted has been handed to storage and acknowledged."""
        self.pump(lambda: not self.cache.ongoing_write_through and not self.cache.ongoing_backup, "write-through")

    def fetch(self, tokens, extra_key=None, salt=None):
        """The storage step of a request's arrival. Returns (device, host, storage) tokens that are cached now."""
        cache = self.cache
        match = self._match(tokens, extra_key, salt)
        device, host = match.device_prefix_len, match.host_hit_length
        storage = 0
        node = match.last_host_node
        if cache.enable_storage and (cache.is_backuped(node) or cache.is_root(node)):
            self._requests += 1
            handle = CacheRequestHandle(f"request-{self._requests}", 0)
            prefix_keys = cache.get_prefix_hash_values(node) if cache.hicache_storage_pass_prefix_keys else None
            matched = device + host
            cache.prefetch_from_storage(
                handle,
                node,
                array("q", tokens[matched:]),
                cache.get_last_hash_value(node),
                prefix_keys,
                matched_prefix_tokens=list(tokens[:matched]),
                extra_key=extra_key,
                cache_salt=salt,
            )
            self.pump(lambda: cache.check_prefetch_progress(handle), "prefetch")
            storage = cache.pop_prefetch_loaded_tokens(handle)
        return device, host, storage

    def prefill(self, tokens, extra_key=None, salt=None):
        """Serve one prompt: returns its Split; every cached byte has been compared."""
        tokens = list(tokens)
        cache = self.cache
        device, host, storage = self.fetch(tokens, extra_key, salt)
        match = self._match(tokens, extra_key, salt)
        cached = match.device_prefix_len
        if match.host_hit_length:
            assert cache.load_back(match.last_host_node, req=None)
            assert cache.ready_to_load_host_cache() != -1
            self.pump(lambda: not cache.ongoing_load_back, "load back")
            again = self._match(tokens, extra_key, salt)
            assert again.device_prefix_len == cached + match.host_hit_length
            match, cached = again, again.device_prefix_len
        slots = (
            cache.path_device_indices(match.last_device_node)[:cached] if cached else torch.empty(0, dtype=torch.int64)
        )
        self.check(slots, tokens, extra_key, salt)
        assert cached == device + host + storage, (cached, device, host, storage)

        key = self._key(tokens, extra_key, salt)
        fresh = self.allocator.alloc(len(key) - cached) if len(key) > cached else torch.empty(0, dtype=torch.int64)
        assert fresh is not None, "the device pool is full"
        self._fill(fresh, tokens, cached, extra_key, salt)
        cache.insert(InsertParams(key=key, value=torch.cat([slots, fresh]), prev_prefix_len=cached))
        self.settle()
        return Split(device, host, storage, len(key) - cached)

    def flush(self):
        """SGLang's /flush_cache: device and host tiers emptied, storage kept."""
        self.cache.reset()
        self.allocator.clear()
        self.poison()

    @property
    def storage(self):
        """The attached TardisStorage (behind the fault injector, if that is on)."""
        backend = self.controller.storage_backend
        return getattr(backend, "_backend", backend)

    def attach(self, backend="tardis", **extra):
        return self.cache.attach_storage_backend(backend, json.dumps(self.config | extra), served_model_name="served")

    def close(self):
        """An orderly shutdown."""
        if self.cache.enable_storage:
            ok, message = self.cache.detach_storage_backend()
            assert ok, message
        self.cache.release_host_resources()
        self._stack.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()


def write_checkpoint(folder, seed=0, **config):
    """A small checkpoint: config.json and one safetensors file with random tensors of that seed."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    values = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 4} | config
    (folder / "config.json").write_text(json.dumps(values))
    random = np.random.default_rng(seed)
    tensors = {f"layers.{i}.weight": random.standard_normal((16, 16)).astype(np.float32) for i in range(4)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def _content_digest(folder):
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def prompt(seed, pages, page_size=16, extra=0):
    """A prompt of whole pages (and `extra` more tokens) from a seed."""
    random = np.random.default_rng(seed)
    return random.integers(3, 30000, pages * page_size + extra).tolist()
