# SPDX-License-Identifier: Apache-2.0
"""SGLang's attention backend ``tardis``: KV of running requests is read where it lies, in host memory.

Decode is one kernel over the pool (attention_decode.py). Extend gathers a
bounded piece of a prefix at a time (sglang_tardis.attention.extend): right, and not meant to be fast. New K and V are
written by SGLang's own pool, whose buffers kernels reach like any others.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool

from sglang_tardis.attention.extend import Together, extend
from sglang_tardis.sglang import seams
from sglang_tardis.sglang.attention_decode import Decode, KernelDecode, ReferenceDecode

__all__ = ["TardisAttentionBackend", "create"]


def create(runner: Any) -> TardisAttentionBackend:
    """What SGLang's registry of attention backends calls.

    Raises:
        SeamError: this SGLang was not hooked, so KV would lie in HBM.
        NotImplementedError: the model has layers that this backend does not know.
    """
    seams.require("attention")
    return TardisAttentionBackend(runner)


@dataclasses.dataclass(frozen=True)
class _Metadata:
    """Of a decode step: int32 `[batch, pages]` and int32 `[batch]`, on the device."""

    page_table: torch.Tensor
    seq_lens: torch.Tensor
    workspace: torch.Tensor | None = None


class TardisAttentionBackend(AttentionBackend):
    """Attention over SGLang's MHATokenToKVPool whose buffers lie in host memory (attention_pool.py)."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        # SGLang's models find both here: those that write K and V in one kernel with the rotation ask for the pool.
        self.token_to_kv_pool = self._pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self._req_to_token = runner.req_to_token_pool.req_to_token
        self._page_size = int(runner.page_size)
        self._device = torch.device(runner.device)
        if type(self._pool) is not MHATokenToKVPool or self._pool.kv_cache_layout != "nhd":
            raise NotImplementedError(
                "--attention-backend tardis: expected SGLang's MHATokenToKVPool in its default layout, found "
                f"{type(self._pool).__name__} ({getattr(self._pool, 'kv_cache_layout', 'unknown')})"
            )
        _refuse_layers(runner.model)
        self._decode: Decode
        if self._device.type == "cpu":
            self._decode = ReferenceDecode(self._page_size)
        else:
            self._decode = KernelDecode(
                _layers(runner.model),
                page_tokens=self._page_size,
                dtype=self._pool.dtype,
                query_dtype=runner.dtype,
                max_tokens=self._req_to_token.shape[1],
                device=self._device,
            )
        self.forward_metadata: _Metadata | None = None
        self._static: _Metadata | None = None
        self._together: tuple[Any, Together] | None = None  # a batch, and what was made of it

    # ---- metadata ----

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Of a step outside of graphs."""
        self.forward_metadata = self._together = None
        if not forward_batch.forward_mode.is_decode():
            return
        table = self._page_table(forward_batch.req_pool_indices)
        workspace = self._decode.workspace(table.shape[0], largest=False)
        self.forward_metadata = _Metadata(table, forward_batch.seq_lens.to(torch.int32), workspace)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Buffers that captured kernels read: of the largest batch and the longest context."""
        pages = -(-self._req_to_token.shape[1] // self._page_size)
        self._static = _Metadata(
            torch.zeros((max_bs, pages), dtype=torch.int32, device=self._device),
            torch.zeros(max_bs, dtype=torch.int32, device=self._device),
            self._decode.workspace(max_bs, largest=True),
        )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """What a captured step reads is made within the graph; here it is only named."""
        batch = forward_batch.batch_size
        static, self._together = self._static, None
        self.forward_metadata = _Metadata(static.page_table[:batch], static.seq_lens[:batch], static.workspace)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Captured: the page table and the lengths of the batch that is replayed."""
        metadata = self.forward_metadata
        metadata.page_table.copy_(self._page_table(forward_batch.req_pool_indices))
        metadata.seq_lens.copy_(forward_batch.seq_lens)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of the requests that fill up a captured batch: their one token is SGLang's dummy."""
        return 1

    def _page_table(self, rows: torch.Tensor) -> torch.Tensor:
        """Pages of requests, as many as a context can have, from the slots of their first tokens: pages are runs."""
        firsts = self._req_to_token[:, :: self._page_size]
        return firsts.index_select(0, rows).div_(self._page_size, rounding_mode="floor")

    # ---- steps ----

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """New tokens, behind prefixes that are in the pool. Modes EXTEND and MIXED."""
        _refuse_arguments(kwargs)
        mode = forward_batch.forward_mode
        if not (mode.is_extend_or_draft_extend_or_mixed() and forward_batch.extend_seq_lens_cpu is not None):
            raise NotImplementedError(
                f"--attention-backend tardis: expected a prefill or a decode step, found {mode!r}"
            )
        self._save(k, v, layer, forward_batch, save_kv_cache)
        keys, values = self._pool.get_kv_buffer(layer.layer_id)
        out = q.new_empty((q.shape[0], layer.tp_q_head_num * layer.v_head_dim))
        new = None
        if k is not None and v is not None:
            new = (
                k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
                v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
            )
        prefix_lens = [int(length) for length in forward_batch.extend_prefix_lens_cpu]
        extend_lens = [int(length) for length in forward_batch.extend_seq_lens_cpu]
        extend(
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
            keys,
            values,
            self._req_to_token,
            forward_batch.req_pool_indices,
            prefix_lens,
            extend_lens,
            scale=layer.scaling,
            new=new,
            window=layer.sliding_window_size,
            k_scale=_scale(layer.k_scale_float, layer.k_scale),
            v_scale=_scale(layer.v_scale_float, layer.v_scale),
            together=self._of_batch(forward_batch, prefix_lens, extend_lens),
            out=out.view(-1, layer.tp_q_head_num, layer.v_head_dim),
        )
        return out

    def _of_batch(self, forward_batch: Any, prefix_lens: list[int], extend_lens: list[int]) -> Together | None:
        """Made at the first layer of a step. A single request is better off as it is."""
        if len(extend_lens) < 2:
            return None
        if self._together is None or self._together[0] is not forward_batch:
            rows = forward_batch.req_pool_indices
            self._together = forward_batch, Together.of(self._req_to_token, rows, prefix_lens, extend_lens)
        return self._together[1]

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """One new token of each request."""
        _refuse_arguments(kwargs)
        self._save(k, v, layer, forward_batch, save_kv_cache)
        keys, values = self._pool.get_kv_buffer(layer.layer_id)
        metadata = self.forward_metadata
        out = q.new_empty((q.shape[0], layer.tp_q_head_num * layer.v_head_dim))
        self._decode(
            layer,
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
            keys,
            values,
            metadata.page_table,
            metadata.seq_lens,
            (_scale(layer.k_scale_float, layer.k_scale), _scale(layer.v_scale_float, layer.v_scale)),
            metadata.workspace,
            out.view(-1, layer.tp_q_head_num, layer.v_head_dim),
        )
        return out

    def support_triton(self) -> bool:
        """Whether SGLang may use Triton for its own bookkeeping."""
        return self._device.type != "cpu"

    def _save(self, k: Any, v: Any, layer: RadixAttention, forward_batch: Any, save_kv_cache: bool) -> None:
        if not save_kv_cache or k is None or v is None:
            return
        scales = ()
        if layer.k_scale is not None and self._pool.dtype != k.dtype:
            k, v = k.clone(), v.clone()  # the pool divides them in place, and they are read again
            scales = (layer.k_scale, layer.v_scale)
        self._pool.set_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), k, v, *scales)


def _layers(model: torch.nn.Module) -> list[RadixAttention]:
    return [module for module in model.modules() if isinstance(module, RadixAttention)]


def _refuse_layers(model: torch.nn.Module) -> None:
    for layer in _layers(model):
        found = [
            name
            for name, there in (
                ("cross attention", layer.is_cross_attention),
                (f"attention of type {layer.attn_type}", layer.attn_type != AttentionType.DECODER),
                (f"capped logits ({layer.logit_cap})", layer.logit_cap > 0),
                (f"K of {layer.qk_head_dim} and V of {layer.v_head_dim}", layer.qk_head_dim != layer.v_head_dim),
                ("attention in chunks (iRoPE)", layer.use_irope),
                ("a temperature by length", layer.xai_temperature_len > 0),
            )
            if there
        ]
        if found:
            raise NotImplementedError(
                f"--attention-backend tardis: expected causal attention, found {', '.join(found)} in layer "
                f"{layer.layer_id} of {type(model).__name__}; use another backend"
            )


def _refuse_arguments(kwargs: dict[str, Any]) -> None:
    found = sorted(name for name, value in kwargs.items() if value is not None and value is not False)
    if found:
        raise NotImplementedError(
            f"--attention-backend tardis: expected attention of q, k and v alone, found {', '.join(found)}; use "
            "another backend for this model"
        )


def _scale(known: float | None, tensor: torch.Tensor | None) -> float:
    """What KV of the pool is multiplied by; 1 if the model has no scales."""
    if known is not None:
        return float(known)
    return 1.0 if tensor is None else float(tensor)
