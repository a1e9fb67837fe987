# SPDX-License-Identifier: Apache-2.0
"""CUDA tensors whose memory is the host's: a `torch.cuda.MemPool` over pinned memory that kernels reach in place.

    pool = make_pool(most_bytes=64 << 30)
    with host_pool(pool):
        keys = torch.zeros(slots, heads, dim, dtype=torch.bfloat16, device="cuda")   # no HBM; its address is the host's

Source of the functions: cpp/attention/host_pool.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
from collections.abc import Iterator
from ctypes import POINTER, byref, c_char_p, c_int, c_int32, c_size_t, c_uint32, c_uint64
from typing import TYPE_CHECKING, Any

from sglang_tardis import gio_abi

if TYPE_CHECKING:
    import torch

__all__ = ["HostMemoryError", "Usage", "available_bytes", "explained", "host_pool", "make_pool", "usage"]

_ERROR_BYTES = 2048


class _Settings(ctypes.Structure):
    """tardis_gpu_host_pool_settings."""

    _fields_ = (
        ("most_bytes", c_uint64),
        ("step_bytes", c_uint64),
        ("threads", c_uint32),
        ("unchecked", c_uint32),
        ("no_reserved_pages", c_uint32),
        ("reserved", c_uint32),
    )


class _Usage(ctypes.Structure):
    """tardis_gpu_host_pool_usage."""

    _fields_ = (
        ("bytes", c_uint64),
        ("peak_bytes", c_uint64),
        ("blocks", c_uint64),
        ("reserved_page_bytes", c_uint64),
        ("node_bytes", c_uint64),
        ("failures", c_uint64),
        ("kept_bytes", c_uint64),
        ("node", c_int32),
        ("reserved", c_uint32),
    )


_FUNCTIONS = {
    "tardis_gpu_host_pool_configure": (c_int, (POINTER(_Settings),)),
    "tardis_gpu_host_pool_usage_of": (None, (POINTER(_Usage),)),
    "tardis_gpu_host_pool_take_error": (None, (c_char_p, c_size_t)),
    "tardis_gpu_host_pool_available": (c_uint64, ()),
}


class HostMemoryError(MemoryError):
    """There is not that much host memory, or it cannot be pinned; the message says what was found and what to do."""


@dataclasses.dataclass(frozen=True)
class Usage:
    """What pools of this process have; sizes in bytes.

    Attributes:
        bytes: in blocks now, on all devices.
        peak_bytes: the most there were.
        blocks: how many.
        reserved_page_bytes: of bytes, in huge pages that were set aside (vm.nr_hugepages).
        node_bytes: of bytes, asked of the GPU's NUMA node.
        failures: allocations that were refused.
        kept_bytes: freed by torch, but kept until the process ends: the device could not be waited for.
        node: NUMA node of the GPU; -1: the machine has one node, or does not say.
    """

    bytes: int
    peak_bytes: int
    blocks: int
    reserved_page_bytes: int
    node_bytes: int
    failures: int
    kept_bytes: int
    node: int


@functools.cache
def _gpu() -> gio_abi.Gpu:
    gpu = gio_abi.gpu()
    gio_abi.bind(gpu.library, "libtardis_gpu.so", _FUNCTIONS, gio_abi.GpuLibraryMissingError)
    return gpu


@functools.cache
def _allocator() -> Any:
    """One a process, kept: a MemPool does not hold its allocator."""
    import torch

    path = _gpu().library._name
    return torch.cuda.memory.CUDAPluggableAllocator(path, "tardis_gpu_host_pool_allocate", "tardis_gpu_host_pool_free")


def make_pool(*, most_bytes: int = 0, check: bool = True, reserved_pages: bool = True) -> torch.cuda.MemPool:
    """A pool for `torch.cuda.use_mem_pool`. Its tensors say `cuda:N`, use no HBM, and lie in blocks of 2 MiB.

    Settings are those of the process, for all blocks to come, since torch tells an allocator nothing.

    Args:
        most_bytes: that all pools of this process may have together; 0: what there is.
        check: compare with MemAvailable and the limits of control groups before memory is taken. False where memory
            grows as it is touched, as in some guests.
        reserved_pages: use huge pages that were set aside (vm.nr_hugepages) if there are enough.

    Raises:
        GpuLibraryMissingError: libtardis_gpu.so is not there.
        ValueError: most_bytes below 0.
    """
    import torch

    if most_bytes < 0:
        raise ValueError(f"make_pool: expected most_bytes of 0 or more, found {most_bytes}")
    settings = _Settings(most_bytes=most_bytes, unchecked=not check, no_reserved_pages=not reserved_pages)
    _gpu().call("tardis_gpu_host_pool_configure", byref(settings))
    return torch.cuda.MemPool(_allocator().allocator())


@contextlib.contextmanager
def host_pool(pool: torch.cuda.MemPool | None = None, **settings: Any) -> Iterator[torch.cuda.MemPool]:
    """CUDA tensors that this thread makes inside lie in host memory.

    Args:
        pool: of :func:`make_pool`; it must outlive them. None: a new one.
        settings: of a new one.

    Raises:
        HostMemoryError: in place of torch's out-of-memory error, which speaks of HBM.
    """
    import torch

    if pool is None:
        pool = make_pool(**settings)
    with explained(), torch.cuda.use_mem_pool(pool):
        yield pool


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turns an out-of-memory error into HostMemoryError if it is one of host memory."""
    import torch

    _take_error()
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        reason = _take_error()
        if reason:
            raise HostMemoryError(reason) from error
        raise


def _take_error() -> str:
    text = ctypes.create_string_buffer(_ERROR_BYTES)
    _gpu().library.tardis_gpu_host_pool_take_error(text, _ERROR_BYTES)
    return text.value.decode(errors="replace")


def available_bytes() -> int:
    """Host memory that this process may still take.

    Of the machine, or of its tightest control group, and huge pages that were set aside.

    Raises:
        HostMemoryError: /proc does not say.
    """
    available = _gpu().library.tardis_gpu_host_pool_available()
    if available == 0:
        raise HostMemoryError("expected MemAvailable in /proc/meminfo, found none; set attention_host")
    return available


def usage() -> Usage:
    """What pools of this process have now. Any thread."""
    found = _Usage()
    _gpu().library.tardis_gpu_host_pool_usage_of(byref(found))
    return Usage(**{field.name: getattr(found, field.name) for field in dataclasses.fields(Usage)})
