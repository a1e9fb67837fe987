# SPDX-License-Identifier: Apache-2.0
"""NVMe drives of this machine, for tools: `tardis/nvme.h` through ctypes (docs/vfio.md).

Answers are the JSON objects of the C ABI as dictionaries. Errors are `GioError`, whose message says what was expected,
what was found and what to do.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
from ctypes import POINTER, byref, c_char_p, c_int, c_uint32, c_uint64, c_void_p
from typing import Any

from sglang_tardis import gio_abi
from sglang_tardis.gio_abi import GioError, GpuLibraryMissingError

__all__ = [
    "GioError",
    "check_doorbells",
    "drives",
    "format_store",
    "gpu_facts",
    "gpu_memory_probes",
    "health",
    "identify",
    "release",
]


class _Machine(ctypes.Structure):
    """tardis_nvme_machine."""

    _fields_ = (("sys", c_char_p), ("proc", c_char_p), ("dev", c_char_p))


class _PeerFacts(ctypes.Structure):
    """tardis_gpu_peer_facts."""

    _fields_ = tuple((name, ctypes.c_int32) for name in ("devices", "direct_rdma", "dma_buf", "register_memory"))


_TEXT = POINTER(c_void_p)
_ERROR = POINTER(c_char_p)
_HEAD = (POINTER(_Machine), c_char_p)
_CORE = {
    "tardis_nvme_list": (c_int, (POINTER(_Machine), _TEXT, _ERROR)),
    "tardis_nvme_identify": (c_int, (*_HEAD, _TEXT, _ERROR)),
    "tardis_nvme_health": (c_int, (*_HEAD, _TEXT, _ERROR)),
    "tardis_nvme_format_store": (c_int, (*_HEAD, c_uint32, c_char_p, c_int, _TEXT, _ERROR)),
    "tardis_nvme_release": (c_int, (*_HEAD, c_char_p, c_int, _TEXT, _ERROR)),
    "tardis_nvme_gpu_memory": (c_int, (POINTER(_Machine), _TEXT, _ERROR)),
    "tardis_nvme_check_doorbells": (c_int, (*_HEAD, c_void_p, _TEXT, _ERROR)),
}
_GPU = {
    "tardis_gpu_io_memory_read": (c_int, (c_void_p, c_uint64, POINTER(c_uint32), POINTER(c_uint32), c_uint32)),
    "tardis_gpu_peer_facts_of": (c_int, (POINTER(_PeerFacts),)),
}


@functools.cache
def _core() -> gio_abi.Core:
    core = gio_abi.core()
    gio_abi.bind(core.library, "libtardis.so", _CORE, GioError)
    return core


@functools.cache
def _gpu() -> gio_abi.Gpu:
    gpu = gio_abi.gpu()
    gio_abi.bind(gpu.library, "libtardis_gpu.so", _GPU, GpuLibraryMissingError)
    return gpu


def _bytes(text: str | os.PathLike[str]) -> bytes:
    try:
        data = os.fspath(text).encode()
    except UnicodeEncodeError:
        raise GioError(f"expected a name in UTF-8, found {os.fspath(text)!r}", "invalid_argument") from None
    if b"\0" in data:
        raise GioError(f"expected a name without NUL characters, found {os.fspath(text)!r}", "invalid_argument")
    return data


def _ask(name: str, root: str, *arguments: object) -> dict[str, Any]:
    core = _core()
    machine = _Machine(*(_bytes(os.path.join(root, folder)) for folder in ("sys", "proc", "dev")))
    answer = c_void_p()
    core.call(name, byref(machine), *arguments, byref(answer))
    try:
        return json.loads(ctypes.string_at(answer.value or 0))
    finally:
        core.library.tardis_free(answer)


def drives(root: str = "/") -> list[dict[str, Any]]:
    """Every NVMe controller of the machine and who has it. Opens none of them; needs no root.

    Args:
        root: the folder that has the machine's sys, proc and dev.
    """
    return _ask("tardis_nvme_list", root)["drives"]


def identify(address: str, root: str = "/") -> dict[str, Any]:
    """What a controller and its namespaces say of themselves. Resets the controller, which vfio-pci must have."""
    return _ask("tardis_nvme_identify", root, _bytes(address))


def health(address: str, root: str = "/") -> dict[str, Any]:
    """The log page SMART / Health Information; sizes in units of `unit_bytes`. Resets the controller, as `identify`."""
    return _ask("tardis_nvme_health", root, _bytes(address))


def format_store(
    address: str, namespace: int, home: str | os.PathLike[str], *, erase: bool = False, root: str = "/"
) -> dict[str, Any]:
    """Make a namespace the place of the segments of a store in the folder `home`.

    Args:
        namespace: its id, 1 to 2^32 - 2.
        erase: whatever is on it is lost; otherwise an error says what was found.
    """
    if not 0 < namespace < 0xFFFFFFFF:
        raise GioError(f"namespace: expected an id of 1 to 4294967294, found {namespace}", "invalid_argument")
    return _ask("tardis_nvme_format_store", root, _bytes(address), namespace, _bytes(os.path.abspath(home)), int(erase))


def release(address: str, to: str = "vfio-pci", *, carry_out: bool = False, root: str = "/") -> dict[str, Any]:
    """Give a drive to the driver `to`, vfio-pci or nvme, or say how (`commands`). A drive in use is refused."""
    return _ask("tardis_nvme_release", root, _bytes(address), _bytes(to), int(carry_out))


def gpu_memory_probes(root: str = "/") -> list[dict[str, Any]]:
    """The ways in which a drive could reach GPU memory: `way`, `here` and `found`. None of them is a provider."""
    return _ask("tardis_nvme_gpu_memory", root)["probes"]


def gpu_facts() -> dict[str, int] | None:
    """What the NVIDIA driver says of the current GPU (-1: nothing); None without a GPU or libtardis_gpu.so.

    Raises:
        GioError: CUDA failed.
    """
    facts = _PeerFacts()
    try:
        _gpu().call("tardis_gpu_peer_facts_of", byref(facts))
    except GpuLibraryMissingError:
        return None
    return {name: getattr(facts, name) for name, _ in facts._fields_} if facts.devices else None


def check_doorbells(address: str, root: str = "/") -> dict[str, Any]:
    """Let the GPU read registers of a controller, which vfio-pci must have and which is reset.

    Raises:
        GioError: the drive cannot be opened. GpuLibraryMissingError: there is no libtardis_gpu.so.
    """
    gpu = _gpu()
    reader = ctypes.cast(gpu.library.tardis_gpu_io_memory_read, c_void_p)
    verdict = _ask("tardis_nvme_check_doorbells", root, _bytes(address), reader)
    if verdict["reader_error"]:
        text = gpu.library.tardis_gpu_error_text(verdict["reader_error"]).decode()
        verdict["found"] += f": {text} (CUDA error {verdict['reader_error']})"
    return verdict
