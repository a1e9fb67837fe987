# SPDX-License-Identifier: Apache-2.0
"""The Python face of the store: arguments, errors, the GIL, and what the tools report."""

import gc
import hashlib
import os
import pathlib
import subprocess
import sys
import threading

import msgspec
import numpy as np
import pytest
from sglang_tardis import store as tardis

LAYOUT = tardis.ObjectLayout(parts=2, region_bytes=(20_000, 12_345))
OPTIONS = tardis.StoreOptions(
    capacity_bytes=(16 << 20) + (1 << 20), segment_bytes=4 << 20, free_space_floor=0, engine="sync", io_workers=2
)
FINGERPRINT = b"python-face-test"


class Pages:
    """n pages whose bytes follow from the seed, each region at an address of its own."""

    def __init__(self, n, seed=0, layout=LAYOUT):
        self.layout = layout
        self.hashes = np.frombuffer(
            b"".join(hashlib.sha256(f"{seed}/{i}".encode()).digest() for i in range(n)), dtype=np.uint8
        ).reshape(n, 32)
        source = np.random.default_rng(seed)
        self.expected = [
            source.integers(0, 256, size, dtype=np.uint8)
            for _ in range(n * layout.parts)
            for size in layout.region_bytes
        ]
        self.memory = [array.copy() for array in self.expected]

    @property
    def pieces(self):
        shape = (len(self.hashes), self.layout.parts * len(self.layout.region_bytes))
        return np.array([array.ctypes.data for array in self.memory], dtype=np.uint64).reshape(shape)

    def poison(self):
        for array in self.memory:
            array.fill(0x5A)

    def intact(self):
        return all(np.array_equal(a, b) for a, b in zip(self.memory, self.expected, strict=True))


@pytest.fixture
def store(tmp_path):
    with tardis.Store(tmp_path / "store", OPTIONS) as opened:
        yield opened


def test_round_trip_and_reopen(tmp_path):
    pages = Pages(10)
    with tardis.Store(tmp_path / "store", OPTIONS) as store:
        space = store.namespace(FINGERPRINT, '{"model": "m"}', LAYOUT)
        assert space.lookup(pages.hashes) == 0
        assert space.set(pages.hashes[:6], pages.pieces[:6]).tolist() == [True] * 6
        assert space.set(pages.hashes[6:], pages.pieces[6:], parent=pages.hashes[5].tobytes()).all()
        assert space.lookup(pages.hashes) == 10
        store.flush()
    with tardis.Store(str(tmp_path / "store"), OPTIONS, create=False) as store:
        space = store.namespace(FINGERPRINT, '{"model": "m"}', LAYOUT)
        pages.poison()
        assert space.get(pages.hashes, pages.pieces).all()
        assert pages.intact()
        assert store.last_problem is None
        stats = store.stats()
        assert stats["get_pages_hit"] == 10 and stats["recovered_pages"] == 10 and stats["get_pages_corrupt"] == 0


def test_empty_calls(store):
    space = store.namespace(FINGERPRINT, "{}", LAYOUT)
    none = Pages(0)
    assert space.lookup(none.hashes) == 0
    assert space.set(none.hashes, none.pieces).shape == (0,)
    assert space.get(none.hashes, none.pieces).shape == (0,)


def test_wrong_arrays_are_refused_before_any_address_is_used(store):
    space = store.namespace(FINGERPRINT, "{}", LAYOUT)
    pages = Pages(3)
    good = (pages.hashes, pages.pieces)
    bad = [
        (pages.hashes[:2], pages.pieces),
        (pages.hashes, pages.pieces[:, :3]),
        (pages.hashes[:, :16], pages.pieces),
        (pages.hashes.astype(np.int64), pages.pieces),
        (pages.hashes, pages.pieces.astype(np.float64)),
        (pages.hashes.ravel(), pages.pieces),
        (pages.hashes[::-1], pages.pieces),
    ]
    for hashes, pieces in bad:
        for call in (space.set, space.get):
            with pytest.raises((tardis.StoreSettingError, TypeError, ValueError)):
                call(hashes, pieces)
    with pytest.raises((tardis.StoreSettingError, TypeError, ValueError)):
        space.set(*good, parent=b"too short")
    assert space.lookup(pages.hashes) == 0
    assert space.set(*good).all()


def test_errors_name_what_is_wrong(tmp_path):
    path = tmp_path / "store"
    with pytest.raises(tardis.TardisError) as missing:
        tardis.Store(path, OPTIONS, create=False)
    assert missing.value.code == "not_found" and str(path) in str(missing.value)
    with tardis.Store(path, OPTIONS) as store:
        with pytest.raises(tardis.StoreBusyError, match=str(os.getpid())):
            tardis.verify(path)
        other = msgspec.structs.replace(OPTIONS, capacity_bytes=OPTIONS.capacity_bytes + 1)
        with pytest.raises(tardis.StoreSettingError, match=rf"{OPTIONS.capacity_bytes}.*{other.capacity_bytes}"):
            tardis.Store(path, other)
        store.namespace(FINGERPRINT, "{}", LAYOUT)
        with pytest.raises(tardis.StoreSettingError, match="fingerprint"):
            store.namespace(FINGERPRINT, '{"other": 1}', LAYOUT)
        with pytest.raises(tardis.StoreSettingError, match="layout"):
            store.namespace(FINGERPRINT, "{}", tardis.ObjectLayout(1, (64,)))
        with pytest.raises(tardis.StoreSettingError, match="segment"):
            store.namespace(b"x" * 16, "{}", tardis.ObjectLayout(1, (64 << 20,)))
    with pytest.raises(tardis.StoreSettingError, match=r"segment_size.*4194304.*8388608"):
        tardis.Store(path, tardis.StoreOptions(segment_bytes=8 << 20, free_space_floor=0))


def test_a_closed_store_refuses_work_and_still_tells_its_counts(tmp_path):
    pages = Pages(2)
    store = tardis.Store(tmp_path / "store", OPTIONS)
    space = store.namespace(FINGERPRINT, "{}", LAYOUT)
    space.set(pages.hashes, pages.pieces)
    store.close()
    store.close()
    for call in (
        lambda: space.set(pages.hashes, pages.pieces),
        lambda: space.get(pages.hashes, pages.pieces),
        lambda: space.lookup(pages.hashes),
        lambda: store.clear(FINGERPRINT),
        store.clear,
        store.flush,
        lambda: store.namespace(b"y" * 16, "{}", LAYOUT),
    ):
        with pytest.raises(tardis.StoreClosedError):
            call()
    assert store.stats()["set_pages_written"] == 2
    assert store.path_report()["engine"] == "sync"


def test_a_forked_child_leaves_the_store_to_its_parent(tmp_path):
    """The child has neither the threads nor a ring of its own; closing there would stop the parent's."""
    pages = Pages(4)
    store = tardis.Store(tmp_path / "store", OPTIONS)
    space = store.namespace(FINGERPRINT, "{}", LAYOUT)
    assert space.set(pages.hashes, pages.pieces).all()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for call in (store.flush, store.stats, lambda: space.get(pages.hashes, pages.pieces)):
                with pytest.raises(tardis.StoreClosedError, match="forked"):
                    call()
            store.close()
            del store, space, call  # the core's destructor would close
            gc.collect()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    pages.poison()
    assert space.get(pages.hashes, pages.pieces).all() and pages.intact()
    store.close()
    with tardis.Store(tmp_path / "store", OPTIONS) as again:
        assert again.stats()["recovered_pages"] == 4


def test_a_full_store_says_why_a_suffix_is_missing(store):
    space = store.namespace(FINGERPRINT, "{}", LAYOUT)
    pages = Pages(400)
    ok = space.set(pages.hashes, pages.pieces)
    stored = int(ok.sum())
    assert 100 < stored < 400 and ok[:stored].all()
    assert store.last_problem.code == "no_space" and "capacity" in str(store.last_problem)


def test_a_corrupt_page_is_a_miss_and_is_reported(tmp_path):
    pages = Pages(3)
    path = tmp_path / "store"
    with tardis.Store(path, OPTIONS) as store:
        store.namespace(FINGERPRINT, "{}", LAYOUT).set(pages.hashes, pages.pieces)
    segment = path / "segments" / "000000.seg"
    content = segment.read_bytes()
    at = content.index(pages.expected[4].tobytes())  # part 0, region 0 of page 1
    with open(segment, "r+b") as file:
        file.seek(at + 7)
        file.write(bytes([content[at + 7] ^ 16]))
    report, problems = tardis.verify(path)
    assert report["bad_payloads"] == 1 and len(problems) == 1 and "digest" in problems[0]
    with tardis.Store(path, OPTIONS) as store:
        space = store.namespace(FINGERPRINT, "{}", LAYOUT)
        assert space.get(pages.hashes, pages.pieces).tolist() == [True, False, True]
        assert store.last_problem.code == "corrupt"
        assert store.stats()["slots_quarantined"] == 1


def test_tools_agree_with_the_store(tmp_path):
    pages = Pages(5)
    path = tmp_path / "store"
    with tardis.Store(path, OPTIONS) as store:
        store.namespace(FINGERPRINT, '{"who": "ünïcode"}', LAYOUT).set(pages.hashes, pages.pieces)
        store.flush()
        seen = tardis.inspect(path)  # of a store in use
        assert str(os.getpid()) in seen["owner"] and seen["objects"] == 5
        with pytest.raises(tardis.StoreBusyError):
            tardis.verify(path)
    seen = tardis.inspect(path)
    assert seen["owner"] == "" and seen["payload_bytes"] == 5 * LAYOUT.object_bytes
    assert seen["namespaces"][0]["description"] == '{"who": "ünïcode"}'
    calls = []
    report, problems = tardis.verify(path, progress=lambda done, total: calls.append((done, total)) or True)
    assert report["objects"] == 5 and report["bytes"] == 5 * LAYOUT.object_bytes and problems == []
    assert calls and calls[-1][0] == calls[-1][1]
    with pytest.raises(tardis.TardisError):
        tardis.verify(path, progress=lambda done, total: False)
    assert tardis.probe(tmp_path, tardis.StoreOptions(engine="sync"))["engine"] == "sync"
    assert len({tardis.digest(LAYOUT, pages.pieces[i]) for i in range(5)}) == 5


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_error_in_a_progress_callback_is_the_callers(tmp_path):
    pages = Pages(2)
    with tardis.Store(tmp_path / "store", OPTIONS) as store:
        store.namespace(FINGERPRINT, "{}", LAYOUT).set(pages.hashes, pages.pieces)

    def explode(done, total):
        raise RuntimeError("mine")

    with pytest.raises((RuntimeError, tardis.TardisError)):
        tardis.verify(tmp_path / "store", progress=explode)


@pytest.mark.parametrize(
    "setting, value",
    [("queue_depth", -1), ("queue_depth", 2**32 + 1)] + [("bounce_buffers", value) for value in (0, -1, 2**32 + 1)],
)
def test_numbers_out_of_range_are_refused_by_name(tmp_path, setting, value):
    options = tardis.StoreOptions(capacity_bytes=64 << 20, free_space_floor=0, **{setting: value})
    with pytest.raises(ValueError, match=setting):
        tardis.Store(tmp_path / "store", options)


@pytest.mark.parametrize(
    ("more_paths", "problem"),
    [
        ("/a", "expected a list"),
        (pathlib.Path("/a"), "expected a list"),
        (b"/a", "expected a list"),
        (["/a\udcff"], "UTF-8"),
        (["/a\0b"], "NUL"),
        (["/a", ""], "empty"),
    ],
)
def test_further_folders_that_cannot_be_named(tmp_path, more_paths, problem):
    options = msgspec.structs.replace(OPTIONS, more_paths=more_paths)
    with pytest.raises(tardis.StoreSettingError, match=problem):
        tardis.Store(tmp_path / "store", options)
    assert not (tmp_path / "store").exists()


def test_the_core_gets_further_folders_as_absolute_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert OPTIONS._settings()["more_paths"] is None  # those that the store has
    for named in (["a/", tmp_path / "b", "/c/../d"], ("a", tmp_path / "b", "/d")):
        settings = msgspec.structs.replace(OPTIONS, more_paths=named)._settings()
        assert settings["more_paths"] == [str(tmp_path / "a"), str(tmp_path / "b"), "/d"]
    assert msgspec.structs.replace(OPTIONS, more_paths=())._settings()["more_paths"] == []


def test_a_path_with_a_nul_character_is_not_cut_short(tmp_path):
    for call in (tardis.Store, tardis.inspect, tardis.verify, tardis.probe):
        with pytest.raises(tardis.StoreSettingError, match="NUL"):
            call(f"{tmp_path}\0store")


@pytest.mark.parametrize("call", ["set", "get", "lookup", "flush"])
def test_calls_release_the_gil(store, call):
    """With a switch interval of minutes, another thread runs only where a call gives the interpreter up by itself."""
    space = store.namespace(FINGERPRINT, "{}", LAYOUT)
    pages = Pages(30)
    assert space.set(pages.hashes, pages.pieces).all()
    calls = {
        "set": lambda: space.set(pages.hashes, pages.pieces),
        "get": lambda: space.get(pages.hashes, pages.pieces),
        "lookup": lambda: space.lookup(pages.hashes),
        "flush": store.flush,
    }
    go, ran = threading.Event(), []
    other = threading.Thread(target=lambda: (go.wait(), ran.append(True)))
    other.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(600)
    try:
        go.set()
        limit = 20_000  # a short call may end before the other thread has woken up
        while not ran and limit:
            calls[call]()
            limit -= 1
    finally:
        sys.setswitchinterval(interval)
    other.join()
    assert limit, f"{call} kept the interpreter to itself"


def test_a_store_survives_its_process(tmp_path):
    """SIGKILL after a flush: another process finds the pages."""
    code = f"""
import os, signal, sys
sys.path[:0] = {[str(pathlib.Path(__file__).parent), *sys.path]!r}
from test_store import *
pages = Pages(8)
store = tardis.Store({str(tmp_path / "store")!r}, OPTIONS)
space = store.namespace(FINGERPRINT, "{{}}", LAYOUT)
assert space.set(pages.hashes, pages.pieces).all()
store.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == -9, done.stderr
    pages = Pages(8)
    pages.poison()
    with tardis.Store(tmp_path / "store", OPTIONS) as store:
        space = store.namespace(FINGERPRINT, "{}", LAYOUT)
        assert space.get(pages.hashes, pages.pieces).all()
        assert pages.intact()
        assert any("was not closed" in note for note in store.path_report()["notes"])
