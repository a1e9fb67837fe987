# SPDX-License-Identifier: Apache-2.0
"""SGLang's own KV pools as the torch ops take them."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang_tardis.gpu import GioSession, KvPools

COMMON = {"size": 512, "page_size": 64, "layer_num": 2, "device": "cpu", "enable_memory_saver": False}
POOLS = {
    "MHA": lambda: MHATokenToKVPool(dtype=torch.bfloat16, head_num=2, head_dim=64, **COMMON),
    "MLA": lambda: MLATokenToKVPool(dtype=torch.bfloat16, kv_lora_rank=512, qk_rope_head_dim=64, **COMMON),
}


@pytest.mark.parametrize("kind", POOLS)
def test_pages_of_a_pool_come_back(kind):
    pool = POOLS[kind]()
    pools = KvPools.of(pool)
    buffers = [buffer for layer in range(2) for buffer in pools.layer(layer)]
    for buffer in buffers:
        buffer.normal_()
    before = [buffer.clone() for buffer in buffers]
    assert (pools.layers, pools.pages, pools.page_tokens) == (2, 9, 64)  # SGLang's first page is a dummy
    pages, slots, count = (torch.tensor(x, dtype=torch.int32) for x in ([8, 1, 5], [0, 3, 2], [3]))
    with GioSession(pools.layout(), bytes=4 * pools.layout().object_bytes) as session:
        for op in (torch.ops.tardis.batch_put, torch.ops.tardis.batch_get):
            session.flags.zero_()
            for layer in range(2):
                op(session.handle, layer, pools.layer(layer), pages, slots, count, session.flags)
            assert session.flags.tolist() == [1, 1]
            if op is torch.ops.tardis.batch_put:
                for buffer in buffers:
                    buffer.fill_(-3)
    for buffer, old in zip(buffers, before, strict=True):
        wanted = torch.full_like(old, -3)
        for page in (8, 1, 5):
            wanted[64 * page : 64 * page + 64] = old[64 * page : 64 * page + 64]
        assert torch.equal(buffer, wanted)
