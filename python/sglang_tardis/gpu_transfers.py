# SPDX-License-Identifier: Apache-2.0
"""What loads and offloads of one GPU share: the pools as kernels see them, streams, and the link's arbiter."""

from __future__ import annotations

import ctypes
import weakref

import numpy as np
import torch

from sglang_tardis import loads_abi
from sglang_tardis.kv_pools import KvPools, PageLayout

__all__ = ["GpuTransfers"]

_PIECE_BYTES = 24  # tardis_gpu_piece
_OUT_IN_FLIGHT = 4  # chunks: what disturbs compute least at the full rate out (docs/gio.md)


def _destroy(gpu: object, link: ctypes.c_void_p) -> None:
    gpu.library.tardis_gpu_link_destroy(link)


class GpuTransfers:
    """Made once, at start: it loads every kernel, since one that is loaded at its first launch waits for the device.

    Attributes:
        load_stream: of the highest priority: loads of all batches, one after the other.
        offload_stream: of the lowest.
        pools: tardis_gpu_pools.
        link: tardis_gpu_link.

    Raises:
        GpuLibraryMissingError: libtardis_gpu.so is not there. GioError: the device refused.
    """

    def __init__(self, pools: KvPools, layout: PageLayout) -> None:
        self.device = pools.device
        self._gpu = loads_abi.gpu()
        self._keep: list[object] = []
        with torch.cuda.device(self.device):
            self._gpu.call("tardis_gpu_load_prepare")
            lowest, highest = torch.cuda.Stream.priority_range()
            self.load_stream = torch.cuda.Stream(self.device, priority=highest)
            self.offload_stream = torch.cuda.Stream(self.device, priority=lowest)
            link = ctypes.c_void_p()
            self._gpu.call("tardis_gpu_link_create", ctypes.byref(link))
            self._close = weakref.finalize(self, _destroy, self._gpu, link)
            self.link = link
            self._words = self._gpu.library.tardis_gpu_link_words_of(link)
            self.pools = self._make_pools(pools, layout)
        self.layout = layout

    def _make_pools(self, pools: KvPools, layout: PageLayout) -> loads_abi.GpuPools:
        made = loads_abi.GpuPools()
        for half, buffers in enumerate((pools.keys, pools.values)):
            if buffers is None:
                continue
            on_host = np.array([buffer.data_ptr() for buffer in buffers], np.uint64)
            on_device = torch.from_numpy(on_host.view(np.int64)).to(self.device)
            made.layers[half], made.host_layers[half] = on_device.data_ptr(), on_host.ctypes.data
            self._keep += [on_host, on_device]
        made.page_bytes[:] = (layout.key_bytes, layout.value_bytes)
        made.layer_count, made.page_count = layout.layers, pools.pages
        return made

    def work(self, most_pages: int, *, digests: bool) -> loads_abi.TransferWork:
        """Device memory for one load or offload at a time."""
        layers = self.layout.layers

        def allocate(size: int) -> int:
            memory = torch.zeros(size, dtype=torch.uint8, device=self.device)
            self._keep.append(memory)
            return memory.data_ptr()

        work = loads_abi.TransferWork()
        work.pieces = allocate((layers + 1) * 2 * most_pages * _PIECE_BYTES)
        work.counts = allocate((layers + 1) * 4)
        if digests:
            work.digests = allocate(most_pages * layers * self.layout.digests * 8)
            work.flags = allocate(layers * 4)
        work.most_pages = most_pages
        torch.cuda.current_stream(self.device).synchronize()  # the zeros, before other streams use it
        return work

    def load_traffic(self) -> loads_abi.Traffic:
        """Of what a request waits for."""
        return loads_abi.Traffic(self._words, loads_abi.LINK_RESTORE, loads_abi.LINK_IN, 0)

    def offload_traffic(self) -> loads_abi.Traffic:
        """Of what nobody waits for."""
        return loads_abi.Traffic(self._words, loads_abi.LINK_WRITE_BEHIND, loads_abi.LINK_OUT, _OUT_IN_FLIGHT)

    def enqueue_load(self, load: loads_abi.GpuLoad) -> None:
        """On the load stream; returns at once."""
        self._gpu.call("tardis_gpu_load_enqueue", ctypes.byref(load), self.load_stream.cuda_stream)

    def enqueue_runs(self, load: loads_abi.GpuLoadRuns) -> None:
        """On the load stream, by copy engines; waits where about 1,000 commands are under way."""
        self._gpu.call("tardis_gpu_load_runs_enqueue", ctypes.byref(load), self.load_stream.cuda_stream)

    def enqueue_offload(self, offload: loads_abi.GpuOffload) -> None:
        """On the offload stream; returns at once."""
        self._gpu.call("tardis_gpu_offload_enqueue", ctypes.byref(offload), self.offload_stream.cuda_stream)

    def close(self) -> None:
        """Wait for both streams and give up the link."""
        self.load_stream.synchronize()
        self.offload_stream.synchronize()
        self._close()
