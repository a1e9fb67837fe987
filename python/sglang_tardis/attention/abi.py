# SPDX-License-Identifier: Apache-2.0
"""The C ABI of decode attention through ctypes (cpp/include/tardis/attention.h); no logic, no torch."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_size_t, c_uint32, c_uint64, c_void_p

from sglang_tardis import gio_abi
from sglang_tardis.gio_abi import GpuLibraryMissingError

__all__ = ["BF16", "FP8_E4M3", "FP16", "MOST_ROWS", "SECOND_POOL", "Decode", "Pool", "Store", "gpu"]

BF16, FP16, FP8_E4M3 = range(3)
SECOND_POOL = 1 << 30
MOST_ROWS = 64
ERROR_BYTES = 512


class Pool(ctypes.Structure):
    """tardis_attention_pool."""

    _fields_ = tuple(
        (name, c_uint64)
        for name in (
            "keys",
            "values",
            "slots",
            "key_slot_bytes",
            "key_head_bytes",
            "value_slot_bytes",
            "value_head_bytes",
        )
    )


class Decode(ctypes.Structure):
    """tardis_attention_decode."""

    _fields_ = (
        ("pools", Pool * 2),
        ("queries", c_void_p),
        ("output", c_void_p),
        ("lse", c_void_p),
        ("pages", c_void_p),
        ("lengths", c_void_p),
        ("workspace", c_void_p),
        ("workspace_bytes", c_uint64),
        ("query_row_bytes", c_uint64),
        ("output_row_bytes", c_uint64),
        ("page_row", c_uint64),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("key_scale", c_float),
        ("value_scale", c_float),
        ("window_left", c_int32),
        ("batch", c_uint32),
        ("query_tokens", c_uint32),
        ("query_heads", c_uint32),
        ("kv_heads", c_uint32),
        ("head_dim", c_uint32),
        ("page_tokens", c_uint32),
        ("type", c_uint32),
        ("max_tokens", c_uint32),
        ("splits", c_uint32),
        ("tuning", c_uint32),
        ("reserved", c_uint32),
    )


class Store(ctypes.Structure):
    """tardis_attention_store."""

    _fields_ = (
        ("pools", Pool * 2),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_row_bytes", c_uint64),
        ("value_row_bytes", c_uint64),
        ("slots", c_void_p),
        ("entries", c_void_p),
        ("entry_count", c_uint64),
        ("key_scale", c_float),
        ("value_scale", c_float),
        ("tokens", c_uint32),
        ("kv_heads", c_uint32),
        ("head_dim", c_uint32),
        ("page_tokens", c_uint32),
        ("type", c_uint32),
        ("reserved", c_uint32),
    )


_GPU = {
    "tardis_gpu_attention_decode": (c_int, (POINTER(Decode), c_void_p, c_char_p, c_size_t)),
    "tardis_gpu_attention_workspace": (c_int, (POINTER(Decode), POINTER(c_uint64), c_char_p, c_size_t)),
    "tardis_gpu_attention_store": (c_int, (POINTER(Store), c_void_p, c_char_p, c_size_t)),
    "tardis_gpu_attention_load": (c_int, ()),
    "tardis_gpu_attention_shapes": (c_char_p, ()),
    "tardis_gpu_attention_decode_bytes": (c_uint32, ()),
    "tardis_gpu_attention_store_bytes": (c_uint32, ()),
}


@functools.cache
def gpu() -> ctypes.CDLL:
    """libtardis_gpu.so with the functions of decode attention, loaded at the first call; that needs no GPU.

    Raises:
        GpuLibraryMissingError: it is not there, or of another build.
    """
    library = gio_abi.gpu().library
    gio_abi.bind(library, "libtardis_gpu.so", _GPU, GpuLibraryMissingError)
    mine = (ctypes.sizeof(Decode), ctypes.sizeof(Store))
    found = (library.tardis_gpu_attention_decode_bytes(), library.tardis_gpu_attention_store_bytes())
    if found != mine:
        raise GpuLibraryMissingError(
            f"libtardis_gpu.so: expected parameters of {mine} bytes, found {found}; reinstall sglang-tardis"
        )
    return library
