# SPDX-License-Identifier: Apache-2.0
"""--attention-backend tardis beside SGLang's code: arguments, refusals, size and place of the pool, captured steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import (
    ForwardContext,
    forward_context,
    get_req_to_token_pool,
    get_token_to_kv_pool,
)
from sglang.srt.models import utils as models
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import prepare_server_args
from sglang_tardis.attention import pool_memory
from sglang_tardis.config import ConfigError
from sglang_tardis.sglang import attention_mode, attention_pool, seams
from sglang_tardis.sglang.attention import TardisAttentionBackend

FLAG = ("--attention-backend", "tardis")


def resolved(model, *words):
    arguments = prepare_server_args(["--model-path", str(model), "--device", "cpu", *words])
    arguments.resolve_once()
    return resolving_view(arguments)


# ---- arguments


def test_prefill_is_not_captured(model):
    for words in (FLAG, ("--attention-backend", "torch_native", "--decode-attention-backend", "tardis")):
        view = resolved(model, *words)
        assert view.disable_prefill_cuda_graph and view.cuda_graph_config.prefill.backend == "disabled"
    assert not resolved(model, "--attention-backend", "torch_native").disable_prefill_cuda_graph


def test_contradictions_are_named(model, monkeypatch):
    with pytest.raises(ValueError, match="found --cuda-graph-backend-prefill full"):
        resolved(model, *FLAG, "--cuda-graph-backend-prefill", "full")
    with pytest.raises(ValueError, match="found --cuda-graph-config, prefill: breakable"):
        resolved(model, *FLAG, "--cuda-graph-config", '{"prefill": {"backend": "breakable"}}')
    resolved(model, *FLAG, "--cuda-graph-config", '{"decode": {"max_bs": 4}}')
    monkeypatch.setenv("TARDIS_CONFIG", '{"attention_host": "much"}')
    with pytest.raises(ConfigError, match="attention_host"):
        resolved(model, *FLAG)
    resolved(model, "--attention-backend", "torch_native")
    monkeypatch.delenv("TARDIS_CONFIG")
    monkeypatch.setattr(attention_mode, "NEEDED_MODULE", "sglang.srt.mem_cache.no_such_module")
    with pytest.raises(ValueError, match=r"came with later releases.*0\.5\.23"):
        resolved(model, *FLAG)


def test_what_flags_decide_is_told_before_weights_are_loaded(model):
    with pytest.raises(NotImplementedError, match="no --enable-memory-saver, found True"):
        resolved(model, *FLAG, "--enable-memory-saver")
    on_gpu = (*FLAG, "--device", "cuda")
    for words in (on_gpu, (*on_gpu, "--page-size", "8")):
        with pytest.raises(NotImplementedError, match=r"found [18]; set --page-size 64"):
            resolved(model, *words)


def test_settings_come_from_whoever_has_them(monkeypatch):
    def host_bytes(**arguments):
        return attention_mode.settings_of(SimpleNamespace(**arguments)).attention_host_bytes

    assert host_bytes() == 0
    monkeypatch.setenv("TARDIS_CONFIG", '{"attention_host": "2GiB"}')
    assert host_bytes() == 2 << 30
    extra = '{"attention_host": 77}'
    assert host_bytes(hicache_storage_backend="tardis", hicache_storage_backend_extra_config=extra) == 77
    assert host_bytes(hicache_storage_backend="file", hicache_storage_backend_extra_config=extra) == 2 << 30
    linker = {"linker_module_path": "sglang_tardis.sglang.linker", "linker_extra_config": {"attention_host": 78}}
    assert host_bytes(unified_cache_external_linker_config=linker) == 78


# ---- refusals


class Settings(dict):
    pass


def configurator(**changes):
    model = SimpleNamespace(hf_config=SimpleNamespace(architectures=["Some"]), is_encoder_decoder=False)
    plain = {
        "model_config": model,
        "use_mla_backend": False,
        "mambaish_config": None,
        "is_hybrid_swa": False,
        "is_draft_worker": False,
        "post_capture_kv_active": False,
        "kv_shard_rank": None,
        "kv_cache_dtype": torch.bfloat16,
        "device": "cuda",
        "page_size": 64,
    }
    return SimpleNamespace(**{**plain, **changes})


REFUSED = [
    ({"use_mla_backend": True}, {}, "found MLA"),
    ({"mambaish_config": object()}, {}, "layers with states"),
    ({"is_hybrid_swa": True}, {}, "--disable-hybrid-swa-memory"),
    ({"is_draft_worker": True}, {}, "no draft model"),
    ({"post_capture_kv_active": True}, {}, "sized after graphs were captured"),
    ({"kv_shard_rank": 0}, {}, "--enable-kv-cache-sharding"),
    ({"kv_cache_dtype": torch.float8_e5m2}, {}, "found float8_e5m2"),
    ({"page_size": 1}, {}, "pages of 16, 32, 64, 128 tokens, found 1"),
    ({"model_config": SimpleNamespace(hf_config=None, is_encoder_decoder=True)}, {}, "an encoder and cross attention"),
    ({}, {"speculative_algorithm": "EAGLE"}, "no --speculative-algorithm, found EAGLE"),
    ({}, {"disaggregation_mode": "decode"}, "no --disaggregation-mode, found decode"),
    ({}, {"enable_memory_saver": True}, "no --enable-memory-saver"),
    ({}, {"attn_cp_size": 2}, "no --attn-cp-size, found 2"),
    ({}, {"cuda_graph_config": {"prefill": {"backend": "full"}}}, "prefill without CUDA graphs, found full"),
    ({}, {"enable_hierarchical_cache": True, "hicache_io_backend": "direct"}, "use --hicache-io-backend kernel"),
]


@pytest.mark.parametrize(("changes", "settings", "message"), REFUSED)
def test_what_would_be_served_wrongly_is_refused_by_name(changes, settings, message):
    with pytest.raises(NotImplementedError, match=message):
        attention_mode.refuse_server(configurator(**changes), Settings(settings))


def test_what_is_supported_is_not_refused():
    plain = Settings(disaggregation_mode="null", dcp_size=1, enable_memory_saver=False)
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        attention_mode.refuse_server(configurator(kv_cache_dtype=dtype), plain)
    attention_mode.refuse_server(configurator(device="cpu", page_size=1), plain)
    attention_mode.refuse_server(
        configurator(), Settings(plain, enable_hierarchical_cache=True, hicache_io_backend="kernel")
    )


# ---- the pool


def test_size_of_the_pool():
    assert attention_pool.budget_bytes(5 << 30, None, 1 << 30, 8) == 5 << 30, "checked when it is allocated"
    assert attention_pool.budget_bytes(5 << 30, 4096, 1 << 30, 1) == 5 << 30
    assert attention_pool.budget_bytes(0, 4096, 1 << 30, 8) >= 1 << 50, "--max-total-tokens decides alone"
    assert attention_pool.budget_bytes(0, None, 100 << 30, 1) == 80 << 30
    with pytest.raises(NotImplementedError, match="for 2 ranks, found none; set attention_host"):
        attention_pool.budget_bytes(0, None, 100 << 30, 2)


def test_pools_of_other_backends_and_on_cpu_are_sglangs(monkeypatch):
    def original(*args):
        return ("original", *args)

    for wanted, device in ((False, "cuda"), (True, "cpu")):
        monkeypatch.setattr(attention_mode, "is_wanted", lambda wanted=wanted: wanted)
        this = SimpleNamespace(device=device)
        assert attention_pool.profiled_bytes(original, this, 3) == ("original", this, 3)
        assert attention_pool.custom_mem_pool(original, device) == ("original", device)
        assert attention_pool.create_buffers(original, this) == ("original", this)


def test_sglang_is_given_a_pool_in_host_memory(monkeypatch):
    monkeypatch.setattr(attention_mode, "is_wanted", lambda: True)
    made = []
    monkeypatch.setattr(pool_memory, "make_pool", lambda **settings: made.append(settings) or "pool")
    monkeypatch.setenv("TARDIS_CONFIG", '{"attention_host_check": false}')
    none = lambda device: (False, None, None)  # noqa: E731
    assert attention_pool.custom_mem_pool(none, device="cuda") == (True, "pool", "TARDIS_HOST")
    assert made == [{"check": False}]
    with pytest.raises(NotImplementedError, match="no other memory pool for KV, found NVLINK"):
        attention_pool.custom_mem_pool(lambda device: (True, object(), "NVLINK"), "cuda:0")


def test_a_pool_that_lies_elsewhere_is_not_served(monkeypatch):
    monkeypatch.setattr(attention_mode, "is_wanted", lambda: True)
    zero = pool_memory.Usage(*[0] * 8)
    monkeypatch.setattr(pool_memory, "usage", lambda: zero)
    monkeypatch.setattr(pool_memory, "_take_error", lambda: "")
    monkeypatch.setattr(pool_memory, "available_bytes", lambda: 1 << 30)
    size = {"size": 7, "page_size": 1, "head_num": 2, "head_dim": 3, "v_head_dim": 1, "layer_num": 5}
    pool = SimpleNamespace(device="cuda", store_dtype=torch.bfloat16, **size)
    with pytest.raises(RuntimeError, match="expected 640 bytes of KV in host memory, found 0"):
        attention_pool.create_buffers(lambda pool: None, pool)
    monkeypatch.setattr(pool_memory, "available_bytes", lambda: 639)
    with pytest.raises(pool_memory.HostMemoryError, match=r"KV of 7 tokens, found .* set a smaller attention_host or"):
        attention_pool.create_buffers(lambda pool: pytest.fail("nothing may be taken"), pool)
    monkeypatch.setenv("TARDIS_CONFIG", '{"attention_host_check": false}')
    with pytest.raises(RuntimeError, match="expected 640 bytes"):
        attention_pool.create_buffers(lambda pool: None, pool)
    pool.size, pool.page_size = 0, 16
    with pytest.raises(ValueError, match=r"a page of 16 tokens, found 0; a page takes 1280 bytes: set a larger att"):
        attention_pool.create_buffers(lambda pool: pytest.fail("nothing may be taken"), pool)


def test_an_error_of_host_memory_speaks_of_host_memory(monkeypatch):
    def fail():
        raise torch.cuda.OutOfMemoryError("Tried to allocate 2 GiB. GPU 0 has ...")

    errors = ["of an earlier one", "expected 2 GiB of host memory, found 1"]
    monkeypatch.setattr(pool_memory, "_take_error", lambda: errors.pop(0))
    with pytest.raises(pool_memory.HostMemoryError, match="expected 2 GiB of host memory"), pool_memory.explained():
        fail()
    errors += ["", ""]
    with pytest.raises(torch.cuda.OutOfMemoryError, match="Tried to allocate"), pool_memory.explained():
        fail()


def test_pools_are_hooked_for_this_backend_only(monkeypatch):
    hooks = seams._attention_hooks()
    assert not any(hook.target in HookRegistry._hooks for hook in hooks)
    (seam,) = [seam for seam in seams.check() if seam.name == "attention"]
    assert seam.ok and all(hook.target in seam.detail for hook in hooks)
    monkeypatch.setattr(seams, "_attention_hooks", lambda: [hooks[0]._replace(path="KVCacheConfigurator.no_such_step")])
    monkeypatch.setattr(seams, "_attention", False)
    with pytest.raises(seams.SeamError, match="no_such_step"):
        seams.install_attention()


def test_bytes_of_a_pool_are_sglangs():
    pool = runner(layer_of()).token_to_kv_pool
    assert attention_pool._bytes_of(pool) == sum(
        buffer.numel() * buffer.element_size() for buffer in (*pool.k_buffer, *pool.v_buffer)
    )


# ---- the backend


PAGE, HEADS, KV_HEADS, DIM = 16, 4, 2, 32


def layer_of(**changes):
    return RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, 0, **changes)


def pool_of(dtype):
    return MHATokenToKVPool(
        size=512,
        page_size=PAGE,
        dtype=dtype,
        head_num=KV_HEADS,
        head_dim=DIM,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
    )


def runner(layer, **changes):
    pool = pool_of(torch.bfloat16)
    table = torch.zeros(9, 100, dtype=torch.int32)
    plain = {
        "token_to_kv_pool": pool,
        "req_to_token_pool": SimpleNamespace(req_to_token=table),
        "page_size": PAGE,
        "device": "cpu",
        "dtype": torch.bfloat16,
        "model": torch.nn.Sequential(layer),
    }
    return SimpleNamespace(**{**plain, **changes})


def fill(this, row, length, rng):
    """A request's tokens in the pool, on pages in any order. Returns its K and V, and the slot of its last token."""
    first = torch.randperm(32, generator=rng)[: -(-length // PAGE)] + 1
    slots = (first[:, None] * PAGE + torch.arange(PAGE)).view(-1)[:length]
    this.req_to_token_pool.req_to_token[row, :length] = slots.int()
    kv = torch.randn(2, length, KV_HEADS, DIM, generator=rng).bfloat16()
    pool = this.token_to_kv_pool
    pool.k_buffer[0][slots], pool.v_buffer[0][slots] = kv[0], kv[1]
    return kv, slots[-1]


def exact(q, kv):
    k, v = (x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in kv)
    weights = torch.softmax(torch.einsum("hd,khd->hk", q.double(), k) * DIM**-0.5, -1)
    return torch.einsum("hk,khd->hd", weights, v).reshape(-1)


@pytest.mark.parametrize("captured", [False, True])
def test_decode_steps_follow_the_batch(captured):
    """One backend, other requests at each step; in a graph, of which only the recorded part runs again."""
    rng, layer = torch.Generator().manual_seed(3), layer_of()
    this = runner(layer)
    backend = TardisAttentionBackend(this)
    padded = 4
    rows, lengths, slots = (torch.zeros(padded, dtype=torch.int64) for _ in range(3))
    lengths.fill_(backend.get_cuda_graph_seq_len_fill_value())
    batch = SimpleNamespace(
        batch_size=padded,
        forward_mode=ForwardMode.DECODE,
        req_pool_indices=rows,
        seq_lens=lengths,
        seq_lens_cpu=None,
        out_cache_loc=slots,
        out_cache_loc_is_physical=True,
    )
    if captured:
        backend.init_cuda_graph_state(8, 8)
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        recorded = backend.forward_metadata
    for step in ([1, 16, 17], [100, 33], [2, 3, 5, 64]):
        kvs = []
        for index, length in enumerate(step):
            rows[index], lengths[index] = index + 2, length
            kv, slots[index] = fill(this, index + 2, length, rng)
            kvs.append(kv)
            pool = this.token_to_kv_pool
            pool.k_buffer[0][slots[index]] = pool.v_buffer[0][slots[index]] = torch.nan  # the step itself writes it
        rows[len(step) :], lengths[len(step) :], slots[len(step) :] = 0, 1, 0
        if captured:
            backend.init_forward_metadata_out_graph(batch)
            backend.init_forward_metadata_in_graph(batch)
            metadata = backend.forward_metadata
            assert metadata.page_table.data_ptr() == recorded.page_table.data_ptr()
            assert metadata.seq_lens.data_ptr() == recorded.seq_lens.data_ptr()
        else:
            backend.init_forward_metadata(batch)
        tokens = backend.forward_metadata.page_table.shape[1] * PAGE
        assert tokens >= this.req_to_token_pool.req_to_token.shape[1], "the kernel wants a place for each token"
        q = torch.randn(padded, HEADS * DIM, generator=rng).bfloat16()
        new = torch.zeros(2, padded, KV_HEADS, DIM, dtype=torch.bfloat16)
        for index, kv in enumerate(kvs):
            new[:, index] = kv[:, -1]
        found = backend.forward_decode(q, new[0], new[1], layer, batch)
        for index, kv in enumerate(kvs):
            expected = exact(q[index].view(HEADS, DIM), kv)
            assert torch.allclose(found[index].double(), expected, atol=2e-2, rtol=0), (step, index)
        assert torch.isfinite(found).all()


def test_models_find_the_pool():
    """Those that write K and V in one kernel with the rotation (Qwen3-MoE and others) ask the backend for it."""
    this = runner(layer_of())
    backend = TardisAttentionBackend(this)
    batch = SimpleNamespace(out_cache_loc=torch.tensor([16]), attn_cp_metadata=None)
    with forward_context(ForwardContext(attn_backend=backend)):
        assert get_token_to_kv_pool() is this.token_to_kv_pool and get_req_to_token_pool() is this.req_to_token_pool
        models.enable_fused_set_kv_buffer(batch)
        argument = models.create_fused_set_kv_buffer_arg(torch.zeros(1, KV_HEADS * DIM), layer_of(), batch)
    assert argument.k_buffer.data_ptr() == this.token_to_kv_pool.k_buffer[0].data_ptr()


def test_scales_do_not_change_what_is_read_again():
    layer = layer_of()
    layer.k_scale, layer.v_scale = torch.tensor(0.5), torch.tensor(0.25)
    layer.k_scale_float, layer.v_scale_float = 0.5, 0.25
    this = runner(layer)
    this.token_to_kv_pool = pool_of(torch.float8_e4m3fn)
    backend = TardisAttentionBackend(this)
    this.req_to_token_pool.req_to_token[1, :3] = torch.tensor([16, 17, 18], dtype=torch.int32)
    k, v = torch.ones(3, KV_HEADS, DIM).bfloat16(), torch.full((3, KV_HEADS, DIM), 3.0).bfloat16()
    batch = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        req_pool_indices=torch.tensor([1]),
        out_cache_loc=torch.tensor([16, 17, 18]),
        out_cache_loc_is_physical=True,
        extend_prefix_lens_cpu=[0],
        extend_seq_lens_cpu=[3],
    )
    out = backend.forward_extend(torch.ones(3, HEADS * DIM).bfloat16(), k, v, layer, batch)
    assert (k == 1).all() and (v == 3).all() and (out == 3).all()
    keys, values = this.token_to_kv_pool.get_kv_buffer(0)
    assert (keys[16:19].float() == 2).all() and (values[16:19].float() == 12).all()
    again = torch.ones(3, HEADS * DIM).bfloat16()
    batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu = [2], [1]
    assert (backend.forward_extend(again[2:], None, None, layer, batch) == 3).all()


def test_prefills_read_the_prefixes_of_their_own_batch():
    """What is made once a step for all layers is that of this step, also where the next one has the same lengths."""
    rng, layer = torch.Generator().manual_seed(5), layer_of()
    this = runner(layer)
    backend = TardisAttentionBackend(this)
    lengths, prefixes = [20, 7, 33], [16, 0, 16]
    for step in range(3):
        rows = [1 + (step + index) % 3 + 3 * (step % 2) for index in range(3)]
        kvs = []
        for row, length in zip(rows, lengths, strict=True):
            kvs.append(fill(this, row, length, rng)[0])
        # Pages may be shared by chance: each request's are read as they are now.
        pool, table = this.token_to_kv_pool, this.req_to_token_pool.req_to_token
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            slots = table[row, :length].long()
            kvs[index] = torch.stack([pool.k_buffer[0][slots], pool.v_buffer[0][slots]])
        new = [kv[:, prefix:] for kv, prefix in zip(kvs, prefixes, strict=True)]
        batch = SimpleNamespace(
            forward_mode=ForwardMode.EXTEND,
            req_pool_indices=torch.tensor(rows),
            extend_prefix_lens_cpu=prefixes,
            extend_seq_lens_cpu=[kv.shape[1] for kv in new],
        )
        k, v = torch.cat(new, 1)
        q = torch.randn(k.shape[0], HEADS * DIM, generator=rng).bfloat16()
        if step == 1:  # a runner may have readied a batch before
            backend.init_forward_metadata(batch)
        found = backend.forward_extend(q, k, v, layer, batch, save_kv_cache=False)
        begin = 0
        for kv, prefix in zip(kvs, prefixes, strict=True):
            for position in range(prefix, kv.shape[1]):
                expected = exact(q[begin].view(HEADS, DIM), kv[:, : position + 1])
                assert torch.allclose(found[begin].double(), expected, atol=2e-2, rtol=0), (step, prefix, position)
                begin += 1


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (layer_of(logit_cap=30.0), "capped logits"),
        (layer_of(is_cross_attention=True), "cross attention"),
        (layer_of(attn_type=AttentionType.ENCODER_ONLY), "attention of type"),
        (layer_of(v_head_dim=16), "K of 32 and V of 16"),
    ],
)
def test_layers_that_it_does_not_know_are_refused(layer, message):
    with pytest.raises(NotImplementedError, match=message):
        TardisAttentionBackend(runner(layer))


def test_other_pools_and_arguments_are_refused():
    layer = layer_of()
    other = MLATokenToKVPool(
        size=512,
        page_size=PAGE,
        dtype=torch.bfloat16,
        kv_lora_rank=64,
        qk_rope_head_dim=32,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
    )
    with pytest.raises(NotImplementedError, match="found MLATokenToKVPool"):
        TardisAttentionBackend(runner(layer, token_to_kv_pool=other))
    backend = TardisAttentionBackend(runner(layer))
    q = torch.zeros(1, HEADS * DIM).bfloat16()
    with pytest.raises(NotImplementedError, match="found sinks"):
        backend.forward_decode(q, None, None, layer, SimpleNamespace(), sinks=torch.zeros(HEADS))
    verify = SimpleNamespace(forward_mode=ForwardMode.TARGET_VERIFY, extend_seq_lens_cpu=[1])
    with pytest.raises(NotImplementedError, match="expected a prefill or a decode step"):
        backend.forward_extend(q, None, None, layer, verify)
