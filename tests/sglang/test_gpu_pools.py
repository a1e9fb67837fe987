# SPDX-License-Identifier: Apache-2.0
"""SGLang's own KV pools as the torch ops take them."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import (
    MHATokenToKVPool,
    MHATokenToKVPoolFP4,
    MHATokenToKVPoolMXFP8,
    MLATokenToKVPool,
    MLATokenToKVPoolFP4,
    NoOpMHATokenToKVPool,
)
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


MHA, MLA = {"head_num": 2, "head_dim": 64}, {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
OTHERS = {
    "FP4 with scales": lambda: MHATokenToKVPoolFP4(dtype=torch.bfloat16, **MHA, **COMMON),
    "MXFP8 with scales": lambda: MHATokenToKVPoolMXFP8(dtype=torch.float8_e4m3fn, **MHA, **COMMON),
    "MLA in FP4 with scales": lambda: MLATokenToKVPoolFP4(dtype=torch.bfloat16, **MLA, **COMMON),
    "a dummy of one page": lambda: NoOpMHATokenToKVPool(dtype=torch.bfloat16, **MHA, **COMMON),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_pools_of_which_a_part_would_be_left_behind_are_refused(kind):
    with pytest.raises(NotImplementedError, match="expected SGLang's MHATokenToKVPool or MLATokenToKVPool"):
        KvPools.of(OTHERS[kind]())


def test_plain_pools_with_more_than_tokens_are_refused():
    pool = POOLS["MHA"]()
    pool.k_scale_buffer = [torch.zeros(576, 2) for _ in range(2)]
    with pytest.raises(NotImplementedError, match="k_scale_buffer"):
        KvPools.of(pool)
    pool = POOLS["MHA"]()  # rows that are pages
    pool.k_buffer, pool.v_buffer = ([torch.zeros(9, 2, 64, 64) for _ in range(2)] for _ in range(2))
    with pytest.raises(NotImplementedError, match="a row for each of 576 tokens"):
        KvPools.of(pool)
    pool = POOLS["MLA"]()
    pool.layer_shard_enabled = True
    with pytest.raises(NotImplementedError, match="layer_shard_enabled"):
        KvPools.of(pool)
