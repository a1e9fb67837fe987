# SPDX-License-Identifier: Apache-2.0
"""Tells the store of SGLang's host pool, so that the kernel need not look up its pages for every request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch

from sglang_tardis.log import logger

__all__ = ["PoolMemory"]


def _tensors(buffers: Any) -> Iterator[torch.Tensor]:
    if isinstance(buffers, torch.Tensor):
        yield buffers
    elif isinstance(buffers, (list, tuple)):
        for item in buffers:
            yield from _tensors(item)


def _page_locked(tensor: torch.Tensor) -> bool:
    return tensor.is_pinned()  # also of memory that was registered with CUDA later


class PoolMemory:
    """The registration of one host pool with one store.

    Only page-locked pools are registered: registering takes every page of the memory for good, and that price has been
    paid there. It works in the background, since pinning 100 GiB takes seconds; requests go the ordinary way meanwhile.
    The pool's tensors are held until the store is closed or the pool is released: memory that is registered must not
    become other memory.
    """

    def __init__(self, store: Any, pool: Any) -> None:
        self._store = store
        buffers = [t for t in _tensors(getattr(pool, "kv_buffer", None)) if t.device.type == "cpu" and _page_locked(t)]
        # Views of one allocation share it; what is registered is the allocation.
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in buffers}
        self._storages = [storage for address, storage in storages.items() if address and storage.nbytes()]
        self._done: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._register, name="tardis-pool-memory", daemon=True)
        if self._storages:
            self._thread.start()

    def _register(self) -> None:
        for storage in self._storages:
            if self._stop.is_set():
                return
            try:
                self._store.register_memory(storage.data_ptr(), storage.nbytes())
            except Exception as error:  # a hint only: everything works without
                logger.info("tardis: %d bytes of the host pool are not registered: %s", storage.nbytes(), error)
                continue
            self._done.append(storage.data_ptr())
        stats = self._store.stats()
        logger.info(
            "tardis: %.2f GiB of the host pool registered with io_uring, %.2f GiB not",
            stats.get("registered_bytes", 0) / 2**30,
            stats.get("not_registered_bytes", 0) / 2**30,
        )

    def wait(self) -> None:
        """Return when everything that can be registered is."""
        if self._thread.ident is not None:
            self._thread.join()

    def release(self) -> None:
        """Undo it. No request of the store may be using the pool."""
        self._stop.set()
        self.wait()
        for address in self._done:
            self._store.unregister_memory(address)
        self._done.clear()
        self._storages.clear()
