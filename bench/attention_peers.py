# SPDX-License-Identifier: Apache-2.0
"""Decode attention beside the kernels that SGLang has, on the same pages: times, over KV in HBM and in pinned memory.

tardis             this project's kernel
FlashAttention-3   as SGLang brings it (sgl_kernel.flash_attn); in HBM alone
Triton             SGLang's default decode kernel, with its own choice of splits; over pinned memory it is what reading
                   KV in place costs without a kernel that was made for it (naive zero-copy)

bf16, 32 query heads over 8 KV heads of 128, pages of 64 in random order. A case is a graph of calls, each over pages
of its own, so that none finds anything in L2; medians, GB/s of K and V. The limit of rows in pinned memory is what
plain reads of all SMs get (torch's sum over bytes that lie side by side); in HBM it is FlashAttention-3's rate.
Every system's output is compared with tardis's first, and a difference is a failure (exit status 1). Wants a GPU and
torch; a kernel that cannot be imported is named. Exit status 77 without a GPU.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable

import torch
from attention_errors import flash3_kernel, on_device
from common import Report, add_common_arguments, machine_facts
from sglang_tardis.attention.decode import DecodeAttention, KvPool

PAGE, HEADS, KV_HEADS, DIM = 64, 32, 8, 128
SKIPPED = 77
REPEATS = 7
TOKEN_BYTES = 2 * KV_HEADS * DIM * 2
MOST_DIFFERENCE = 0.02
"""Of outputs whose keys and values are normal: two kernels that round their weights to bf16 are nearer."""
_TRITON_SPLITS = 8  # SGLang's --triton-attention-num-kv-splits


class Case:
    """Calls of one size over pools that are larger than L2.

    Args:
        batch: requests of a call.
        tokens: of each.
        pinned: whether the pools lie in host memory.
        megabytes: of K, and of V.
    """

    def __init__(self, batch: int, tokens: int, pinned: bool, megabytes: int) -> None:
        self.batch, self.tokens, self.pinned = batch, tokens, pinned
        of_request = math.ceil(tokens / PAGE)
        of_call = batch * of_request
        self.calls = max(1, min(16, (megabytes << 20) // (of_call * PAGE * TOKEN_BYTES // 2)))
        pages = self.calls * of_call
        sides = []
        for _ in range(2):
            side = torch.randn(pages * PAGE, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
            if pinned:
                self._kept = [*getattr(self, "_kept", []), side.cpu().pin_memory()]
                side = on_device(self._kept[-1])
            sides.append(side)
        self.pool = KvPool(*sides)
        order = torch.randperm(pages, device="cuda", dtype=torch.int32)
        self.tables = list(order.view(self.calls, batch, of_request).unbind())
        self.lengths = torch.full((batch,), tokens, dtype=torch.int32, device="cuda")
        self.queries = torch.randn(batch, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        self.scale = DIM**-0.5

    @property
    def bytes(self) -> int:
        """Of K and V, of one call."""
        return self.batch * self.tokens * TOKEN_BYTES

    def tardis(self) -> Callable[[int], torch.Tensor]:
        """The kernel of this project."""
        attention = DecodeAttention(
            query_heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=DIM,
            page_tokens=PAGE,
            dtype=torch.bfloat16,
            max_tokens=self.tokens,
        )
        workspace = attention.workspace(self.batch, "cuda")
        out = torch.empty_like(self.queries)
        return lambda call: attention(
            self.queries,
            [self.pool],
            self.tables[call],
            self.lengths,
            workspace=workspace,
            scale=self.scale,
            out=out,
        )

    def flash3(self, kernel: Callable) -> Callable[[int], torch.Tensor]:
        """FlashAttention-3."""
        shape = (-1, PAGE, KV_HEADS, DIM)
        return lambda call: kernel(
            q=self.queries[:, None],
            k_cache=self.pool.keys.view(shape),
            v_cache=self.pool.values.view(shape),
            cache_seqlens=self.lengths,
            page_table=self.tables[call],
            softmax_scale=self.scale,
            causal=True,
        )[:, 0]

    def triton(self, decode: Callable, choose_splits: Callable) -> Callable[[int], torch.Tensor]:
        """SGLang's Triton kernel as its backend calls it: slots of tokens in place of pages."""
        within = torch.arange(PAGE, device="cuda", dtype=torch.int32)
        slots = [
            (table[:, :, None] * PAGE + within).flatten(1)[:, : self.tokens].flatten().contiguous()
            for table in self.tables
        ]
        starts = torch.arange(self.batch + 1, device="cuda", dtype=torch.int32) * self.tokens
        logits = torch.empty(self.batch, HEADS, _TRITON_SPLITS, DIM, device="cuda", dtype=torch.float32)
        sums = torch.empty(self.batch, HEADS, _TRITON_SPLITS, device="cuda", dtype=torch.float32)
        splits = torch.empty(self.batch, device="cuda", dtype=torch.int32)
        cores = torch.cuda.get_device_properties("cuda").multi_processor_count
        choose_splits[(1,)](
            splits, self.lengths, self.batch, 1, HEADS, KV_HEADS, _TRITON_SPLITS, cores, MAX_NUM_SEQ=256
        )
        out = torch.empty_like(self.queries)

        def run(call: int) -> torch.Tensor:
            decode(
                self.queries,
                self.pool.keys,
                self.pool.values,
                out,
                starts,
                slots[call],
                logits,
                sums,
                splits,
                _TRITON_SPLITS,
                self.scale,
                1.0,
                1.0,
            )
            return out

        return run

    def seconds(self, run: Callable[[int], torch.Tensor]) -> float:
        """Of one call, in a graph of all."""
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            run(0)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in range(self.calls):
                run(call)
        return _median_seconds(graph.replay) / self.calls


def _median_seconds(enqueue: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        enqueue()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[1:])


def _triton_kernels() -> tuple[Callable, Callable] | None:
    try:
        from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
        from sglang.kernels.ops.attention.metadata import get_num_kv_splits_triton
    except Exception as reason:
        print(f"no Triton kernel of SGLang 0.5.23 here: {reason}", file=sys.stderr)
        return None
    return decode_attention_fwd, get_num_kv_splits_triton


def link_rate(megabytes: int) -> float:
    """Bytes a second that a plain kernel of all SMs reads of pinned memory."""
    pinned = torch.zeros(megabytes << 17, dtype=torch.float64).pin_memory()
    mapped = on_device(pinned)
    return (megabytes << 20) / _median_seconds(mapped.sum)


def measure(report: Report, case: Case, flash: Callable | None, triton: tuple | None, link: float) -> int:
    """Rows of one case; returns the failures."""
    systems: list[tuple[str, Callable[[int], torch.Tensor]]] = [("tardis", case.tardis())]
    if flash is not None and not case.pinned:
        systems.insert(0, ("FlashAttention-3", case.flash3(flash)))
    if triton is not None:
        systems.append(("Triton", case.triton(*triton)))
    expected = case.tardis()(0).float().clone()
    failures, limit = 0, link if case.pinned else None
    for name, run in systems:
        difference = (run(0).float() - expected).abs().max().item()
        good = difference <= MOST_DIFFERENCE
        failures += not good
        seconds = case.seconds(run)
        rate = case.bytes / seconds / 1e9
        if name == "FlashAttention-3":
            limit = rate
        report.add(
            f"KV in {'pinned memory' if case.pinned else 'HBM'}",
            name,
            f"batch {case.batch}, {case.tokens} tokens",
            rate,
            "GB/s",
            limit,
            us=round(seconds * 1e6, 2),
            calls=case.calls,
            difference=difference,
            good=good,
        )
    return failures


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing was measured")
        return SKIPPED
    report = Report(arguments.json, machine_facts())
    flash, triton, failures = flash3_kernel(), _triton_kernels(), 0
    megabytes = 256 if arguments.quick else 512
    link = link_rate(megabytes) / 1e9
    report.add("limit", "plain reads of all SMs", f"{megabytes} MiB of pinned memory", link, "GB/s")
    quick = ((1, 8192), (1, 32768), (16, 8192))
    whole = (*quick, (1, 1024), (1, 131072), (4, 8192), (16, 1024), (64, 1024))
    for batch, tokens in quick if arguments.quick else whole:
        for pinned in (False, True):
            failures += measure(report, Case(batch, tokens, pinned, megabytes), flash, triton, link)
    report.note(failures=failures, missing=[name for name, it in (("flash3", flash), ("triton", triton)) if it is None])
    print(f"{failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
