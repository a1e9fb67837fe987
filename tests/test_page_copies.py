# SPDX-License-Identifier: Apache-2.0
"""Copies out of a GPU's pools that fail half-way (the GPU's part is played by the test)."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang_tardis import page_copies
from sglang_tardis.gio_abi import GioError


class Transfers:
    """Takes one launch and refuses the next."""

    device = torch.device("cpu")

    def __init__(self):
        self.calls: list[str] = []
        self.offload_stream = SimpleNamespace(
            wait_stream=lambda stream: self.calls.append("wait"), synchronize=lambda: self.calls.append("synchronize")
        )

    def enqueue_offload(self, call):
        if "launch" in self.calls:
            raise GioError("for a test", "io")
        self.calls.append("launch")


def test_what_was_launched_has_ended_before_the_caller_gives_its_objects_up(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    transfers = Transfers()
    copies = object.__new__(page_copies.GpuPageCopies)
    copies._transfers, copies._begun, copies._end = transfers, page_copies.deque(), 0
    copies._words = np.zeros(page_copies._RING_WORDS, np.uint64)
    copies._call = SimpleNamespace(work=SimpleNamespace(most_pages=4), errors=ctypes.c_void_p())
    with pytest.raises(GioError, match="for a test"):
        copies.begin(torch.arange(8, dtype=torch.int32), np.arange(8, dtype=np.uint64), [])
    assert transfers.calls == ["wait", "launch", "synchronize"] and not copies._begun
