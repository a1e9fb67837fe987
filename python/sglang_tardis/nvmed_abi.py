# SPDX-License-Identifier: Apache-2.0
"""The C ABI of an NVMe broker, through ctypes; no logic, no torch. Source: cpp/include/tardis/nvmed.h."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, byref, c_char_p, c_int, c_uint32, c_uint64, c_void_p

from . import gio_abi
from .gio_abi import GioError

__all__ = ["NO_GROUP", "Nvmed", "Options", "default_options", "drop_privileges"]

NO_GROUP = 0xFFFFFFFF


class Options(ctypes.Structure):
    """tardis_nvmed_options."""

    _fields_ = (
        ("client_bytes", c_uint64),
        ("group", c_uint32),
        ("clients", c_uint32),
        ("queues", c_uint32),
        ("client_queues", c_uint32),
        ("client_ranges", c_uint32),
        ("client_regions", c_uint32),
    )


_LOG = CFUNCTYPE(None, c_void_p, c_char_p)
_ERROR = POINTER(c_char_p)
_FUNCTIONS = {
    "tardis_nvmed_options_bytes": (c_uint64, ()),
    "tardis_nvmed_default_options": (None, (POINTER(Options),)),
    "tardis_nvmed_open": (
        c_int,
        (c_char_p, c_char_p, POINTER(Options), _LOG, c_void_p, POINTER(c_void_p), POINTER(c_void_p), _ERROR),
    ),
    "tardis_nvmed_drop_privileges": (c_int, (c_uint32, c_uint32, c_uint32, _ERROR)),
    "tardis_nvmed_run": (c_int, (c_void_p, _ERROR)),
    "tardis_nvmed_stop": (None, (c_void_p,)),
    "tardis_nvmed_close": (None, (c_void_p,)),
}


@functools.cache
def _core() -> gio_abi.Core:
    loaded = gio_abi.core()
    gio_abi.bind(loaded.library, "libtardis.so", _FUNCTIONS, GioError)
    found = loaded.library.tardis_nvmed_options_bytes()
    if found != ctypes.sizeof(Options):
        raise GioError(
            f"libtardis.so: expected options of {ctypes.sizeof(Options)} bytes, found {found}; reinstall sglang-tardis"
        )
    return loaded


def default_options() -> Options:
    """What `tardis nvmed` does without options.

    Raises:
        GioError: libtardis.so is not there, or of another release.
    """
    options = Options()
    _core().library.tardis_nvmed_default_options(byref(options))
    return options


def drop_privileges(user: int, group: int, more: int = NO_GROUP) -> None:
    """Make this process one of `user`, `group` and, beside it, the group `more` alone, without capabilities, for good.

    Raises:
        GioError: the kernel refused; only root may.
    """
    _core().call("tardis_nvmed_drop_privileges", user, group, more)


class Nvmed:
    """A broker that listens.

    Raises:
        GioError: the drive cannot be had, or the socket; the message says why and what to do.
    """

    def __init__(self, pci_address: str, socket: str, options: Options, log: Callable[[str], None]) -> None:
        self._core = _core()
        self._log = _LOG(lambda _context, line: log(line.decode(errors="replace")))  # kept: it is called until close()
        self._handle = c_void_p()
        report = c_void_p()
        self._core.call(
            "tardis_nvmed_open",
            pci_address.encode(),
            socket.encode(),
            byref(options),
            self._log,
            None,
            byref(self._handle),
            byref(report),
        )
        self.report = ctypes.string_at(report).decode()  # one line on the drive
        self._core.library.tardis_free(report)

    def run(self) -> None:
        """Serve until `stop`; the GIL is released meanwhile.

        Raises:
            GioError: the drive is of no use any more.
        """
        self._core.call("tardis_nvmed_run", self._handle)

    def stop(self) -> None:
        """End `run`, from any thread."""
        self._core.library.tardis_nvmed_stop(self._handle)

    def close(self) -> None:
        """Shut the drive down in good order and give it back; nobody is in `run`."""
        if self._handle:
            self._core.library.tardis_nvmed_close(self._handle)
            self._handle = c_void_p()
