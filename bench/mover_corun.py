# SPDX-License-Identifier: Apache-2.0
"""What movers at full rate cost the matrix products beside them, by how their SMs are set apart. Needs a GPU and torch.

Sixteen bf16 products of Llama-3.1-8B's shapes (64 to 8,192 tokens) run alone and beside movers that carry scattered
pages without a pause, in turn; a row's value is the slowdown of one product's median time in percent, "mean" that over
all shapes. `allowed` is what the SMs taken would cost if time went with SMs, and 1 %: SMs / 132 + 1 %.

green N          movers in a green context of N SMs; products on a plain stream, free to use all SMs
green N, rest    the same, and products in a green context of all other SMs
green N, told    the same, and cuBLASLt is told how many SMs it has
priority N       movers of N CTAs on a stream of lowest priority; products on a plain stream
nothing          no movers: what the method itself shows
copy engine      cudaMemcpyAsync of 32 MiB at a time: the link as busy, no SM taken
..., K chunks    the movers' CTAs hold K chunks of 16 KiB at once instead of 12

Ways: in (pinned host to HBM), out, inside (HBM to HBM: the SMs are taken and the link is idle), and nobody (no movers
are started: what the setting itself costs). Beside: the movers' rate meanwhile; its limit is the rate of movers alone
that hold 12 chunks, `alone` that of these movers alone. A sample counts only if the movers were running from before
the first product until after the last one. Weights are more than the L2 holds, and each product takes the next.
The products of a sample are one CUDA graph; with --launch eager they are launched one by one, over the link that the
movers fill.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import os
import pathlib
import statistics
import sys
import time
from typing import Any

from common import Report, add_common_arguments, machine_facts

SHAPES = [
    (m, n, k) for m in (64, 512, 2048, 8192) for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
]
QUICK_SHAPES = [(64, 4096, 4096), (2048, 6144, 4096)]
PAGE = 128 << 10
CALL_PAGES = 256  # 32 MiB a call: a layer of many requests
POOL_PAGES = 8192
WEIGHT_BYTES = 256 << 20
PRODUCT_SECONDS = 0.006  # of one sample
SAMPLES = 5


class Traffic(ctypes.Structure):
    """tardis_gpu_link_traffic."""

    _fields_ = (
        ("words", ctypes.c_void_p),
        ("link_class", ctypes.c_uint32),
        ("direction", ctypes.c_uint32),
        ("in_flight", ctypes.c_uint32),
    )


class Move(ctypes.Structure):
    """tardis_gpu_move_args."""

    _fields_ = (
        ("pieces", ctypes.c_uint64),
        ("piece_count", ctypes.c_uint64),
        ("max_pieces", ctypes.c_uint32),
        ("ctas", ctypes.c_uint32),
    )


def load_library(path: pathlib.Path) -> ctypes.CDLL:
    """libtardis_gpu.so with the signatures used here."""
    library = ctypes.CDLL(str(path.absolute()))
    library.tardis_gpu_move_in_class.argtypes = (ctypes.POINTER(Move), ctypes.POINTER(Traffic), ctypes.c_void_p)
    library.tardis_gpu_partition_create.argtypes = (ctypes.c_uint32, ctypes.POINTER(ctypes.c_void_p))
    for name, result in (
        ("destroy", ctypes.c_int),
        ("stream", ctypes.c_void_p),
        ("rest_stream", ctypes.c_void_p),
        ("kind", ctypes.c_uint32),
        ("sms", ctypes.c_uint32),
        ("rest_sms", ctypes.c_uint32),
        ("reason", ctypes.c_char_p),
    ):
        function = getattr(library, f"tardis_gpu_partition_{name}")
        function.argtypes, function.restype = (ctypes.c_void_p,), result
    return library


def checked(status: int) -> None:
    """Raise for anything but cudaSuccess."""
    if status:
        raise RuntimeError(f"expected cudaSuccess, found CUDA error {status}")


@dataclasses.dataclass
class Setting:
    """Where movers and products run."""

    name: str
    sms: int  # set apart; 0: a priority stream
    ctas: int
    rest: bool = False
    told: bool = False
    ways: tuple[str, ...] = ("in",)
    chunks: int = 0  # that a CTA holds at once; 0: as many as its ring has


SETTINGS = [
    Setting("nothing", 0, 0, ways=("nobody",)),
    Setting("copy engine", 0, 0, ways=("engine in", "engine out")),
    Setting("green 2", 2, 2, ways=("in", "out", "inside")),
    Setting("green 4", 4, 4, ways=("in", "inside")),
    Setting("green 8", 8, 4),
    Setting("green 2, rest", 2, 2, rest=True, ways=("in", "out")),
    Setting("green 4, rest", 4, 4, rest=True),
    Setting("green 8, rest", 8, 4, rest=True),
    Setting("green 2, told", 2, 2, rest=True, told=True, ways=("nobody", "in", "out", "inside")),
    *(
        Setting(f"green 2, told, {chunks} chunks", 2, 2, rest=True, told=True, ways=("in", "out"), chunks=chunks)
        for chunks in (10, 9, 8, 7, 6, 5, 4, 3)
    ),
    Setting("green 4, told", 4, 4, rest=True, told=True),
    Setting("green 8, told", 8, 4, rest=True, told=True),
    Setting("priority 2", 0, 2),
    Setting("priority 4", 0, 4),
]


class Told:
    """While open, cuBLASLt does the products and knows that so many SMs are not its own."""

    def __init__(self, sms: int) -> None:
        self.sms = sms

    def __enter__(self) -> None:
        import torch

        if self.sms:
            self.before = torch.backends.cuda.preferred_blas_library("cublaslt")
            torch._C._set_sm_carveout_experimental(self.sms)

    def __exit__(self, *_: object) -> None:
        import torch

        if self.sms:
            torch._C._set_sm_carveout_experimental(None)
            torch.backends.cuda.preferred_blas_library("default")


class Movers:
    """Pools with pages all over them, and calls that carry these."""

    def __init__(self, library: ctypes.CDLL) -> None:
        import torch

        self.library = library
        self.host = torch.randint(0, 127, (POOL_PAGES * PAGE,), dtype=torch.int8).pin_memory()
        self.device = torch.empty(POOL_PAGES * PAGE, dtype=torch.int8, device="cuda")
        self.count = torch.tensor([CALL_PAGES], dtype=torch.int32, device="cuda")
        places = torch.stack((torch.randperm(POOL_PAGES), torch.randperm(POOL_PAGES)))
        self.other = torch.empty_like(self.device)
        host, device = self.host.data_ptr() + places[0] * PAGE, self.device.data_ptr() + places[1] * PAGE
        inside = self.other.data_ptr() + places[0] * PAGE
        self.pieces = {}
        for way, source, target in (("in", host, device), ("out", device, host), ("inside", device, inside)):
            self.pieces[way] = torch.stack((source, target, torch.full_like(source, PAGE)), dim=1).cuda()
        torch.cuda.synchronize()

    def enqueue(self, way: str, calls: int, ctas: int, stream: int, chunks: int = 0) -> None:
        """`calls` calls on a stream, each with other pages."""
        import torch

        if way.startswith("engine"):
            size = CALL_PAGES * PAGE
            with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
                for call in range(calls):
                    at = call % (POOL_PAGES // CALL_PAGES) * size
                    host, device = self.host[at : at + size], self.device[at : at + size]
                    target, source = (host, device) if way == "engine out" else (device, host)
                    target.copy_(source, non_blocking=True)
            return
        if way == "nobody":
            return
        traffic = Traffic(None, 0, 0, chunks)
        step = CALL_PAGES * 24
        for call in range(calls):
            at = self.pieces[way].data_ptr() + call % (POOL_PAGES // CALL_PAGES) * step
            move = Move(at, self.count.data_ptr(), CALL_PAGES, ctas)
            checked(self.library.tardis_gpu_move_in_class(ctypes.byref(move), ctypes.byref(traffic), stream))


class Product:
    """One matrix product, and as many of them as fill a sample."""

    def __init__(self, m: int, n: int, k: int) -> None:
        import torch

        self.name = f"{m}x{n}x{k}"
        self.a = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
        weights = WEIGHT_BYTES // (n * k * 2) + 1
        self.b = [torch.randn(n, k, dtype=torch.bfloat16, device="cuda").t() for _ in range(weights)]
        self.out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
        self.times = 4
        plain = torch.cuda.Stream()
        self.milliseconds(plain)
        per_product = self.milliseconds(plain) / 1e3
        self.times = max(4, int(PRODUCT_SECONDS / per_product))

    def captured(self, stream: Any) -> Any:
        """A graph of as many products as fill a sample."""
        import torch

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self.enqueue()
        return graph

    def enqueue(self) -> None:
        """As many products as fill a sample, one by one."""
        import torch

        for i in range(self.times):
            torch.mm(self.a, self.b[i % len(self.b)], out=self.out)

    def milliseconds(self, stream: Any, graph: Any = None) -> float:
        """Time of one product, as a mean over those of a sample; waits for them."""
        import torch

        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            start.record()
            if graph is None:
                self.enqueue()
            else:
                graph.replay()
            end.record()
        end.synchronize()
        return start.elapsed_time(end) / self.times


def beside(
    movers: Movers,
    product: Product,
    setting: Setting,
    way: str,
    mover_stream: Any,
    stream: Any,
    graph: Any,
    calls: int,
) -> tuple[float, float] | None:
    """(time of a product beside movers in ms, the movers' GB/s); None if the movers ended too early."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(mover_stream)
    movers.enqueue(way, calls, setting.ctas, mover_stream.cuda_stream, setting.chunks)
    end.record(mover_stream)
    time.sleep(0.0005)
    if not start.query():
        raise RuntimeError("expected movers to be running, found that they have not begun")
    with Told(setting.sms if setting.told else 0):
        milliseconds = product.milliseconds(stream, graph)
    early = end.query() and way != "nobody"
    end.synchronize()
    rate = calls * CALL_PAGES * PAGE / max(start.elapsed_time(end), 1e-3) / 1e6
    return None if early else (milliseconds, rate)


def measure(
    movers: Movers,
    library: ctypes.CDLL,
    products: list[Product],
    setting: Setting,
    way: str,
    launch: str,
    report: Report,
) -> None:
    """All shapes in one setting."""
    import torch

    partition = ctypes.c_void_p()
    checked(library.tardis_gpu_partition_create(setting.sms, ctypes.byref(partition)))
    try:
        kind = library.tardis_gpu_partition_reason(partition).decode()
        if setting.sms and not library.tardis_gpu_partition_kind(partition):
            print(f"{setting.name}: {kind}: left out")
            return
        taken = library.tardis_gpu_partition_sms(partition) or setting.ctas  # none: as many as there are CTAs
        mover_stream = torch.cuda.ExternalStream(library.tardis_gpu_partition_stream(partition))
        if way.startswith("engine"):  # torch remembers the streams of copies for as long as the memory lives
            mover_stream = torch.cuda.Stream()
        plain = torch.cuda.Stream()
        stream = plain
        if setting.rest:
            stream = torch.cuda.ExternalStream(library.tardis_gpu_partition_rest_stream(partition))
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        limit = taken / sms * 100 + 1
        nobody = way == "nobody"
        alone = full = 0.0
        if not nobody:
            alone = full = movers_alone(movers, setting, way, mover_stream)
            if setting.chunks:
                full = movers_alone(movers, dataclasses.replace(setting, chunks=0), way, mover_stream)
        calls = 0 if nobody else int(2.4 * PRODUCT_SECONDS * 1e9 * alone / (CALL_PAGES * PAGE)) + 1
        slowdowns, rates = [], []
        for product in products:
            idle, loaded = [], []
            plain_graph = graph = None
            with Told(setting.sms if setting.told else 0):
                product.milliseconds(stream)
                if launch == "graph":
                    graph = product.captured(stream)
            if launch == "graph":
                plain_graph = product.captured(plain)
            while len(loaded) < SAMPLES:
                idle.append(product.milliseconds(plain, plain_graph))
                found = beside(movers, product, setting, way, mover_stream, stream, graph, calls)
                if found is None:
                    calls *= 2
                    continue
                loaded.append(found[0])
                rates.append(found[1])
            slowdowns.append((statistics.median(loaded) / statistics.median(idle) - 1) * 100)
            case, ms = f"product beside movers {way}, {launch}", round(statistics.median(idle), 4)
            report.add(case, setting.name, product.name, slowdowns[-1], "%", allowed=round(limit, 2), alone_ms=ms)
        mean = statistics.mean(slowdowns)
        report.add(
            f"products beside movers {way}, {launch}",
            setting.name,
            "mean",
            mean,
            "%",
            allowed=round(limit, 2),
            kind=kind,
        )
        if not nobody:
            rate = statistics.median(rates)
            case = f"movers beside products {way}, {launch}"
            report.add(case, setting.name, "all", rate, "GB/s", full, alone=round(alone, 3))
    finally:
        torch.cuda.synchronize()
        checked(library.tardis_gpu_partition_destroy(partition))


def movers_alone(movers: Movers, setting: Setting, way: str, stream: Any) -> float:
    """GB/s with nothing beside."""
    import torch

    rates = []
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(stream)
        movers.enqueue(way, 24, setting.ctas, stream.cuda_stream, setting.chunks)
        end.record(stream)
        end.synchronize()
        rates.append(24 * CALL_PAGES * PAGE / start.elapsed_time(end) / 1e6)
    return statistics.median(rates)


def main() -> int:
    """Measure all settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    build = pathlib.Path(os.environ.get("TARDIS_BUILD_DIR", "build/native"))
    parser.add_argument("--library", type=pathlib.Path, default=build / "libtardis_gpu.so", help="libtardis_gpu.so")
    parser.add_argument("--launch", choices=("eager", "graph"), default="graph", help="of products (default graph)")
    parser.add_argument("--settings", nargs="+", metavar="NAME", help="only these")
    arguments = parser.parse_args()
    os.environ["CUDA_MODULE_LOADING"] = "EAGER"
    import torch

    if not torch.cuda.is_available():
        print("skipped: no CUDA device")
        return 77
    library = load_library(arguments.library)
    checked(library.tardis_gpu_mover_prepare())
    report = Report(arguments.json, machine_facts())
    movers = Movers(library)
    products = [Product(*shape) for shape in (QUICK_SHAPES if arguments.quick else SHAPES)]
    for setting in SETTINGS:
        if arguments.settings and setting.name not in arguments.settings:
            continue
        for way in setting.ways:
            measure(movers, library, products, setting, way, arguments.launch, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
