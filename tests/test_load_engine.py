# SPDX-License-Identifier: Apache-2.0
"""Loads that end badly, and what goes on behind them, on CPU tensors."""

from __future__ import annotations

import ctypes
import hashlib
import pathlib
import threading
import time

import numpy as np
import pytest
import torch
from sglang_tardis.gio_abi import GioError
from sglang_tardis.gio_session import GioSession
from sglang_tardis.kv_pools import KvPools
from sglang_tardis.load_engine import LoadEngine, LoadPages
from sglang_tardis.store import ObjectLayout, Store, StoreOptions

LAYERS, HALF = 2, 512  # bytes of K of a page in a layer
OBJECT = LAYERS * 2 * HALF
QUEUE_DOWN = 4  # RingError


class Rig:
    """A store of `stored` objects and an engine over pools of as many pages."""

    def __init__(self, folder, stored, loads=2):
        options = StoreOptions(capacity_bytes=256 << 20, free_space_floor=0)
        self.store = Store(folder, options)
        self.space = self.store.namespace(b"load-engine-test", "{}", ObjectLayout(LAYERS, (HALF, HALF)))
        self.hashes = np.frombuffer(
            b"".join(hashlib.sha256(i.to_bytes(4, "little")).digest() for i in range(stored)), np.uint8
        ).reshape(-1, 32)
        self.objects = np.random.default_rng(1).integers(0, 256, (stored, OBJECT), np.uint8)
        self.addresses = self.objects.ctypes.data + np.arange(stored, dtype=np.uint64) * np.uint64(OBJECT)
        pieces = self.addresses[:, None] + np.arange(0, OBJECT, HALF, dtype=np.uint64)
        assert self.space.set(self.hashes, pieces).all()
        sides = [[torch.zeros(stored, 1, HALF, dtype=torch.uint8) for _ in range(LAYERS)] for _ in range(2)]
        self.pools = KvPools(*sides, page_tokens=1)
        self.session = GioSession(self.pools.layout(512), store=self.store, queues=2, rest_us=200)
        self.engine = LoadEngine(self.store, self.space, self.pools, self.session, loads=loads)

    def pages(self, pinned, files):
        pinned, files = np.array(pinned, np.int32), np.array(files, np.int32)
        return LoadPages(
            torch.from_numpy(pinned), self.addresses[pinned], torch.from_numpy(files), self.hashes[files].copy()
        )

    def landed(self, pages):
        pairs = zip(self.pools.keys, self.pools.values, strict=True)
        halves = [buffer[pages].flatten(1).numpy() for pair in pairs for buffer in pair]
        return np.array_equal(np.concatenate(halves, axis=1), self.objects[pages])

    def load(self, pinned, files):
        return self.engine.begin(self.pages(pinned, files)).finish() and self.landed([*pinned, *files])

    def close(self):
        self.engine.close()
        self.session.close()
        self.store.close()


@pytest.fixture
def rig(tmp_path):
    rig = Rig(tmp_path / "store", 24)
    yield rig
    rig.close()


def test_a_load_that_cannot_be_waited_for_gives_its_thread_back(rig, monkeypatch):
    def broken(load):
        raise RuntimeError("as a device that is lost")

    for _ in range(5):  # there are two threads
        load = rig.engine.begin(rig.pages([0], [1, 2]))
        with monkeypatch.context() as patch:
            patch.setattr(rig.engine.runner, "wait", broken)
            with pytest.raises(RuntimeError):
                load.finish()
        assert load.finish() is False and rig.engine.under_way == 0
    assert rig.load([3, 4], [5, 6])


def switches_of_controllers():
    """How often threads of software controllers of this process gave their processor up."""
    found = 0
    for task in pathlib.Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == "tardis-nvme":
            lines = (task / "status").read_text().splitlines()
            found += sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
    return found


def test_the_controller_sleeps_while_nothing_is_read_from_files(rig, monkeypatch):
    assert rig.load([], [1, 2]) and rig.load([3], [])
    time.sleep(0.1)
    before = switches_of_controllers()
    time.sleep(0.5)
    assert switches_of_controllers() - before < 100  # of one thread that looks every 20 ms; 2,500 with pauses of 200 us
    begin, now = rig.engine.begin, lambda: rig.session._expects
    assert not now()
    first, second = begin(rig.pages([], [4])), begin(rig.pages([5], [6]))
    assert now() and first.finish() and now()  # the second one reads on
    assert second.finish() and not now()
    memory = begin(rig.pages([7], []))
    assert not now() and memory.finish() and not now()
    with monkeypatch.context() as patch:
        patch.setattr(rig.engine.runner, "begin", lambda load, pages: 1 / int(not now()))
        with pytest.raises(ZeroDivisionError):
            begin(rig.pages([], [8]))
    assert not now()
    assert rig.load([], [9]) and rig.landed([4, 5, 6, 7])


def test_loads_that_cannot_be_waited_for_do_not_keep_the_engine_open(rig, monkeypatch):
    def broken(load):
        raise RuntimeError("as a device that is lost")

    loads = [rig.engine.begin(rig.pages([0], [1, 2])) for _ in range(2)]
    monkeypatch.setattr(rig.engine.runner, "wait", broken)
    rig.engine.close()
    assert rig.engine.under_way == 0 and not rig.engine.loader
    assert [load.finish() for load in loads] == [False, False]


def test_a_namespace_that_cannot_be_opened_leaves_the_one_in_use(rig):
    class Unknown:
        handle = 4000

    with pytest.raises(GioError):
        rig.engine.use_namespace(Unknown())
    rig.engine.use_namespace(rig.space)
    assert rig.load([0], [1, 2]) and rig.engine.counters()["loads"] == 1


def test_queue_pairs_are_made_anew_while_loads_from_memory_follow_each_other(rig, monkeypatch):
    engine = rig.engine
    monkeypatch.setattr(engine, "_needs_renewal", True)
    load = engine.begin(rig.pages([0, 1], []))
    for _ in range(20):  # there is always one
        following = engine.begin(rig.pages([0, 1], []))
        assert load.finish()
        load = following
        if engine.sound:
            break
        time.sleep(0.01)
    assert engine.sound and engine.renewals == 1 and load.finish()
    assert rig.load([], [2, 3])


def test_queue_pairs_that_cannot_be_made_anew_are_given_up_once(rig, monkeypatch):
    calls = []

    def broken(stream):
        calls.append(threading.current_thread().name)
        raise GioError("no controller", "internal")

    monkeypatch.setattr(rig.session, "renew", broken)
    monkeypatch.setattr(rig.engine, "_needs_renewal", True)
    for _ in range(3):
        assert rig.load([0, 1], [])
        rig.engine.quiesce()
    assert calls == ["tardis-renew"] and not rig.engine.sound
    with pytest.raises(GioError):
        rig.engine.begin(rig.pages([], [2]))


def test_what_a_ring_once_reported_on_a_board_is_not_asked_of_a_later_load(rig):
    engine = rig.engine
    for board in engine._boards:
        reports = engine.board_layout.bytes - engine.board_layout.reports
        words = (ctypes.c_uint32 * (reports // 4)).from_address(board.address + engine.board_layout.reports)
        words[:] = [QUEUE_DOWN] * len(words)
    pages = rig.pages([], [0, 1])
    pages.file_hashes[1] = 7  # of no object: the load fails before a ring runs
    assert not engine.begin(pages).finish()
    assert engine.sound and engine.renewals == 0
