# SPDX-License-Identifier: Apache-2.0
"""Decode attention beside other kernels on the same inputs: error against fp64. Times: attention_peers.py.

Wants a GPU and torch. The others: torch's scaled_dot_product_attention (its FlashAttention kernel, on K and V gathered
from the pages), and FlashAttention-3 as SGLang brings it (sgl_kernel.flash_attn, on the same pages) where that can be
imported. Each case: fresh random inputs, shuffled pages, everything that is not a token of the request NaN.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable

import torch
from common import Report, add_common_arguments, machine_facts
from sglang_tardis.attention.decode import SECOND_POOL, DecodeAttention, KvPool, built_shapes

PAGE = 64
NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}


class Case:
    """One batch over pools in HBM and pinned host memory."""

    def __init__(
        self, dtype: str, dim: int, heads: tuple[int, int], lengths: list[int], size: float, host: bool
    ) -> None:
        self.dtype, self.dim, self.heads, self.size = NAMES[dtype], dim, heads, size
        query_heads, kv_heads = heads
        self.query_dtype = torch.float16 if dtype == "fp16" else torch.bfloat16
        counts = [math.ceil(length / PAGE) for length in lengths]
        total = sum(counts) + 3
        order = torch.randperm(total, device="cuda").int()
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.pages = torch.full((len(lengths), max(counts) + 2), 2**31 - 1, dtype=torch.int32, device="cuda")
        valid, at = [], 0
        for request, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            self.pages[request, :count] = order[at : at + count]
            valid.append(self._slots(request, length))
            at += count
        slots = torch.cat(valid)
        sides = []
        for _ in range(2):
            side = torch.full((total * PAGE, kv_heads, dim), float("nan"), device="cuda", dtype=torch.float32)
            side[slots] = torch.randn(len(slots), kv_heads, dim, device="cuda")
            sides.append(side.to(self.dtype))
        self.pool = KvPool(*sides)
        self.queries = (torch.randn(len(lengths), query_heads, dim, device="cuda") * size).to(self.query_dtype)
        self.pools, self.table = [self.pool], self.pages
        if host:  # every other page from pinned memory
            pinned = [side.cpu().pin_memory() for side in sides]
            self.pinned = pinned
            self.pools = [KvPool(*(on_device(side) for side in pinned)), self.pool]
            second = torch.rand(self.pages.shape, device="cuda") < 0.5
            self.table = torch.where(second & (self.pages < 2**30), self.pages | SECOND_POOL, self.pages)
        self.scale = dim**-0.5
        self.attention = DecodeAttention(
            query_heads=query_heads,
            kv_heads=kv_heads,
            head_dim=dim,
            page_tokens=PAGE,
            dtype=self.dtype,
            max_tokens=max(lengths),
        )
        self.workspace = self.attention.workspace(len(lengths), "cuda")
        self.workspace.fill_(255)

    def _slots(self, request: int, length: int) -> torch.Tensor:
        pages = self.pages[request, : math.ceil(length / PAGE), None].long()
        return (pages * PAGE + torch.arange(PAGE, device="cuda")).flatten()[:length]

    def gathered(self, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a request, `[tokens, kv_heads, dim]`."""
        slots = self._slots(request, int(self.lengths[request]))
        return self.pool.keys.view(torch.uint8)[slots].view(self.dtype), self.pool.values.view(torch.uint8)[slots].view(
            self.dtype
        )

    def reference(self) -> torch.Tensor:
        """fp64, `[batch, query_heads, dim]`."""
        group = self.heads[0] // self.heads[1]
        rows = []
        for request in range(len(self.lengths)):
            keys, values = (side.double().repeat_interleave(group, 1) for side in self.gathered(request))
            logits = torch.einsum("hd,thd->ht", self.queries[request].double(), keys) * self.scale
            rows.append(torch.einsum("ht,thd->hd", logits.softmax(-1), values))
        return torch.stack(rows)

    def tardis(self) -> torch.Tensor:
        """The kernel of this project."""
        return self.attention(
            self.queries, self.pools, self.table, self.lengths, workspace=self.workspace, scale=self.scale
        )

    def torch_flash(self) -> torch.Tensor:
        """FlashAttention of torch, request by request."""
        rows = []
        for request in range(len(self.lengths)):
            group = self.heads[0] // self.heads[1]
            keys, values = (side.repeat_interleave(group, 1).transpose(0, 1)[None] for side in self.gathered(request))
            query = self.queries[request][None, :, None]
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
                out = torch.nn.functional.scaled_dot_product_attention(query, keys, values, scale=self.scale)
            rows.append(out[0, :, 0])
        return torch.stack(rows)

    def flash3(self, flash: Callable) -> torch.Tensor:
        """FlashAttention-3 over the same pages."""
        shape = (-1, PAGE, self.heads[1], self.dim)
        safe = torch.where(self.pages < 2**30, self.pages, 0)
        return flash(
            q=self.queries[:, None],
            k_cache=self.pool.keys.view(shape),
            v_cache=self.pool.values.view(shape),
            cache_seqlens=self.lengths,
            page_table=safe,
            softmax_scale=self.scale,
            causal=True,
        )[:, 0]


def on_device(pinned: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of the GPU: one address space."""

    class View:
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": (pinned.numel() * pinned.element_size(),),
            "typestr": "|u1",
            "data": (pinned.data_ptr(), False),
            "version": 3,
        }

    return torch.as_tensor(View(), device="cuda").view(pinned.dtype).view(pinned.shape)


def flash3_kernel() -> Callable | None:
    """FlashAttention-3 of SGLang's kernels; None, said, where it cannot be imported."""
    try:
        from sgl_kernel.flash_attn import flash_attn_with_kvcache
    except Exception as reason:
        print(f"no FlashAttention-3 here: {reason}", file=sys.stderr)
        return None
    return flash_attn_with_kvcache


def _cases(quick: bool) -> list[tuple]:
    cases = []
    for shape in built_shapes():
        dtype, dim = shape.split(":")
        for size in (1.0, 12.0):
            for lengths in ([1, 64, 65, 700, 4097],) if quick else ([1, 64, 65, 700, 4097], [8192] * 4, [100_003]):
                cases.append((dtype, int(dim), (32, 8), lengths, size))
    return cases


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument(
        "--flash3",
        default="bf16:64,bf16:128,bf16:256,fp16:64,fp16:128,fp16:256",
        help="shapes for which FlashAttention-3 is there: one that was left out of a build ends the process",
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: no CUDA device")
        return 77
    report = Report(arguments.json, machine_facts())
    flash, failures = flash3_kernel(), 0
    for dtype, dim, heads, lengths, size in _cases(arguments.quick):
        case = Case(dtype, dim, heads, lengths, size, host=True)
        expected = case.reference()
        systems: list[tuple[str, Callable[[], torch.Tensor]]] = [("tardis", case.tardis)]
        if dtype != "fp8":
            systems.append(("torch FlashAttention", case.torch_flash))
            if flash is not None and f"{dtype}:{dim}" in arguments.flash3.split(","):
                systems.append(("FlashAttention-3", lambda case=case: case.flash3(flash)))
        errors = {}
        for name, call in systems:
            error = (call().double() - expected).abs()
            errors[name] = error.square().mean().sqrt().item()
            ratio = errors["tardis"] / errors[name] if errors[name] > 0 else float("inf")
            good = math.isfinite(errors[name]) and (name == "tardis" or ratio <= 1.5)
            failures += not good
            report.add(
                f"{dtype}:{dim}, queries of {size}",
                name,
                f"lengths {lengths}",
                errors[name] * 1e6,
                "1e-6 rms",
                max_error=error.max().item(),
                tardis_over_it=ratio,
                good=good,
            )
    print(f"{failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
