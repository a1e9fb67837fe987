# SPDX-License-Identifier: Apache-2.0
"""LMCache's local disk backend into HBM: its chunks, one file each, read by its own threads into its pinned memory.

Objects of one size are stored through `LocalDiskBackend` (O_DIRECT, 16 threads), then all are read in random order with
`batched_get_blocking`, 64 a batch, and each is copied to a place of its own in HBM. Two rows a size: until the bytes
are in host memory, and until they are in HBM. The bytes in HBM are compared before anything is timed. Medians. Wants
lmcache (0.5.6 was used) and torch; without a GPU it only says so.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import importlib.util
import pathlib
import shutil
import statistics
import sys
import threading
import time
from typing import Any

from common import Report, add_common_arguments, is_memory, machine_facts

SKIPPED = 77
SIZES = (256 << 10, 1 << 20, 2 << 20)
BATCH = 64
THREADS = 16
PATIENCE_S = 60


class Objects:
    """So many objects of one size in an LMCache disk backend, and their places in HBM."""

    def __init__(self, torch: Any, folder: pathlib.Path, size: int, total: int, device: str) -> None:
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.memory_allocators.pin_memory_allocator import PinMemoryAllocator
        from lmcache.v1.memory_management import MemoryFormat
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
        from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

        self.torch, self.size, self.count = torch, size, total // size
        config = LMCacheEngineConfig.from_defaults(
            local_cpu=False,
            local_disk=str(folder),
            max_local_disk_size=total / (1 << 30) + 1,
            extra_config={"use_odirect": True, "disk_io_threads": THREADS},
        )
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.memory = LocalCPUBackend(
            config, dst_device=device, memory_allocator=PinMemoryAllocator(2 * BATCH * max(size, 1 << 20))
        )
        self.disk = LocalDiskBackend(config, self.loop, self.memory, dst_device=device)
        self.keys = [CacheEngineKey("bench", 1, 0, i + 1, torch.uint8) for i in range(self.count)]
        self.source = torch.randint(0, 256, (self.count, size), dtype=torch.uint8)
        self.target = torch.full((self.count, size), 0xA5, dtype=torch.uint8, device=device)
        for key, page in zip(self.keys, self.source, strict=True):
            memory = self.memory.allocate(torch.Size((size,)), torch.uint8, MemoryFormat.KV_T2D)
            if memory is None:
                raise RuntimeError("LMCache: expected staging memory for an object, found none left")
            memory.tensor.copy_(page.view(memory.tensor.shape))
            self.disk.submit_put_task(key, memory)
            memory.ref_count_down()
        end = time.monotonic() + PATIENCE_S
        while not all(self.disk.contains(key) for key in self.keys):
            if time.monotonic() > end:
                raise RuntimeError(f"LMCache: expected all objects stored within {PATIENCE_S} s")
            time.sleep(0.01)
        self.order = torch.randperm(self.count).tolist()

    def read(self, to_hbm: bool) -> float:
        """GB/s of one pass over all objects in random order."""
        begin = time.perf_counter()
        for first in range(0, self.count, BATCH):
            chosen = self.order[first : first + BATCH]
            found = self.disk.batched_get_blocking([self.keys[i] for i in chosen])
            if to_hbm:
                for i, memory in zip(chosen, found, strict=True):
                    self.target[i].copy_(memory.tensor.view(-1), non_blocking=True)
                if self.target.is_cuda:
                    self.torch.cuda.synchronize()
            for memory in found:
                memory.ref_count_down()
        return self.count * self.size / (time.perf_counter() - begin) / 1e9

    def wrong_bytes(self) -> int:
        """Bytes in HBM that are not those that were stored."""
        return int((self.target.cpu() != self.source).sum())

    def close(self) -> None:
        """End the threads."""
        self.disk.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()


def main() -> int:
    """Measure; 1 if a byte came wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="an existing folder on the file system")
    parser.add_argument("--label", help="what the result says for the folder (default: the folder itself)")
    parser.add_argument("--mib", type=int, help="bytes stored of each size (default 512 MiB, with --quick 64)")
    parser.add_argument("--passes", type=int, default=3, help="over all objects (default 3)")
    parser.add_argument("--device", default="cuda", help="'cpu' only tries the code")
    arguments = parser.parse_args()
    if not arguments.folder.is_dir():
        parser.error(f"--folder: {arguments.folder} is not an existing folder")
    for package in ("torch", "lmcache"):
        if importlib.util.find_spec(package) is None:
            print(f"skipped: {package} is not installed")
            return SKIPPED
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("skipped: no CUDA device")
        return SKIPPED
    medium = "tmpfs (memory, no drive)" if is_memory(arguments.folder) else "drive"
    report = Report(
        arguments.json, machine_facts(arguments.folder), medium=medium, lmcache=importlib.metadata.version("lmcache")
    )
    if arguments.label:
        report.machine["file_systems"] = {arguments.label: report.machine["file_systems"][str(arguments.folder)]}
        report.command = report.command.replace(str(arguments.folder), arguments.label)
    total = (arguments.mib or (64 if arguments.quick else 512)) << 20
    wrong = 0
    for size in SIZES:
        folder = arguments.folder / f"lmcache.{size}"
        folder.mkdir()
        try:
            objects = Objects(torch, folder, size, total, arguments.device)
            objects.read(to_hbm=True)
            bad = objects.wrong_bytes()
            wrong += bad
            for to_hbm in (False, True):
                rate = statistics.median(objects.read(to_hbm) for _ in range(arguments.passes))
                system = "LMCache local disk" if to_hbm else "LMCache local disk, to host memory only"
                report.add("file, random read", system, size, rate, "GB/s", wrong_bytes=bad)
            objects.close()
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{wrong} wrong bytes")
    report.note(wrong_bytes=wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
