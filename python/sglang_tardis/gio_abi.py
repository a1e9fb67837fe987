# SPDX-License-Identifier: Apache-2.0
"""The C ABI of libtardis.so and libtardis_gpu.so that gio sessions, torch ops and indexes use, through ctypes.

ctypes and not a pybind11 module: pointers, sizes and a stream are all that crosses, and so one build of the libraries
serves every Python. What is declared twice is compared with the libraries when they are loaded. No logic here; neither
torch nor `_core` is imported. Sources: cpp/include/tardis/gio.h, gio_layer.h, host_index.h, cpp/gio/layer_launch.h,
cpp/gstore/index.h.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from pathlib import Path

from sglang_tardis.codes import CODES

__all__ = ["GioError", "GpuLibraryMissingError", "Index", "Layer", "Options", "Sizes", "bind", "core", "gpu"]

WRITE, READ = 1, 2


class GioError(Exception):
    """A library refused or failed; the message says what was expected, what was found and what to do.

    Attributes:
        code: as `sglang_tardis.store.TardisError.code`, or "cuda" for an error of the CUDA runtime.
    """

    def __init__(self, message: str, code: str = "internal") -> None:
        super().__init__(message)
        self.code = code


class GpuLibraryMissingError(GioError):
    """libtardis_gpu.so is not there, cannot be loaded, or is of another build than libtardis.so."""


class Options(ctypes.Structure):
    """tardis_gio_options."""

    _fields_ = (
        ("bytes", c_uint64),
        ("file", c_char_p),
        ("block_bytes", c_uint32),
        ("controller_threads", c_uint32),
        ("queues", c_uint32),
        ("entries", c_uint32),
        ("commands", c_uint32),
        ("slot_bytes", c_uint32),
    )


class Layer(ctypes.Structure):
    """tardis_gio_layer: pointers are addresses, of this process or of the device."""

    _fields_ = (
        ("pool_pages", c_void_p),
        ("slots", c_void_p),
        ("count", c_void_p),
        ("slot_blocks", c_void_p),
        ("pools", c_uint64 * 2),
        ("page_stride", c_uint64 * 2),
        ("page_bytes", c_uint32 * 2),
        ("most_pages", c_uint32),
        ("pool_page_count", c_uint32),
        ("slot_count", c_uint32),
        ("op", c_uint32),
        ("first_block", c_uint64),
        ("blocks_per_slot", c_uint64),
        ("digests", c_uint64),
        ("digest_stride", c_uint64),
        ("block_bytes", c_uint32),
        ("most_bytes", c_uint32),
        ("contexts", c_void_p),
        ("context_count", c_void_p),
        ("ended", c_void_p),
        ("work", c_void_p),
        ("statuses", c_void_p),
        ("reports", c_void_p),
        ("flag", c_void_p),
        ("deadline_ns", c_uint64),
        ("queues", c_void_p),
        ("rings", c_uint32),
        ("ctas", c_uint32),
    )


class Sizes(ctypes.Structure):
    """tardis_gio_sizes."""

    _fields_ = tuple(
        (name, c_uint32)
        for name in (
            "layer",
            "layer_statuses",
            "layer_ctas",
            "context",
            "report",
            "queue",
            "state",
            "most_contexts",
            "most_queues",
        )
    )


class Index(ctypes.Structure):
    """tardis_gpu_index."""

    _fields_ = (("words", c_void_p), ("records", c_void_p), ("buckets", c_uint32), ("patience", c_uint32))


REPORT_BYTES = 64  # RingReport (cpp/gio/iocb.h): nine words, padding, a completion entry
TICKET_BYTES = 64  # tardis_gpu_ticket
_ERROR = POINTER(c_char_p)
_CORE = {
    "tardis_gio_memory_bytes": (c_size_t, (POINTER(Options),)),
    "tardis_gio_open": (c_int, (POINTER(Options), c_void_p, POINTER(c_void_p), _ERROR)),
    "tardis_gio_close": (None, (c_void_p,)),
    "tardis_gio_tables": (
        c_int,
        (c_void_p, POINTER(c_void_p), POINTER(c_size_t), POINTER(c_void_p), POINTER(c_size_t), _ERROR),
    ),
    "tardis_gio_queues": (c_int, (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, _ERROR)),
    "tardis_gio_renew": (c_int, (c_void_p, _ERROR)),
    "tardis_gio_rest": (c_int, (c_void_p, c_uint32, c_uint32, _ERROR)),
    "tardis_gio_expect": (None, (c_void_p, c_int)),
    "tardis_gio_read": (c_int, (c_void_p, c_uint64, c_void_p, c_size_t, _ERROR)),
    "tardis_gio_write": (c_int, (c_void_p, c_uint64, c_void_p, c_size_t, _ERROR)),
    "tardis_gio_flush": (c_int, (c_void_p, _ERROR)),
    "tardis_gio_report": (c_void_p, (c_void_p,)),
    "tardis_free": (None, (c_void_p,)),
    "tardis_gio_layer_sizes": (None, (POINTER(Sizes),)),
    "tardis_gio_host_start": (c_int, (c_void_p, c_uint32, _ERROR)),
    "tardis_gio_host_work_bytes": (c_size_t, (c_void_p, c_uint32)),
    "tardis_gio_host_layer": (c_int, (POINTER(Layer), _ERROR)),
    "tardis_index_memory_bytes": (c_uint64, (c_uint64,)),
    "tardis_index_place": (c_int, (POINTER(Index), c_void_p, c_uint64, _ERROR)),
    "tardis_index_lookup": (
        c_int,
        (POINTER(Index), c_void_p, c_void_p, c_uint32, c_uint16, c_void_p, _ERROR),
    ),
    "tardis_index_apply": (c_int, (POINTER(Index), c_void_p, c_uint32, POINTER(c_uint8), _ERROR)),
}
_GPU = {
    "tardis_gpu_load": (c_int, ()),
    "tardis_gpu_error_text": (c_char_p, (c_int,)),
    "tardis_gpu_gio_layer_sizes": (None, (POINTER(Sizes),)),
    "tardis_gpu_gio_start_queues": (c_int, (c_void_p, c_uint32, c_void_p)),
    "tardis_gpu_gio_layer": (c_int, (POINTER(Layer), c_void_p)),
    "tardis_gpu_gio_wait": (c_int, (c_void_p, c_void_p)),
    "tardis_gpu_index_memory_bytes": (c_uint64, (c_uint64,)),
    "tardis_gpu_index_place": (c_int, (POINTER(Index), c_void_p, c_uint64)),
    "tardis_gpu_index_lookup": (
        c_int,
        (POINTER(Index), c_void_p, c_void_p, c_uint32, c_uint16, c_void_p, c_void_p, c_void_p, c_uint32, c_void_p),
    ),
    "tardis_gpu_index_apply": (
        c_int,
        (POINTER(Index), c_void_p, c_void_p, c_uint32, c_void_p, c_void_p, c_void_p, c_uint32, c_void_p),
    ),
}


def _folders() -> list[Path]:
    """Where the libraries lie: beside this package's modules, or beside `_core` (an editable installation)."""
    folders = [Path(__file__).parent]
    core_module = importlib.util.find_spec("sglang_tardis._core")
    if core_module is not None and core_module.origin:
        folders.append(Path(core_module.origin).parent)
    return folders


def _load(name: str, functions: dict, error: type[GioError], advice: str) -> ctypes.CDLL:
    places = [folder / name for folder in _folders()]
    found = next((place for place in places if place.exists()), None)
    if found is None:
        raise error(f"{name}: expected it at {' or '.join(map(str, places))}, found none; {advice}", "not_found")
    try:
        library = ctypes.CDLL(str(found))
        for function, (result, arguments) in functions.items():
            entry = getattr(library, function)
            entry.restype, entry.argtypes = result, arguments
    except (OSError, AttributeError) as reason:
        raise error(f"{found}: expected a library of this release, found: {reason}; {advice}") from reason
    return library


def bind(library: ctypes.CDLL, name: str, functions: dict, error: type[GioError]) -> None:
    """Declare further functions of a library, {function: (result, arguments)}; `error` if it lacks one."""
    for function, (result, arguments) in functions.items():
        try:
            entry = getattr(library, function)
        except AttributeError:
            raise error(f"{name}: expected {function}, found none; reinstall sglang-tardis") from None
        entry.restype, entry.argtypes = result, arguments


def _compare(sizes: Sizes, name: str, error: type[GioError]) -> None:
    mine = (ctypes.sizeof(Layer), Layer.statuses.offset, Layer.ctas.offset, REPORT_BYTES)
    found = (sizes.layer, sizes.layer_statuses, sizes.layer_ctas, sizes.report)
    if mine != found:
        raise error(f"{name}: expected structs as {mine}, found {found}; reinstall sglang-tardis")


class Core:
    """libtardis.so: its functions, with error codes turned into `GioError`."""

    def __init__(self) -> None:
        self.library = _load("libtardis.so", _CORE, GioError, "install sglang-tardis")
        self.sizes = Sizes()
        self.library.tardis_gio_layer_sizes(byref(self.sizes))
        _compare(self.sizes, "libtardis.so", GioError)

    def call(self, name: str, *arguments: object) -> None:
        """A function whose last argument is the place for an error; the GIL is released meanwhile."""
        error = c_char_p()
        code = getattr(self.library, name)(*arguments, byref(error))
        if code == 0:
            return
        text = error.value.decode() if error.value else name
        self.library.tardis_free(error)
        raise GioError(text, CODES[code] if code < len(CODES) else "internal")

    def text(self, name: str, *arguments: object) -> str:
        """A function that returns text to be freed."""
        address = getattr(self.library, name)(*arguments)
        if not address:
            raise GioError(f"{name}: out of memory")
        try:
            return ctypes.string_at(address).decode()
        finally:
            self.library.tardis_free(address)


class Gpu:
    """libtardis_gpu.so: its functions, with CUDA errors turned into `GioError`."""

    def __init__(self) -> None:
        advice = "build sglang-tardis where nvcc is (TARDIS_CUDA=ON says why not), or use device='cpu'"
        self.library = _load("libtardis_gpu.so", _GPU, GpuLibraryMissingError, advice)
        sizes = Sizes()
        self.library.tardis_gpu_gio_layer_sizes(byref(sizes))
        if bytes(sizes) != bytes(core().sizes):
            raise GpuLibraryMissingError(
                "libtardis_gpu.so: expected the build of libtardis.so, found other sizes; reinstall sglang-tardis"
            )

    def call(self, name: str, *arguments: object) -> None:
        """A function that returns a cudaError_t."""
        code = getattr(self.library, name)(*arguments)
        if code != 0:
            text = self.library.tardis_gpu_error_text(code).decode()
            raise GioError(f"{name}: {text} (CUDA error {code})", "cuda")


@functools.cache
def core() -> Core:
    """libtardis.so, loaded at the first call.

    Raises:
        GioError: it is not there, or of another release.
    """
    return Core()


@functools.cache
def gpu() -> Gpu:
    """libtardis_gpu.so, loaded at the first call; that needs no GPU.

    Raises:
        GpuLibraryMissingError: it is not there, or of another build than libtardis.so.
    """
    return Gpu()
