# SPDX-License-Identifier: Apache-2.0
"""Offloads whose copies end late or fail, and what becomes of their slots (the GPU's part is played by the test)."""

from __future__ import annotations

import ctypes
import hashlib
import threading

import numpy as np
import pytest
from sglang_tardis.gio_abi import GioError
from sglang_tardis.offload_plan import plan_offload
from sglang_tardis.pinned_tier import PinnedTier
from sglang_tardis.store import ObjectLayout, Store, StoreOptions
from sglang_tardis.write_behind import Offload, WriteBehind

PAGE = 8192  # two layers of K and V, 2048 bytes each
OFFSETS = np.arange(0, PAGE, 2048, dtype=np.uint64)


class LateCopy:
    """A copy that ends when the test says so."""

    def __init__(self, good: bool = True) -> None:
        self.good, self.done = good, threading.Event()

    def is_done(self) -> bool:
        return self.done.is_set()

    def wait(self) -> bool:
        assert self.done.wait(20)
        return self.good


@pytest.fixture
def rig(tmp_path):
    store = Store(tmp_path / "store", StoreOptions(capacity_bytes=64 << 20, free_space_floor=0))
    namespace = store.namespace(b"write-behind-tst", "{}", ObjectLayout(2, (2048, 2048)))
    tier = PinnedTier(6 * PAGE, PAGE, pinned=False)
    behind = WriteBehind(tier, OFFSETS, 100 * PAGE)
    yield tier, namespace, behind
    behind.close()
    tier.close()
    store.close()


def keys(*names):
    return np.frombuffer(b"".join(hashlib.sha256(name.encode()).digest() for name in names), np.uint8).reshape(-1, 32)


def offload(rig, hashes, copy, room=100, writes=True):
    """Plan and submit; the bytes are there at once, whenever the copy says so."""
    tier, namespace, behind = rig
    plan = plan_offload(tier, namespace, hashes, writes=writes, room=room)
    for position, address in zip(plan.positions.tolist(), plan.addresses.tolist(), strict=True):
        ctypes.memmove(address, content(hashes[position]), PAGE)
    behind.submit(
        Offload(
            plan.whole,
            copy=copy,
            filled=plan.filled,
            kept=plan.kept,
            pinned=plan.pinned,
            runs=plan.runs,
            namespace=namespace,
        )
    )
    return plan


def content(key):
    return bytes(key) * (PAGE // 32)


def stored(namespace, hashes):
    memory = np.zeros((len(hashes), PAGE), np.uint8)
    pieces = memory.ctypes.data + np.arange(len(hashes), dtype=np.uint64)[:, None] * PAGE + OFFSETS
    ok = namespace.get(hashes, pieces)
    return [bool(one) and memory[i].tobytes() == content(hashes[i]) for i, one in enumerate(ok)]


def test_results_come_in_order_and_nothing_is_found_before_its_copy_is_done(rig):
    tier, namespace, behind = rig
    first, second = LateCopy(), LateCopy()
    a, b = keys("a", "b"), keys("c")
    offload(rig, a, first)
    offload(rig, b, second)
    second.done.set()
    assert behind.num_completed() == 0
    with pytest.raises(IndexError, match="expected an offload that is done"):
        behind.pop()
    assert tier.find(namespace.handle, a).tolist() == [False, False] and namespace.lookup(a) == 0
    first.done.set()
    assert behind.num_completed() == 2 and behind.pop() and behind.pop()
    assert tier.find(namespace.handle, a).all() and tier.find(namespace.handle, b).all()
    behind.drain()
    assert stored(namespace, a) == [True, True] and stored(namespace, b) == [True]
    assert tier.counters()["pinned"] == tier.counters()["reserved"] == 0


def test_a_copy_that_fails_leaves_nothing(rig):
    tier, namespace, behind = rig
    copy = LateCopy(good=False)
    copy.done.set()
    hashes = keys("a", "b")
    offload(rig, hashes, copy)
    assert behind.num_completed() == 1 and behind.pop() is False
    behind.drain()
    assert namespace.lookup(hashes) == 0 and not tier.find(namespace.handle, hashes).any()
    state = behind.state()
    assert state["copy_failed"] == 2 and state["waiting_bytes"] == 0
    assert tier.counters()["reserved"] == tier.counters()["pinned"] == 0


def test_what_is_to_be_stored_stays_until_it_is(rig, monkeypatch):
    """The store is slow; other pages want the slots."""
    tier, namespace, behind = rig
    gate, set_pages = threading.Event(), type(namespace).set
    monkeypatch.setattr(type(namespace), "set", lambda *arguments: gate.wait(20) and set_pages(*arguments))
    mine = keys("a", "b", "c", "d")
    done = LateCopy()
    done.done.set()
    offload(rig, mine, done)
    assert behind.num_completed() == 1, "the pool's pages may change before they are stored"
    plan = offload(rig, keys("e", "f", "g", "h"), done)
    assert (len(plan.positions), plan.no_room, plan.whole) == (2, 2, False)
    assert tier.counters()["refused_full"] == 2
    gate.set()
    behind.drain()
    assert stored(namespace, mine) == [True] * 4
    assert stored(namespace, keys("e", "f")) == [True] * 2


def test_a_page_that_another_offload_fills_is_left_to_it(rig):
    tier, namespace, behind = rig
    late = LateCopy()
    offload(rig, keys("b"), late)
    done = LateCopy()
    done.done.set()
    plan = offload(rig, keys("a", "b", "c"), done)
    assert plan.positions.tolist() == [0, 2]
    assert [(len(run.hashes), run.parent) for run in plan.runs] == [(1, None), (1, keys("b").tobytes())]
    late.done.set()
    behind.drain()
    assert stored(namespace, keys("a", "b", "c")) == [True] * 3
    assert tier.counters()["pinned"] == 0


def test_pages_beyond_what_may_wait_are_kept_in_memory_and_stored_later(rig):
    tier, namespace, behind = rig
    done = LateCopy()
    done.done.set()
    hashes = keys("a", "b", "c", "d")
    plan = offload(rig, hashes, done, room=2)
    assert (plan.not_stored, plan.whole) == (2, False)
    behind.drain()
    assert namespace.lookup(hashes) == 2 and tier.find(namespace.handle, hashes).all()
    plan = offload(rig, hashes, None)  # offered again: nothing is copied
    assert len(plan.positions) == 0 and plan.whole
    behind.drain()
    assert stored(namespace, hashes) == [True] * 4
    assert tier.counters()["pinned"] == 0


def test_a_rank_that_only_reads_stores_nothing(rig):
    tier, namespace, behind = rig
    done = LateCopy()
    done.done.set()
    plan = offload(rig, keys("a", "b"), done, writes=False)
    behind.drain()
    assert plan.whole and plan.runs == [] and namespace.lookup(keys("a", "b")) == 0
    assert tier.find(namespace.handle, keys("a", "b")).all() and tier.counters()["pinned"] == 0


def test_slots_that_are_not_held_are_not_given_back(rig):
    tier, _, _ = rig
    with pytest.raises(GioError, match="expected slots that the caller holds"):
        tier.unpin(np.array([1], np.uint32))
    with pytest.raises(GioError, match="set a larger dram"):
        PinnedTier(PAGE - 1, PAGE, pinned=False)
