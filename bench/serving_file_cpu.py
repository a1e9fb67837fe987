# SPDX-License-Identifier: Apache-2.0
"""SGLang's own `file` backend for `--device cpu`, loaded through its `dynamic` backend; for serving.py, which says so.

The `file` backend copies pages through pinned memory, which cannot be had without a GPU. This is the same code with the
host pool told that its memory is not pinned, which is the truth on a CPU.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheFile


class FileBackend(HiCacheFile):
    """Constructed as `dynamic` does: storage configuration, then an empty mapping. The folder comes from SGLang's
    environment variable SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.
    """

    def __init__(self, storage_config: Any, _options: Any = None) -> None:
        super().__init__(storage_config)

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        mem_pool_host.pin_memory = False
        super().register_mem_pool_host(mem_pool_host)
