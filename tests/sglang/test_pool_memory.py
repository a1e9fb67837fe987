# SPDX-License-Identifier: Apache-2.0
"""The host pool is registered with the store, and given back before it goes."""

from __future__ import annotations

import gc
import threading
import types

import pytest
import torch
from sglang_tardis.sglang import pool_memory
from sglang_tardis.sglang.pool_memory import PoolMemory


class Recorder:
    """A store that notes what it is told; `fail`: register_memory raises."""

    def __init__(self, fail=False):
        self.fail, self.known, self.calls = fail, {}, []

    def register_memory(self, address, size):
        if self.fail:
            raise RuntimeError("no")
        self.calls.append(threading.current_thread())
        self.known[address] = size

    def stats(self):
        return {"registered_bytes": sum(self.known.values())}

    def unregister_memory(self, address):
        del self.known[address]


@pytest.fixture
def page_locked(monkeypatch):
    """Ordinary memory passes for page-locked, which there is none of without a GPU."""
    monkeypatch.setattr(pool_memory, "_page_locked", lambda tensor: True)


def pool_of(*tensors):
    return types.SimpleNamespace(kv_buffer=tensors if len(tensors) > 1 else tensors[0])


def test_each_allocation_is_registered_once_and_not_on_the_callers_thread(page_locked):
    both = torch.zeros(2, 1000)
    alone = torch.zeros(77)
    store = Recorder()
    memory = PoolMemory(store, pool_of(both[0], both[1], alone))
    memory.wait()
    assert store.known == {both.data_ptr(): 8000, alone.data_ptr(): 308}
    assert threading.current_thread() not in store.calls
    memory.release()
    assert store.known == {}
    memory.release()


def test_the_memory_is_held_while_it_is_registered(page_locked):
    tensor = torch.zeros(4096)
    memory = PoolMemory(Recorder(), pool_of(tensor))
    memory.wait()
    address = tensor.data_ptr()
    del tensor
    gc.collect()
    assert torch.zeros(4096).data_ptr() != address
    memory.release()


def test_memory_that_is_not_page_locked_is_left_alone():
    store = Recorder()
    memory = PoolMemory(store, pool_of(torch.zeros(64)))
    memory.wait()
    assert store.calls == []
    memory.release()


def test_what_cannot_be_registered_costs_nothing(page_locked):
    memory = PoolMemory(Recorder(fail=True), pool_of(torch.zeros(64)))
    memory.wait()
    memory.release()
