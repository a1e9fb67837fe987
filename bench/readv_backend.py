# SPDX-License-Identifier: Apache-2.0
"""A plain reference backend for comparison: one file a page, readv and writev straight into SGLang's host pool.

It does what a simple out-of-tree HiCache backend can do well: no copy, the interpreter lock released in each system
call, eight threads. It has no checksums, no namespace, no eviction and no crash safety, and is not part of the product.

SGLang loads it through its `dynamic` backend, with extra config::

    {"backend_name": "readv", "module_path": "readv_backend", "class_name": "ReadvBackend", "interface_v1": 1,
     "folder": "/dev/shm/readv", "threads": 8, "log": "/tmp/readv.jsonl"}

`log` receives one JSON line a call: operation, pages, bytes, seconds.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

IOV_MAX = 1024


class ReadvBackend(HiCacheStorage):
    """HiCache storage (v1 interface) over a folder of page files."""

    def __init__(self, storage_config: Any, _unused: Any = None) -> None:
        settings = dict(storage_config.extra_config or {})
        self.folder = settings["folder"]
        os.makedirs(self.folder, exist_ok=True)
        self._threads = ThreadPoolExecutor(int(settings.get("threads", 8)), thread_name_prefix="readv")
        self._log = open(settings["log"], "a", buffering=1, encoding="utf-8") if settings.get("log") else None

    def _note(self, operation: str, pages: int, size: int, started: float) -> None:
        if self._log is not None:
            line = {"op": operation, "pages": pages, "bytes": size, "seconds": time.perf_counter() - started}
            self._log.write(json.dumps(line) + "\n")

    def _path(self, key: str) -> str:
        return os.path.join(self.folder, key)

    def _page_memory(self, keys: list[str], host_indices: Any) -> tuple[list[list[memoryview]], int]:
        addresses, sizes = self.mem_pool_host.get_page_buffer_meta(host_indices)
        views = [
            memoryview((ctypes.c_char * n).from_address(a)).cast("B") for a, n in zip(addresses, sizes, strict=True)
        ]
        each = len(views) // len(keys)
        return [views[i * each : (i + 1) * each] for i in range(len(keys))], sum(sizes)

    def _read(self, key: str, views: list[memoryview]) -> bool:
        try:
            file = os.open(self._path(key), os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            for i in range(0, len(views), IOV_MAX):
                part = views[i : i + IOV_MAX]
                if os.readv(file, part) != sum(map(len, part)):
                    return False
            return True
        finally:
            os.close(file)

    def _write(self, key: str, views: list[memoryview]) -> bool:
        path = self._path(key)
        if os.path.exists(path):
            return True
        partial = f"{path}.{os.getpid()}.partial"
        file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            for i in range(0, len(views), IOV_MAX):
                part = views[i : i + IOV_MAX]
                if os.writev(file, part) != sum(map(len, part)):
                    return False
        finally:
            os.close(file)
        os.replace(partial, path)
        return True

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Length of the leading run of `keys` that is stored."""
        started = time.perf_counter()
        run = next((i for i, key in enumerate(keys) if not os.path.exists(self._path(key))), len(keys))
        self._note("exists", len(keys), 0, started)
        return run

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Read each page into its place in the host pool; one bool a key."""
        started = time.perf_counter()
        memory, size = self._page_memory(keys, host_indices)
        done = list(self._threads.map(self._read, keys, memory))
        self._note("get", len(keys), size, started)
        return done

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Write each page from its place in the host pool; one bool a key."""
        started = time.perf_counter()
        memory, size = self._page_memory(keys, host_indices)
        done = list(self._threads.map(self._write, keys, memory))
        self._note("set", len(keys), size, started)
        return done

    def exists(self, key: str) -> bool:
        """True if the page is stored."""
        return os.path.exists(self._path(key))

    def clear(self) -> None:
        """Delete every page."""
        for name in os.listdir(self.folder):
            os.unlink(os.path.join(self.folder, name))

    def close(self) -> None:
        """Wait for calls in flight and stop the threads."""
        self._threads.shutdown(wait=True)
        if self._log is not None:
            self._log.close()
            self._log = None

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Refuse: the copying interface would make the comparison meaningless."""
        raise NotImplementedError('ReadvBackend needs "interface_v1": 1 in the extra config')

    batch_get = set = batch_set = get
