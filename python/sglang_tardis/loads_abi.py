# SPDX-License-Identifier: Apache-2.0
"""The C ABI of loads, offloads, the pinned tier, store sessions and the link arbiter, through ctypes.

As `gio_abi`: what is declared twice is compared with the libraries when they are loaded; no logic, no torch. Sources:
cpp/include/tardis/loads.h, pinned_tier.h, gio_store.h, cpp/gio/load_launch.h, link.h.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p

from sglang_tardis import gio_abi
from sglang_tardis.gio_abi import GioError, GpuLibraryMissingError, Layer, Options

__all__ = [
    "BAD",
    "GOOD",
    "Board",
    "BoardLayout",
    "GpuLoad",
    "GpuLoadRun",
    "GpuLoadRuns",
    "GpuOffload",
    "GpuPools",
    "HostLoad",
    "LeaseLayout",
    "LoadResult",
    "LoadShape",
    "LoaderCounters",
    "LoaderOptions",
    "PinnedCounters",
    "Traffic",
    "TransferWork",
    "core",
    "gpu",
]

PENDING, GOOD, BAD = range(3)  # of a layer's words
ABORT, PUBLISH, PUBLISH_PINNED = range(3)  # ends of a reserved slot
RESERVED, THERE, BUSY, FULL = range(4)  # what became of a reservation
NO_SLOT = 0xFFFFFFFF
LINK_RESTORE, LINK_WRITE_BEHIND = 0, 3
LINK_IN, LINK_OUT = 0, 1


class Board(ctypes.Structure):
    """tardis_load_board: the beginning of a board."""

    _fields_ = (
        ("ready", c_uint32),
        ("ring_pages", c_uint32),
        ("errors", c_uint32),
        ("abandoned", c_uint32),
        ("reserved", c_uint32 * 12),
    )


class Repair(ctypes.Structure):
    """tardis_load_repair."""

    _fields_ = (("address", c_uint64), ("page", c_uint32), ("reserved", c_uint32))


class BoardLayout(ctypes.Structure):
    """tardis_load_board_layout: offsets in a board."""

    _fields_ = tuple(
        (name, c_uint64)
        for name in (
            "bytes",
            "landed",
            "repaired",
            "repairs",
            "done",
            "list",
            "blocks",
            "digests",
            "statuses",
            "reports",
        )
    )


class LoadShape(ctypes.Structure):
    """tardis_load_shape."""

    _fields_ = tuple(
        (name, c_uint32) for name in ("layers", "chunks", "most_pages", "most_repairs", "commands_per_page", "rings")
    )


class LoaderOptions(ctypes.Structure):
    """tardis_loader_options."""

    _fields_ = (
        ("shape", LoadShape),
        ("name_space", c_uint32),
        ("block_bytes", c_uint32),
        ("loads", c_uint32),
        ("staging", c_void_p),
        ("staging_bytes", c_uint64),
    )


class LoaderCounters(ctypes.Structure):
    """tardis_loader_counters."""

    _fields_ = tuple(
        (name, c_uint64)
        for name in (
            "loads",
            "pages",
            "missing",
            "unproven",
            "repaired_parts",
            "failed_pages",
            "damaged_pages",
            "abandoned",
        )
    )


class LoadResult(ctypes.Structure):
    """tardis_load_result."""

    _fields_ = (("good", c_uint32), ("renew", c_uint32), ("pages", c_uint32), ("repaired_parts", c_uint32))


class HostLoad(ctypes.Structure):
    """tardis_host_load."""

    _fields_ = (
        ("ring", POINTER(Layer)),
        ("layers", c_void_p * 2),
        ("page_bytes", c_uint32 * 2),
        ("pool_page_count", c_uint32),
        ("pinned_pages", c_uint32),
        ("pinned_ids", c_void_p),
        ("pinned_objects", c_void_p),
    )


class LoadSizes(ctypes.Structure):
    """tardis_load_sizes: sizeof of each struct above, in their order."""

    _fields_ = tuple(
        (name, c_uint32)
        for name in ("board", "repair", "layout", "shape", "options", "counters", "result", "host_load")
    )


class LeaseLayout(ctypes.Structure):
    """tardis_lease_layout."""

    _fields_ = (
        ("part_bytes", c_uint64),
        ("part_stride", c_uint64),
        ("parts", c_uint32),
        ("chunks_per_part", c_uint32),
    )


class PinnedCounters(ctypes.Structure):
    """tardis_pinned_counters."""

    _fields_ = tuple(
        (name, c_uint64)
        for name in (
            "slots",
            "published",
            "reserved",
            "pinned",
            "hits",
            "misses",
            "stored",
            "aborted",
            "evicted",
            "erased",
            "refused_full",
        )
    )


class GpuPools(ctypes.Structure):
    """tardis_gpu_pools."""

    _fields_ = (
        ("layers", c_void_p * 2),
        ("host_layers", c_void_p * 2),
        ("page_bytes", c_uint32 * 2),
        ("layer_count", c_uint32),
        ("page_count", c_uint32),
    )


class TransferWork(ctypes.Structure):
    """tardis_gpu_transfer_work."""

    _fields_ = (
        ("pieces", c_void_p),
        ("counts", c_void_p),
        ("digests", c_void_p),
        ("flags", c_void_p),
        ("most_pages", c_uint32),
        ("reserved", c_uint32),
    )


class Traffic(ctypes.Structure):
    """tardis_gpu_link_traffic."""

    _fields_ = (("words", c_void_p), ("link_class", c_uint32), ("direction", c_uint32), ("in_flight", c_uint32))


class GpuLoad(ctypes.Structure):
    """tardis_gpu_load."""

    _fields_ = (
        ("pools", GpuPools),
        ("work", TransferWork),
        ("pinned_ids", c_void_p),
        ("pinned_objects", c_void_p),
        ("pinned_pages", c_uint32),
        ("file_pages", c_uint32),
        ("file_ids", c_void_p),
        ("ring", POINTER(Layer)),
        ("slots", c_void_p),
        ("layer_blocks", c_uint64),
        ("board", c_void_p),
        ("layout", BoardLayout),
        ("shape", LoadShape),
        ("patience_ns", c_uint64),
        ("traffic", Traffic),
        ("ctas", c_uint32),
        ("reserved", c_uint32),
        ("events", c_void_p),
    )


class GpuOffload(ctypes.Structure):
    """tardis_gpu_offload."""

    _fields_ = (
        ("pools", GpuPools),
        ("work", TransferWork),
        ("ids", c_void_p),
        ("objects", c_void_p),
        ("pages", c_uint32),
        ("ctas", c_uint32),
        ("errors", c_void_p),
        ("traffic", Traffic),
    )


class GpuLoadRun(ctypes.Structure):
    """tardis_gpu_load_run; `page_runs.PAGE_RUN` is the same."""

    _fields_ = (("object", c_uint64), ("page", c_uint32), ("pages", c_uint32))


class GpuLoadRuns(ctypes.Structure):
    """tardis_gpu_load_runs."""

    _fields_ = (
        ("pools", GpuPools),
        ("runs", c_void_p),
        ("object_stride", c_uint64),
        ("link", c_void_p),
        ("events", c_void_p),
        ("run_count", c_uint32),
        ("link_class", c_uint32),
    )


class GpuLoadSizes(ctypes.Structure):
    """tardis_gpu_load_sizes."""

    _fields_ = tuple((name, c_uint32) for name in ("pools", "work", "load", "offload", "run", "runs"))


_ERROR = POINTER(c_char_p)
_SIZE = POINTER(c_size_t)
_PINNED = (c_void_p, c_uint32, c_void_p, c_size_t)  # tier, namespace, hashes, how many
_CORE = {
    "tardis_load_sizes_of": (None, (POINTER(LoadSizes),)),
    "tardis_load_board_layout_of": (c_int, (POINTER(LoadShape), POINTER(BoardLayout), _ERROR)),
    "tardis_loader_open": (c_int, (c_void_p, POINTER(LoaderOptions), POINTER(c_void_p), _ERROR)),
    "tardis_loader_close": (None, (c_void_p,)),
    "tardis_loader_get_counters": (None, (c_void_p, POINTER(LoaderCounters))),
    "tardis_load_begin": (c_int, (c_void_p, c_void_p, c_uint32, c_int, c_void_p, POINTER(c_void_p), _ERROR)),
    "tardis_load_end": (c_int, (c_void_p, c_int, POINTER(LoadResult), _ERROR)),
    "tardis_load_run": (c_int, (c_void_p, c_void_p, c_void_p, POINTER(HostLoad), _ERROR)),
    "tardis_load_wait": (c_int, (c_void_p, c_void_p, c_uint32, _ERROR)),
    "tardis_gio_store_memory_bytes": (c_size_t, (POINTER(Options),)),
    "tardis_gio_open_store": (c_int, (POINTER(Options), c_void_p, c_void_p, POINTER(c_void_p), _ERROR)),
    "tardis_lease_acquire": (c_int, (c_void_p, c_uint32, c_void_p, c_size_t, POINTER(c_void_p), _SIZE, _ERROR)),
    "tardis_lease_end": (None, (c_void_p,)),
    "tardis_lease_layout_of": (c_int, (c_void_p, POINTER(LeaseLayout), _ERROR)),
    "tardis_pinned_open": (c_int, (c_void_p, c_uint64, c_uint64, c_uint64, POINTER(c_void_p), _ERROR)),
    "tardis_pinned_close": (None, (c_void_p,)),
    "tardis_pinned_find": (c_int, (*_PINNED, c_void_p, _SIZE)),
    "tardis_pinned_pin_each": (c_int, (*_PINNED, c_void_p, c_void_p, _SIZE)),
    "tardis_pinned_unpin": (c_int, (c_void_p, c_void_p, c_size_t)),
    "tardis_pinned_reserve": (c_int, (*_PINNED, c_void_p, c_void_p, c_void_p)),
    "tardis_pinned_reserve_spare": (c_int, (*_PINNED, c_void_p, c_void_p, c_void_p)),
    "tardis_pinned_end": (c_int, (c_void_p, c_void_p, c_size_t, c_int)),
    "tardis_pinned_erase": (c_int, (*_PINNED, _SIZE)),
    "tardis_pinned_clear": (c_int, (c_void_p, _SIZE)),
    "tardis_pinned_get_counters": (c_int, (c_void_p, POINTER(PinnedCounters))),
}
_GPU = {
    "tardis_gpu_load_sizes_of": (None, (POINTER(GpuLoadSizes),)),
    "tardis_gpu_load_prepare": (c_int, ()),
    "tardis_gpu_load_enqueue": (c_int, (POINTER(GpuLoad), c_void_p)),
    "tardis_gpu_load_runs_enqueue": (c_int, (POINTER(GpuLoadRuns), c_void_p)),
    "tardis_gpu_offload_enqueue": (c_int, (POINTER(GpuOffload), c_void_p)),
    "tardis_gpu_link_create": (c_int, (POINTER(c_void_p),)),
    "tardis_gpu_link_destroy": (c_int, (c_void_p,)),
    "tardis_gpu_link_words_of": (c_void_p, (c_void_p,)),
    "tardis_gpu_link_set_budget": (c_int, (c_void_p, c_uint32, c_uint64)),
}
_STRUCTS = (Board, Repair, BoardLayout, LoadShape, LoaderOptions, LoaderCounters, LoadResult, HostLoad)
_GPU_STRUCTS = (GpuPools, TransferWork, GpuLoad, GpuOffload, GpuLoadRun, GpuLoadRuns)


def _compare(found: ctypes.Structure, structs: tuple, name: str, error: type[GioError]) -> None:
    mine = tuple(ctypes.sizeof(struct) for struct in structs)
    theirs = tuple(getattr(found, field) for field, _ in found._fields_)
    if mine != theirs:
        raise error(f"{name}: expected structs of {mine} bytes, found {theirs}; reinstall sglang-tardis")


@functools.cache
def core() -> gio_abi.Core:
    """libtardis.so with the functions named here, loaded at the first call.

    Raises:
        GioError: it is not there, or of another release.
    """
    core = gio_abi.core()
    gio_abi.bind(core.library, "libtardis.so", _CORE, GioError)
    sizes = LoadSizes()
    core.library.tardis_load_sizes_of(ctypes.byref(sizes))
    _compare(sizes, _STRUCTS, "libtardis.so", GioError)
    return core


@functools.cache
def gpu() -> gio_abi.Gpu:
    """libtardis_gpu.so with the functions named here, loaded at the first call; that needs no GPU.

    Raises:
        GpuLibraryMissingError: it is not there, or of another build than libtardis.so.
    """
    gpu = gio_abi.gpu()
    gio_abi.bind(gpu.library, "libtardis_gpu.so", _GPU, GpuLibraryMissingError)
    sizes = GpuLoadSizes()
    gpu.library.tardis_gpu_load_sizes_of(ctypes.byref(sizes))
    _compare(sizes, _GPU_STRUCTS, "libtardis_gpu.so", GpuLibraryMissingError)
    return gpu
