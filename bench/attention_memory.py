# SPDX-License-Identifier: Apache-2.0
"""KV pools in host memory on a GPU: checks alone, nothing is timed.

memory     tensors of the pool use no HBM, and host and GPU see each other's writes at the same addresses; what is freed
           is given back, also while a kernel writes there; what cannot be had is refused with its reason
copies     between the pool and pageable memory, pinned memory and HBM, in the order of their stream
extend     attention of ragged batches over a pool in host memory against float64, with poison wherever nobody may
           look; the error beside that of rounding the exact result
decode     the reference likewise
graphs     captured writes to and reads of the pool, replayed
kernel     decode steps of the attention backend, captured once and replayed with other requests, against float64
sglang     SGLang's own MHATokenToKVPool inside of the pool, if SGLang is installed

Exit status 77 without a GPU, 1 if something was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import torch

SKIPPED = 77
GIB = 1 << 30
ERRORS: list[str] = []
FACTS: dict[str, object] = {}


def expect(good: bool, what: str, found: object = "") -> None:
    print(f"{'ok  ' if good else 'WRONG'} {what} {found}".rstrip(), flush=True)
    if not good:
        ERRORS.append(f"{what} {found}")


def host_bytes(tensor: torch.Tensor, count: int, offset: int = 0) -> bytes:
    return ctypes.string_at(tensor.data_ptr() + offset, count)


def hbm_used() -> int:
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
def check_memory(gib: float) -> None:
    from sglang_tardis.attention import host_memory

    FACTS["available_bytes"] = host_memory.available_bytes()
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    before = hbm_used()
    rows = int(gib * GIB) // (8 * 128 * 2 * 2)
    pool = host_memory.make_pool()
    with host_memory.host_pool(pool):
        kv = torch.zeros((2, rows, 8, 128), dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    size = kv.numel() * 2
    used = host_memory.usage()
    FACTS["usage"], FACTS["huge_pages"] = repr(used), huge_share(kv.data_ptr())
    print(FACTS["usage"], FACTS["huge_pages"], flush=True)
    expect(kv.is_cuda and size <= used.bytes < size + (4 << 20), "the pool has the tensor", used.bytes - size)
    expect(hbm_used() - before < 64 << 20, "HBM is not used", hbm_used() - before)
    ends = (0, 1 << 20, size // 2 - 64, size - 64)
    expect(all(host_bytes(kv, 64, at) == bytes(64) for at in ends), "zeroed, seen by the host")
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
    expect(not wrong, "the host sees what kernels wrote", wrong[:3])
    ctypes.memset(kv.data_ptr() + size - 4096, 0x3C, 4096)
    expect(bool((flat[-2048:] == 0x3C3C).all()), "kernels see what the host wrote")
    # As integers: some of these values are NaNs, which are equal to nothing.
    copied = flat[-(1 << 20) :].clone()
    here, there = copied.cpu(), flat[-(1 << 20) :].cpu()
    nans = int(there.view(torch.bfloat16).isnan().sum())
    expect(torch.equal(here, there), "copies to HBM and to the host are the same bytes", f"({nans} NaNs in them)")
    expect(there.numpy().tobytes() == host_bytes(kv, 2 << 20, size - (2 << 20)), "and those that the host sees")
    # Freed while a kernel writes there.
    for _ in range(20):
        kv[0].fill_(1)
    del kv, flat, copied
    del pool
    gc.collect()
    torch.cuda.empty_cache()
    expect(host_memory.usage().bytes == 0, "freed memory is given back", host_memory.usage())
    expect(host_memory.usage().kept_bytes == 0, "nothing had to be kept")
    torch.cuda.synchronize()


def check_copies() -> None:
    """To the driver, some of these are between two host memories: they must keep their place in the stream."""
    from sglang_tardis.attention.host_memory import host_pool

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
            for _ in range(5):
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
            expect(wrong_out == 0, f"copies out of the pool keep their place: to {how}", wrong_out)
            expect(wrong_in == 0, f"copies into the pool keep their place: from {how}", wrong_in)
    del kv, pool
    gc.collect()


def check_refusals() -> None:
    from sglang_tardis.attention import host_memory

    for settings, size, parts in (
        ({"most_bytes": 1 << 30}, 2 << 30, ("expected 2.00 GiB", "of the 1.00 GiB", "make the pool smaller")),
        ({}, 1 << 42, ("expected 4096.00 GiB", "available of", "make the pool smaller")),
    ):
        used = hbm_used()
        pool = host_memory.make_pool(**settings)
        try:
            with host_memory.host_pool(pool):
                torch.empty(size, dtype=torch.uint8, device="cuda")
            expect(False, f"{settings} {size} is refused")
        except host_memory.HostMemoryError as error:
            expect(all(part in str(error) for part in parts), "refused with its reason:", error)
        expect(host_memory.usage().bytes == 0 and hbm_used() - used < 16 << 20, "nothing was left behind")
        del pool
    try:
        with host_memory.host_pool():
            torch.empty(4 << 20, dtype=torch.uint8, device="cuda")
        expect(True, "after a refusal the next pool works")
    except host_memory.HostMemoryError as error:
        expect(False, "after a refusal the next pool works", error)
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


def check_extend() -> None:
    from sglang_tardis.attention.extend import extend
    from sglang_tardis.attention.host_memory import host_pool

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
    for dtype, heads, kv_heads, dim, prefixes, extends, window, chunk, loudness in cases:
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
        for given in (False,) if fp8 else (True, False):
            out = torch.full_like(q, torch.nan)
            given_kv = tuple(torch.cat([x[i] for x in new]).contiguous() for i in (0, 1)) if given else None
            found = extend(
                q, pools[0], pools[1], table, rows, prefixes, extends, scale=scale, new=given_kv, window=window,
                k_scale=k_scale, v_scale=v_scale, chunk=chunk, out=out,
            )  # fmt: skip
            error = (found.double() - exact).abs().max().item()
            FACTS.setdefault("extend", []).append({"case": name, "error": error, "rounding": rounding})
            # A flash kernel rounds its weights to the dtype of V: a few roundings of a result near 1.
            limit = 4 * rounding + (8e-3 if work == torch.bfloat16 else 1e-3)
            expect(error <= limit, f"{name}{', new tokens given' if given else ''}", f"{error:.2e} ({rounding:.2e})")
        del pools, pool
        gc.collect()


def check_decode() -> None:
    from sglang_tardis.attention import reference
    from sglang_tardis.attention.host_memory import host_pool

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
    expect(error < 0.03, "decode, the reference", f"{error:.2e}")
    del pools, pool
    gc.collect()


def check_graphs() -> None:
    from sglang_tardis.attention.host_memory import host_pool

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
    for _ in range(50):
        where.copy_(torch.randperm(1 << 14, device="cuda")[:32])
        rows.normal_()
        graph.replay()
        torch.cuda.synchronize()
        wrong += not torch.equal(seen, rows)
        wrong += host_bytes(kv, 2048, 2048 * int(where[5])) != rows[5].cpu().view(torch.int16).numpy().tobytes()
    expect(wrong == 0, "graphs write and read the pool", wrong)
    del graph, kv, pool
    gc.collect()


def check_kernel() -> None:
    from sglang_tardis.attention.host_memory import host_pool
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
        for _ in range(20):
            table.copy_(torch.stack([torch.randperm(pages, device="cuda")[: 4096 // page] for _ in range(batch)]))
            lengths.copy_(torch.randint(1, 4097, (batch,), device="cuda"))
            lengths[:2] = torch.tensor([1, 4096], device="cuda")
            q.normal_()
            out.fill_(torch.nan)
            graph.replay()
            ReferenceDecode(page)(layer, q, kv[0], kv[1], table, lengths, (1.0, 1.0), None, expected)
            worst = max(worst, (out.double() - expected.double()).abs().max().item())
        expect(worst < 0.03, f"captured decode steps over host memory, window {window}", f"{worst:.2e}")
        del graph
    del kv, pool
    gc.collect()


def check_sglang() -> None:
    try:
        from sglang.srt.mem_cache import memory_pool
    except Exception as error:
        print(f"skipped: SGLang's pool ({type(error).__name__}: {error})", flush=True)
        return
    from sglang_tardis.attention import host_memory

    pool = host_memory.make_pool()
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
    expect(host_memory.usage().bytes >= size, "SGLang's KV pool lies in host memory", f"{size / GIB:.2f} GiB")
    expect(hbm_used() - before < 64 << 20, "and not in HBM", hbm_used() - before)

    class Layer:
        layer_id, k_scale, v_scale, is_cross_attention = 2, None, None, False

    where = torch.randperm(64 << 10, device="cuda")[:777] + 1
    k, v = torch.randn(2, 777, 8, 128, dtype=torch.bfloat16, device="cuda")
    kv_pool.set_kv_buffer(Layer, where, k, v)
    keys, values = kv_pool.get_kv_buffer(2)
    expect(torch.equal(keys[where], k) and torch.equal(values[where], v), "set_kv_buffer writes there")
    from sglang_tardis.kv_pools import KvPools

    pools = KvPools.of(kv_pool)
    expect(pools.layers == 4 and pools.device.type == "cuda", "the direct door takes it", pools.pages)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=8, help="of the largest pool")
    parser.add_argument("--parts", default="memory,copies,refusals,extend,decode,graphs,sglang,kernel")
    parser.add_argument("--out", type=Path, help="JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU")
        return SKIPPED
    print(torch.__version__, torch.cuda.get_device_name(), flush=True)
    parts = {
        "memory": lambda: check_memory(options.gib),
        "copies": check_copies,
        "refusals": check_refusals,
        "extend": check_extend,
        "decode": check_decode,
        "graphs": check_graphs,
        "sglang": check_sglang,
        "kernel": check_kernel,
    }
    for name in options.parts.split(","):
        try:
            parts[name]()
        except Exception:
            ERRORS.append(traceback.format_exc())
            print(ERRORS[-1], flush=True)
    with contextlib.suppress(Exception):
        from sglang_tardis.attention import host_memory

        FACTS["usage_at_end"] = repr(host_memory.usage())
    if options.out:
        options.out.write_text(json.dumps({"errors": ERRORS, **FACTS}, indent=1))
    print("WRONG" if ERRORS else "all right", len(ERRORS))
    return 1 if ERRORS else 0


if __name__ == "__main__":
    sys.exit(main())
