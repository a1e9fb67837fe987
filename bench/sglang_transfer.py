# SPDX-License-Identifier: Apache-2.0
"""SGLang's own transfer kernels beside the movers: the same scattered pages between pinned memory and HBM.

One layer's K and V pools of 1 GiB each, rows of 2,048 bytes (8 heads of 128 in bf16), `layer_first` on both sides. A
call moves 512 pages of K and the same of V, 1,024 pieces in all, from random pages to other random pages; each call of
a run has its own. Calls are made as HiCache makes them, an index a token, with SGLang's default block and warp quotas.
Each system's bytes are compared with the source, those around them with the poison, before it is measured.

sgl_kernel transfer_kv         transfer_kv_per_layer (in) and transfer_kv_all_layer (out): 2 blocks of 32 warps
sgl_kernel transfer_kv_direct  the `direct` I/O backend: copies of whole pages by copy engines
SGLang JIT, registers          `sglang.kernels` HiCache kernel: 2 blocks of 1,024 threads
SGLang JIT, TMA                the one that 0.5.23 takes on Hopper: 4 blocks
mover N                        `tardis_gpu_move` on N SMs, one piece a page

The limit is the copy engine on one piece of 1 GiB in the same run. Medians of seven. No drive takes part. Libraries
come from installed packages, or from the files that are named; what is missing is said, and the rest measured.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

from common import Report, add_common_arguments, machine_facts

SKIPPED = 77
POOL = 1 << 30  # bytes of K, and of V
ROW = 2048
PAGES = 512  # of K, and of V, in a call
SIZES = (32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20)
RUN_BYTES = 256 << 20
POISON = -0x5A5A5A5A5A5A5A5B


class Pieces(ctypes.Structure):
    """`tardis_gpu_move_args`."""

    _fields_ = (
        ("pieces", ctypes.c_void_p),
        ("piece_count", ctypes.c_void_p),
        ("max_pieces", ctypes.c_uint32),
        ("ctas", ctypes.c_uint32),
    )


class Side:
    """K and V of one side, `[row][element]`; `words` are the same bytes for comparing."""

    def __init__(self, torch: Any, on_gpu: bool) -> None:
        where = {"device": "cuda"} if on_gpu else {"pin_memory": True}
        self.k, self.v = (torch.empty((POOL // ROW, ROW // 2), dtype=torch.bfloat16, **where) for _ in range(2))
        self.words = [pool.view(torch.int64) for pool in (self.k, self.v)]
        self.pointers = [
            torch.tensor([pool.data_ptr()], dtype=torch.uint64, device="cuda") for pool in (self.k, self.v)
        ]


class Call:
    """The pages of one call: row numbers on the GPU and on the host, pieces for a mover."""

    def __init__(self, torch: Any, size: int, source: Side, target: Side) -> None:
        tokens, pages = size // ROW, POOL // size
        rows = torch.arange(tokens)
        page_ids = [torch.randperm(pages)[:PAGES] for _ in range(2)]
        self.host = [(ids[:, None] * tokens + rows).reshape(-1).contiguous() for ids in page_ids]
        self.device = [indices.cuda() for indices in self.host]
        self.tokens = tokens
        pieces = [
            [a.data_ptr() + i * size, b.data_ptr() + j * size, size]
            for a, b in ((source.k, target.k), (source.v, target.v))
            for i, j in zip(*(ids.tolist() for ids in page_ids), strict=True)
        ]
        self.pieces = torch.tensor(pieces, dtype=torch.int64).cuda()
        self.count = torch.tensor([len(pieces)], dtype=torch.int32).cuda()


Mover = Callable[[Call, Side, Side], None]


def sgl_kernel_ops(torch: Any, library: pathlib.Path | None) -> Any:
    """`torch.ops.sgl_kernel`, from a file or the installed package; raises ImportError or OSError with the reason."""
    if library is not None:
        torch.ops.load_library(str(library))
    else:
        import sgl_kernel  # noqa: F401
    return torch.ops.sgl_kernel


def jit_modules(folder: pathlib.Path | None) -> dict[str, Any]:
    """SGLang's two HiCache modules, built before (files with `hicache` in their names) or by the installed SGLang."""
    if folder is None:
        if importlib.util.find_spec("sglang") is None:
            raise ImportError("sglang is not installed, and --jit names no modules")
        from sglang.kernels.ops.kvcache import hicache

        return {
            "TMA": hicache._jit_hicache_tma_module(block_quota=hicache.TMA_BLOCK_QUOTA),
            "registers": hicache._jit_hicache_module(
                element_size=ROW, unroll=1, block_quota=hicache.DEFAULT_BLOCK_QUOTA
            ),
        }
    import tvm_ffi

    found = {("TMA" if "tma" in file.name else "registers"): file for file in folder.glob("*hicache*.so")}
    if not found:
        raise ImportError(f"{folder}: expected modules *hicache*.so, found none")
    return {name: tvm_ffi.load_module(str(file)) for name, file in found.items()}


def transfers(torch: Any, arguments: argparse.Namespace, note: Callable[[str], None]) -> dict[str, dict[str, Mover]]:
    """What can be measured here, by name and direction; `note` gets why the rest cannot."""
    found: dict[str, dict[str, Mover]] = {}
    try:
        ops = sgl_kernel_ops(torch, arguments.common_ops)

        def per_layer(call: Call, source: Side, target: Side) -> None:
            ops.transfer_kv_per_layer.default(source.k, target.k, source.v, target.v, *call.device, ROW, 2, 32)

        def all_layer(call: Call, source: Side, target: Side) -> None:
            k, v = zip(source.pointers, target.pointers, strict=True)
            ops.transfer_kv_all_layer.default(*k, *v, *call.device, ROW, 1, 2, 32)

        def direct(call: Call, source: Side, target: Side) -> None:
            ops.transfer_kv_direct.default([source.k, source.v], [target.k, target.v], *call.host, call.tokens)

        found["sgl_kernel transfer_kv"] = {"in": per_layer, "out": all_layer}
        found["sgl_kernel transfer_kv_direct"] = {"in": direct, "out": direct}
    except (ImportError, OSError) as error:
        note(f"sgl_kernel is not measured: {error}")
    try:
        for name, module in jit_modules(arguments.jit).items():
            more = (ROW,) if name == "TMA" else ()

            def one(call: Call, source: Side, target: Side, module: Any = module) -> None:
                rows_from, rows_to = call.device
                module.launch_one(target.k, target.v, rows_to, source.k, source.v, rows_from)

            def everything(
                call: Call, source: Side, target: Side, module: Any = module, more: tuple[int, ...] = more
            ) -> None:
                rows_from, rows_to = call.device
                module.launch_all(*target.pointers, rows_to, *source.pointers, rows_from, ROW, ROW, *more)

            found[f"SGLang JIT, {name}"] = {"in": one, "out": everything}
    except (ImportError, OSError) as error:
        note(f"SGLang's JIT kernels are not measured: {error}")
    try:
        library = ctypes.CDLL(str(arguments.tardis_gpu))
        for ctas in (2, 4):

            def move(call: Call, source: Side, target: Side, ctas: int = ctas) -> None:
                pieces = Pieces(call.pieces.data_ptr(), call.count.data_ptr(), len(call.pieces), ctas)
                stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
                if (status := library.tardis_gpu_move(ctypes.byref(pieces), stream)) != 0:
                    raise RuntimeError(f"tardis_gpu_move: CUDA error {status}")

            found[f"mover {ctas}"] = {"in": move, "out": move}
    except OSError as error:
        note(f"movers are not measured: {error}")
    return found


def check(torch: Any, move: Mover, call: Call, source: Side, target: Side) -> int:
    """Words that are not what one call must leave behind."""
    poison = torch.full_like(target.words[0], POISON, device="cuda")
    for pool in target.words:
        pool.copy_(poison)
    torch.cuda.synchronize()
    move(call, source, target)
    torch.cuda.synchronize()
    rows_from, rows_to = call.device
    wrong = 0
    for mine, theirs in zip(target.words, source.words, strict=True):
        found, origin = mine.cuda(), theirs.cuda()
        expected = poison.clone()
        expected[rows_to] = origin[rows_from]
        wrong += int((found != expected).sum())
    return wrong


def rate(torch: Any, run: Callable[[], None], size: int) -> float:
    """Median GB/s of seven runs that move so many bytes each, after one that warms up."""
    rates = []
    for _ in range(8):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        rates.append(size / begin.elapsed_time(end) / 1e6)
    return statistics.median(rates[1:])


def measure(
    torch: Any, found: dict[str, dict[str, Mover]], quick: bool, report: Report, note: Callable[[str], None]
) -> int:
    """All rows; the number of wrong words. `note` gets why a system has no row."""
    host, gpu = Side(torch, on_gpu=False), Side(torch, on_gpu=True)
    wrong = 0
    for way in ("in", "out"):
        source, target = (host, gpu) if way == "in" else (gpu, host)
        limit = rate(torch, lambda s=source, t=target: t.k.copy_(s.k, non_blocking=True), POOL)
        report.add(f"limit {way}", "copy engine", POOL, limit, "GB/s")
        for size in SIZES[::3] if quick else SIZES:
            for pool in source.words:
                pool.copy_(torch.randint(-(2**62), 2**62, pool.shape, dtype=torch.int64, device="cuda"))
            count = max(1, RUN_BYTES // (2 * PAGES * size))
            calls = [Call(torch, size, source, target) for _ in range(count)]
            for name, ways in found.items():
                move = ways[way]
                try:
                    bad = check(torch, move, calls[0], source, target)
                except RuntimeError as error:
                    note(f"{name}, {way}, {size}: {error}")
                    continue
                wrong += bad

                def run(move: Mover = move, calls: list[Call] = calls, s: Side = source, t: Side = target) -> None:
                    for call in calls:
                        move(call, s, t)

                speed = rate(torch, run, count * 2 * PAGES * size)
                report.add(f"pages {way}, random", name, size, speed, "GB/s", limit, wrong_words=bad)
    return wrong


def main() -> int:
    """Measure what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--common-ops", type=pathlib.Path, help="sgl_kernel's common_ops library (default: installed)")
    parser.add_argument(
        "--jit", type=pathlib.Path, help="folder of built HiCache modules (default: SGLang builds them)"
    )
    build = os.environ.get("TARDIS_BUILD_DIR", "build/native")
    parser.add_argument("--tardis-gpu", default=f"{build}/libtardis_gpu.so", help="libtardis_gpu.so (%(default)s)")
    parser.add_argument("--versions", default="", help="a note for the result: which releases the libraries are of")
    arguments = parser.parse_args()
    if importlib.util.find_spec("torch") is None:
        print("skipped: torch is not installed")
        return SKIPPED
    import torch

    if not torch.cuda.is_available():
        print("skipped: no CUDA device")
        return SKIPPED
    missing: list[str] = []
    report = Report(arguments.json, machine_facts(), versions=arguments.versions, missing=missing)

    def note(text: str) -> None:
        print(text)
        missing.append(text)

    found = transfers(torch, arguments, note)
    wrong = measure(torch, found, arguments.quick, report, note)
    print(f"{wrong} wrong words")
    report.note(wrong_words=wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
