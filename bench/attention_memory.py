# SPDX-License-Identifier: Apache-2.0
"""KV pools in host memory on a GPU: checks, and the time of one prefill.

memory     tensors of the pool use no HBM, and host and GPU see each other's writes at the same addresses; what is freed
           is given back, also while a kernel writes there; what cannot be had is refused with its reason
copies     between the pool and pageable memory, pinned memory and HBM, in the order of their stream
extend     attention of ragged batches over a pool in host memory against float64, with poison wherever nobody may
           look; the error in rows of its own, with that of rounding the exact result as limit
decode     the reference likewise
graphs     captured writes to and reads of the pool, replayed
kernel     decode steps of the attention backend, captured once and replayed with other requests, against float64
sglang     SGLang's own MHATokenToKVPool inside of the pool, and the attention backend over it: decode steps that write
           their own tokens, captured and replayed with other requests; extend of many short prompts, and what a layer
           of it takes; if SGLang is installed

A row a part: how many of its checks failed. Exit status 77 without a GPU, 1 if something was wrong.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import torch
from common import Report, add_common_arguments, gpu_query, machine_facts

SKIPPED = 77
GIB = 1 << 30


class Checks:
    """Of a part: what was looked at, and what was wrong."""

    def __init__(self, report: Report, quick: bool) -> None:
        self.report, self.quick = report, quick
        self.done = 0
        self.wrong: list[str] = []

    def expect(self, good: bool, what: str, found: object = "") -> None:
        print(f"{'ok  ' if good else 'WRONG'} {what} {found}".rstrip(), flush=True)
        self.done += 1
        if not good:
            self.wrong.append(f"{what} {found}")

    def error(self, part: str, case: str, size: str, error: float, rounding: float) -> None:
        """A row of the highest error of a result, and of rounding the exact one."""
        self.report.add(part, case, size, error * 1e6, "1e-6", rounding * 1e6 if error and rounding else None)


def host_bytes(tensor: torch.Tensor, count: int, offset: int = 0) -> bytes:
    return ctypes.string_at(tensor.data_ptr() + offset, count)


def hbm_used() -> int:
    """Bytes of this process; of all, where nvidia-smi does not name it."""
    for pid, mebibytes in gpu_query("compute-apps", "pid,used_memory"):
        if pid == str(os.getpid()) and mebibytes.isdigit():
            return int(mebibytes) << 20
    free, total = torch.cuda.mem_get_info()
    return total - free


def huge_share(address: int) -> str:
    """AnonHugePages of the mapping around an address, of its size; from /proc/self/smaps."""
    size = huge = inside = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0] and ":" not in line.split(" ", 1)[0]:
            first, last = (int(x, 16) for x in line.split(" ", 1)[0].split("-"))
            inside = first <= address < last
        elif inside and line.startswith("Size:"):
            size = int(line.split()[1])
        elif inside and line.startswith("AnonHugePages:"):
            huge = int(line.split()[1])
    return f"{huge >> 10} of {size >> 10} MiB"


# ---- memory
def check_memory(checks: Checks, gib: float) -> None:
    from sglang_tardis.attention import pool_memory

    checks.report.note(available_bytes=pool_memory.available_bytes())
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    before = hbm_used()
    rows = int(gib * GIB) // (8 * 128 * 2 * 2)
    pool = pool_memory.make_pool()
    with pool_memory.host_pool(pool):
        kv = torch.zeros((2, rows, 8, 128), dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    size = kv.numel() * 2
    used = pool_memory.usage()
    checks.report.note(usage=repr(used), huge_pages=huge_share(kv.data_ptr()))
    print(used, checks.report.extra["huge_pages"], flush=True)
    checks.expect(kv.is_cuda and size <= used.bytes < size + (4 << 20), "the pool has the tensor", used.bytes - size)
    checks.expect(hbm_used() - before < 64 << 20, "HBM is not used", hbm_used() - before)
    ends = (0, 1 << 20, size // 2 - 64, size - 64)
    checks.expect(all(host_bytes(kv, 64, at) == bytes(64) for at in ends), "zeroed, seen by the host")
    flat = kv.view(-1).view(torch.int16)
    where = torch.randint(0, flat.numel(), (100_000,), device="cuda")
    values = where.to(torch.int16)
    flat[where] = values
    torch.cuda.synchronize()
    chosen = where[:500].tolist()
    wrong = [
        at
        for at in chosen
        if int.from_bytes(host_bytes(kv, 2, 2 * at), "little", signed=True) != int(torch.tensor(at).to(torch.int16))
    ]
    checks.expect(not wrong, "the host sees what kernels wrote", wrong[:3])
    ctypes.memset(kv.data_ptr() + size - 4096, 0x3C, 4096)
    checks.expect(bool((flat[-2048:] == 0x3C3C).all()), "kernels see what the host wrote")
    # As integers: some of these values are NaNs, which are equal to nothing.
    copied = flat[-(1 << 20) :].clone()
    here, there = copied.cpu(), flat[-(1 << 20) :].cpu()
    nans = int(there.view(torch.bfloat16).isnan().sum())
    checks.expect(
        torch.equal(here, there), "copies to HBM and to the host are the same bytes", f"({nans} NaNs in them)"
    )
    checks.expect(there.numpy().tobytes() == host_bytes(kv, 2 << 20, size - (2 << 20)), "and those that the host sees")
    # Freed while a kernel writes there.
    for _ in range(20):
        kv[0].fill_(1)
    del kv, flat, copied
    del pool
    gc.collect()
    torch.cuda.empty_cache()
    checks.expect(pool_memory.usage().bytes == 0, "freed memory is given back", pool_memory.usage())
    checks.expect(pool_memory.usage().kept_bytes == 0, "nothing had to be kept")
    torch.cuda.synchronize()


def check_copies(checks: Checks) -> None:
    """To the driver, some of these are between two host memories: they must keep their place in the stream."""
    from sglang_tardis.attention.pool_memory import host_pool

    count, wait = 16 << 20, 40_000_000  # about 20 ms
    with host_pool() as pool:
        kv = torch.zeros(count, dtype=torch.int16, device="cuda")
    others = {
        "pageable memory": torch.zeros(count, dtype=torch.int16),
        "pinned memory": torch.zeros(count, dtype=torch.int16).pin_memory(),
        "HBM": torch.zeros(count, dtype=torch.int16, device="cuda"),
    }
    value = 0
    for name, other in others.items():
        for non_blocking in (False, True):
            how = f"{name}{', non_blocking' if non_blocking else ''}"
            wrong_out = wrong_in = 0
            for _ in range(1 if checks.quick else 5):
                value += 2
                torch.cuda._sleep(wait)
                kv.fill_(value)
                other.copy_(kv, non_blocking=non_blocking)
                torch.cuda.synchronize()
                wrong_out += int((other != value).sum())
                other.fill_(value + 1)
                torch.cuda.synchronize()
                torch.cuda._sleep(wait)
                kv.fill_(-1)  # the copy comes behind this
                kv.copy_(other, non_blocking=non_blocking)
                seen = kv.clone()
                torch.cuda.synchronize()
                wrong_in += int((seen != value + 1).sum()) + int((kv != value + 1).sum())
            checks.expect(wrong_out == 0, f"copies out of the pool keep their place: to {how}", wrong_out)
            checks.expect(wrong_in == 0, f"copies into the pool keep their place: from {how}", wrong_in)
    del kv, pool
    gc.collect()


def check_refusals(checks: Checks) -> None:
    from sglang_tardis.attention import pool_memory

    for settings, size, parts in (
        ({"most_bytes": 1 << 30}, 2 << 30, ("expected 2.00 GiB", "of the 1.00 GiB", "make the pool smaller")),
        ({}, 1 << 42, ("expected 4096.00 GiB", "available of", "make the pool smaller")),
    ):
        used = hbm_used()
        pool = pool_memory.make_pool(**settings)
        try:
            with pool_memory.host_pool(pool):
                torch.empty(size, dtype=torch.uint8, device="cuda")
            checks.expect(False, f"{settings} {size} is refused")
        except pool_memory.HostMemoryError as error:
            checks.expect(all(part in str(error) for part in parts), "refused with its reason:", error)
        checks.expect(pool_memory.usage().bytes == 0 and hbm_used() - used < 16 << 20, "nothing was left behind")
        del pool
    try:
        with pool_memory.host_pool():
            torch.empty(4 << 20, dtype=torch.uint8, device="cuda")
        checks.expect(True, "after a refusal the next pool works")
    except pool_memory.HostMemoryError as error:
        checks.expect(False, "after a refusal the next pool works", error)
    gc.collect()


# ---- attention
def whole(q, k, v, first, scale, window):
    """In one piece, float64."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    own = torch.arange(first, first + q.shape[0], device=q.device)[:, None]
    seen = torch.arange(k.shape[0], device=q.device)[None]
    hidden = seen > own
    if window >= 0:
        hidden |= seen < own - window
    return torch.einsum("hqk,khd->qhd", torch.softmax(scores.masked_fill(hidden, -torch.inf), -1), v)


def check_extend(checks: Checks) -> None:
    from sglang_tardis.attention.extend import Together, extend
    from sglang_tardis.attention.pool_memory import host_pool

    cases = [
        # dtype, heads, kv_heads, dim, prefixes, extends, window, chunk, loudness
        (torch.bfloat16, 32, 8, 128, [0, 700, 4096, 33, 5000], [300, 1, 257, 0, 64], -1, 1024, 1.0),
        (torch.bfloat16, 32, 8, 128, [0, 700, 4096], [600, 1, 257], 511, 1024, 1.0),
        (torch.float16, 16, 16, 64, [1023, 1024, 1025], [1, 1024, 1025], -1, 1024, 1.0),
        (torch.bfloat16, 16, 1, 256, [2000, 0], [128, 513], -1, 512, 1.0),
        (torch.bfloat16, 8, 8, 128, [3000], [200], -1, 1024, 30.0),
        (torch.float16, 12, 4, 80, [300, 0], [40, 1], -1, 128, 1.0),
        (torch.float8_e4m3fn, 32, 8, 128, [4096, 100], [100, 300], -1, 1024, 1.0),
    ]
    for dtype, heads, kv_heads, dim, prefixes, extends, window, chunk, loudness in cases[:2] if checks.quick else cases:
        fp8 = dtype == torch.float8_e4m3fn
        work = torch.bfloat16 if fp8 else dtype
        tokens = sum(prefixes) + sum(extends)
        slots = 2 * tokens + 64
        k_scale, v_scale = (0.05, 0.04) if fp8 else (1.0, 1.0)
        with host_pool() as pool:
            pools = torch.full((2, slots, kv_heads, dim), torch.nan, dtype=work, device="cuda").to(dtype)
            pools = torch.empty_like(pools).copy_(pools) if fp8 else pools
        table = torch.zeros(len(prefixes) + 3, 8192, dtype=torch.int32, device="cuda")
        rows = torch.randperm(len(prefixes) + 3, device="cuda")[: len(prefixes)]
        free = torch.randperm(slots, device="cuda")
        q = torch.randn(sum(extends), heads, dim, device="cuda", dtype=work) * loudness
        everything, new, exact = [], [], []
        for row, prefix, count in zip(rows.tolist(), prefixes, extends, strict=True):
            mine, free = free[: prefix + count], free[prefix + count :]
            table[row, : prefix + count] = mine.int()
            kv = torch.randn(2, prefix + count, kv_heads, dim, device="cuda", dtype=work)
            if fp8:
                kv = (kv / torch.tensor([k_scale, v_scale], device="cuda", dtype=work).view(2, 1, 1, 1)).to(dtype)
                pools.view(torch.uint8)[:, mine] = kv.view(torch.uint8)
                kv = kv.double() * torch.tensor([k_scale, v_scale], device="cuda").view(2, 1, 1, 1).double()
            else:
                pools[:, mine] = kv
            everything.append(kv)
            new.append(kv[:, prefix:])
        scale, begin = dim**-0.5, 0
        for kv, prefix, count in zip(everything, prefixes, extends, strict=True):
            exact.append(whole(q[begin : begin + count], kv[0], kv[1], prefix, scale, window))
            begin += count
        exact = torch.cat(exact)
        rounding = (exact.to(work).double() - exact).abs().max().item()
        name = f"extend {str(dtype)[6:]} {heads}/{kv_heads}x{dim} window {window} x{loudness}"
        for given, all_at_once in ((False, False),) if fp8 else ((True, False), (True, True), (False, False)):
            out = torch.full_like(q, torch.nan)
            given_kv = tuple(torch.cat([x[i] for x in new]).contiguous() for i in (0, 1)) if given else None
            together = Together.of(table, rows, prefixes, extends, chunk) if all_at_once else None
            found = extend(
                q, pools[0], pools[1], table, rows, prefixes, extends, scale=scale, new=given_kv, window=window,
                k_scale=k_scale, v_scale=v_scale, chunk=chunk, together=together, out=out,
            )  # fmt: skip
            error = (found.double() - exact).abs().max().item()
            how = "new tokens given" + ", together" * all_at_once if given else "all in the pool"
            checks.error("extend", name, how, error, rounding)
            # A flash kernel rounds its weights to the dtype of V: a few roundings of a result near 1.
            limit = 4 * rounding + (8e-3 if work == torch.bfloat16 else 1e-3)
            checks.expect(error <= limit, f"{name}, {how}", f"{error:.2e} ({rounding:.2e})")
        del pools, pool
        gc.collect()


def check_decode(checks: Checks) -> None:
    from sglang_tardis.attention import reference
    from sglang_tardis.attention.pool_memory import host_pool

    lengths, page, dim = [1, 63, 64, 65, 0, 1000], 64, 128
    with host_pool() as pool:
        pools = torch.full((2, 128 * page, 8, dim), torch.nan, dtype=torch.bfloat16, device="cuda")
    table = torch.randperm(128, device="cuda")[:96].view(6, 16).int()
    q = torch.randn(6, 32, dim, dtype=torch.bfloat16, device="cuda")
    exact = torch.zeros(6, 32, dim, dtype=torch.float64, device="cuda")
    for index, length in enumerate(lengths):
        if length:
            slots = (table[index].long()[:, None] * page + torch.arange(page, device="cuda")).view(-1)[:length]
            kv = torch.randn(2, length, 8, dim, dtype=torch.bfloat16, device="cuda")
            pools[:, slots] = kv
            exact[index] = whole(q[index : index + 1], kv[0], kv[1], length - 1, dim**-0.5, -1)[0]
    found = reference.decode(
        q, pools[0], pools[1], table, torch.tensor(lengths, dtype=torch.int32, device="cuda"), page, dim**-0.5
    )
    error = (found.double() - exact).abs().max().item()
    rounding = (exact.bfloat16().double() - exact).abs().max().item()
    checks.error("decode", "the reference", f"lengths {lengths}", error, rounding)
    checks.expect(error < 0.03, "decode, the reference", f"{error:.2e}")
    del pools, pool
    gc.collect()


def check_graphs(checks: Checks) -> None:
    from sglang_tardis.attention.pool_memory import host_pool

    with host_pool() as pool:
        kv = torch.zeros((1 << 14, 8, 128), dtype=torch.bfloat16, device="cuda")
    where = torch.zeros(32, dtype=torch.long, device="cuda")
    rows = torch.zeros(32, 8, 128, dtype=torch.bfloat16, device="cuda")
    seen = torch.zeros_like(rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kv.index_copy_(0, where, rows)
        seen.copy_(kv.index_select(0, where))
    wrong = 0
    for _ in range(5 if checks.quick else 50):
        where.copy_(torch.randperm(1 << 14, device="cuda")[:32])
        rows.normal_()
        graph.replay()
        torch.cuda.synchronize()
        wrong += not torch.equal(seen, rows)
        wrong += host_bytes(kv, 2048, 2048 * int(where[5])) != rows[5].cpu().view(torch.int16).numpy().tobytes()
    checks.expect(wrong == 0, "graphs write and read the pool", wrong)
    del graph, kv, pool
    gc.collect()


def check_kernel(checks: Checks) -> None:
    from sglang_tardis.attention.pool_memory import host_pool
    from sglang_tardis.sglang.attention_decode import KernelDecode, ReferenceDecode

    page, pages, batch, dim = 64, 512, 8, 128
    with host_pool() as pool:
        kv = torch.randn((2, pages * page, 8, dim), dtype=torch.bfloat16, device="cuda")
    for window in (-1, 200):
        layer = SimpleNamespace(
            tp_q_head_num=32, tp_k_head_num=8, qk_head_dim=dim, sliding_window_size=window, scaling=dim**-0.5
        )
        decode = KernelDecode(
            [layer], page_tokens=page, dtype=kv.dtype, query_dtype=kv.dtype, max_tokens=4096, device=kv.device
        )
        table = torch.zeros(batch, 4096 // page, dtype=torch.int32, device="cuda")
        lengths = torch.ones(batch, dtype=torch.int32, device="cuda")
        q = torch.randn(batch, 32, dim, dtype=kv.dtype, device="cuda")
        out, expected = torch.full_like(q, torch.nan), torch.empty_like(q)
        workspace = decode.workspace(batch, largest=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            decode(layer, q, kv[0], kv[1], table, lengths, (1.0, 1.0), workspace, out)
        worst = 0.0
        for _ in range(3 if checks.quick else 20):
            table.copy_(torch.stack([torch.randperm(pages, device="cuda")[: 4096 // page] for _ in range(batch)]))
            lengths.copy_(torch.randint(1, 4097, (batch,), device="cuda"))
            lengths[:2] = torch.tensor([1, 4096], device="cuda")
            q.normal_()
            out.fill_(torch.nan)
            graph.replay()
            ReferenceDecode(page)(layer, q, kv[0], kv[1], table, lengths, (1.0, 1.0), None, expected)
            worst = max(worst, (out.double() - expected.double()).abs().max().item())
        checks.report.add("decode", f"captured, window {window}", "beside the reference", worst * 1e6, "1e-6")
        checks.expect(worst < 0.03, f"captured decode steps over host memory, window {window}", f"{worst:.2e}")
        del graph
    del kv, pool
    gc.collect()


def check_sglang(checks: Checks) -> None:
    try:
        from sglang.srt.mem_cache import memory_pool
    except Exception as error:
        print(f"skipped: SGLang's pool ({type(error).__name__}: {error})", flush=True)
        return
    from sglang_tardis.attention import pool_memory

    pool = pool_memory.make_pool()
    before, original = hbm_used(), memory_pool.maybe_init_custom_mem_pool
    memory_pool.maybe_init_custom_mem_pool = lambda device: (True, pool, "TARDIS_HOST")
    try:
        kv_pool = memory_pool.MHATokenToKVPool(
            size=64 << 10, page_size=64, dtype=torch.bfloat16, head_num=8, head_dim=128, layer_num=4, device="cuda",
            enable_memory_saver=False,
        )  # fmt: skip
    finally:
        memory_pool.maybe_init_custom_mem_pool = original
    size = sum(buffer.numel() * 2 for buffer in (*kv_pool.k_buffer, *kv_pool.v_buffer))
    checks.expect(pool_memory.usage().bytes >= size, "SGLang's KV pool lies in host memory", f"{size / GIB:.2f} GiB")
    checks.expect(hbm_used() - before < 64 << 20, "and not in HBM", hbm_used() - before)

    class Layer:
        layer_id, k_scale, v_scale, is_cross_attention = 2, None, None, False

    where = torch.randperm(64 << 10, device="cuda")[:777] + 1
    k, v = torch.randn(2, 777, 8, 128, dtype=torch.bfloat16, device="cuda")
    kv_pool.set_kv_buffer(Layer, where, k, v)
    keys, values = kv_pool.get_kv_buffer(2)
    checks.expect(torch.equal(keys[where], k) and torch.equal(values[where], v), "set_kv_buffer writes there")
    from sglang_tardis.kv_pools import KvPools

    pools = KvPools.of(kv_pool)
    checks.expect(pools.layers == 4 and pools.device.type == "cuda", "the direct door takes it", pools.pages)
    check_backend(checks, kv_pool)


def check_backend(checks: Checks, kv_pool: object) -> None:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang_tardis.sglang.attention import TardisAttentionBackend

    page, dim, batch, longest = 64, 128, 8, 2000
    layer = RadixAttention(32, dim, dim**-0.5, 8, 1)
    table = torch.zeros(batch + 1, longest + 4, dtype=torch.int32, device="cuda")
    backend = TardisAttentionBackend(
        SimpleNamespace(
            token_to_kv_pool=kv_pool, req_to_token_pool=SimpleNamespace(req_to_token=table), page_size=page,
            device="cuda", dtype=torch.bfloat16, model=torch.nn.Sequential(layer),
        )
    )  # fmt: skip
    rows, slots = (torch.zeros(batch, dtype=torch.long, device="cuda") for _ in range(2))
    lengths = torch.ones(batch, dtype=torch.long, device="cuda")
    step = SimpleNamespace(
        batch_size=batch, forward_mode=ForwardMode.DECODE, req_pool_indices=rows, seq_lens=lengths, seq_lens_cpu=None,
        out_cache_loc=slots, out_cache_loc_is_physical=True,
    )  # fmt: skip
    q = torch.zeros(batch, 32 * dim, dtype=torch.bfloat16, device="cuda")
    new = torch.zeros(2, batch, 8, dim, dtype=torch.bfloat16, device="cuda")

    def run() -> torch.Tensor:
        backend.init_forward_metadata_in_graph(step)
        return backend.forward_decode(q, new[0], new[1], layer, step)

    backend.init_cuda_graph_state(batch, batch)
    backend.init_forward_metadata_out_graph(step, in_capture=True)
    run()  # SGLang's writer may be compiled at its first call
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    worst = 0.0
    for replay in range(3 if checks.quick else 20):
        count = batch - replay % 3  # the others fill up the batch
        rows.zero_(), slots.zero_(), lengths.fill_(1)
        free = torch.randperm(kv_pool.size // page, device="cuda") + 1
        kvs = []
        for index in range(count):
            length = int(torch.randint(1, longest + 1, ()))
            pages, free = free[: -(-length // page)], free[-(-length // page) :]
            where = (pages[:, None] * page + torch.arange(page, device="cuda")).view(-1)[:length]
            kv = torch.randn(2, length, 8, dim, dtype=torch.bfloat16, device="cuda")
            kv_pool.k_buffer[1][where], kv_pool.v_buffer[1][where] = kv[0], kv[1]
            for side in (kv_pool.k_buffer, kv_pool.v_buffer):
                side[1][where[-1]] = torch.nan  # the step writes it
            table[index + 1, :length] = where.int()
            rows[index], lengths[index], slots[index], new[:, index] = index + 1, length, where[-1], kv[:, -1]
            kvs.append(kv)
        q.normal_()
        graph.replay()
        backend.init_forward_metadata(step)
        eager = backend.forward_decode(q, new[0], new[1], layer, step)
        for index, kv in enumerate(kvs):
            one = q[index].view(1, 32, dim)
            exact = whole(one, kv[0], kv[1], kv.shape[1] - 1, dim**-0.5, -1).view(-1)
            for found in (captured, eager):
                worst = max(worst, (found[index].double() - exact).abs().nan_to_num(torch.inf).max().item())
    checks.report.add("decode", "the backend over SGLang's pool", f"batch of {batch}", worst * 1e6, "1e-6")
    checks.expect(worst < 0.03, "decode steps of the backend, replayed and not, over SGLang's pool", f"{worst:.2e}")

    prompts, tokens = 100, 20
    slots = torch.arange(page, page + prompts * tokens, device="cuda")
    table = torch.zeros(prompts, tokens, dtype=torch.int32, device="cuda")
    backend._req_to_token = table.copy_(slots.view(prompts, tokens))
    k, v = torch.randn(2, prompts * tokens, 8, dim, dtype=torch.bfloat16, device="cuda")
    q = torch.randn(prompts * tokens, 32 * dim, dtype=torch.bfloat16, device="cuda")
    rows = torch.arange(prompts, device="cuda")
    for prefix in (0, 7):  # without prefixes, and with the first tokens as prefixes
        parts = [x.view(prompts, tokens, -1)[:, prefix:].flatten(0, 1) for x in (q, k, v, slots)]
        step = SimpleNamespace(
            forward_mode=ForwardMode.EXTEND, req_pool_indices=rows, out_cache_loc=parts[3].view(-1),
            out_cache_loc_is_physical=True, extend_prefix_lens_cpu=[prefix] * prompts,
            extend_seq_lens_cpu=[tokens - prefix] * prompts,
        )  # fmt: skip
        given = [x.view(-1, 8, dim) for x in parts[1:3]]
        milliseconds = []
        for _ in range(3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            backend.init_forward_metadata(step)
            found = backend.forward_extend(parts[0], *given, layer, step)
            end.record()
            end.synchronize()
            milliseconds.append(start.elapsed_time(end))
        exact = torch.cat([
            whole(x, y, z, 0, dim**-0.5, -1)[prefix:]
            for x, y, z in zip(q.view(prompts, tokens, 32, dim), k.view(prompts, tokens, 8, dim),
                               v.view(prompts, tokens, 8, dim), strict=True)
        ])  # fmt: skip
        error = (found.view(-1, 32, dim).double() - exact).abs().max().item()
        name = f"a layer of {prompts} prompts of {tokens} tokens, {prefix} of them a prefix"
        checks.report.add("extend", "the backend", name, min(milliseconds), "ms")
        checks.expect(error < 0.03, f"extend of the backend: {name}", f"{error:.2e}")


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--gib", type=float, help="of the largest pool; default: 8, with --quick 1")
    parts = {
        "memory": lambda checks: check_memory(checks, options.gib or (1 if options.quick else 8)),
        "copies": check_copies,
        "refusals": check_refusals,
        "extend": check_extend,
        "decode": check_decode,
        "graphs": check_graphs,
        "sglang": check_sglang,
        "kernel": check_kernel,
    }
    parser.add_argument("--parts", default=",".join(parts), help="comma-separated; default: %(default)s")
    options = parser.parse_args()
    if unknown := set(options.parts.split(",")) - set(parts):
        parser.error(f"--parts: expected some of {', '.join(parts)}, found {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        print("no GPU here: nothing was checked")
        return SKIPPED
    report = Report(options.json, machine_facts())
    wrong = 0
    for name in options.parts.split(","):
        checks = Checks(report, options.quick)
        try:
            parts[name](checks)
        except Exception:
            checks.expect(False, f"{name} ended early:", traceback.format_exc())
        report.add("checks", name, f"{checks.done} checks", len(checks.wrong), "wrong", wrong=checks.wrong)
        wrong += len(checks.wrong)
    print(f"{wrong} failures")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
