# SPDX-License-Identifier: Apache-2.0
"""Stores that are spread over several folders: what a drive that is away, replaced or given wrongly does to them."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from sglang_tardis import store as tardis

LAYOUT = tardis.ObjectLayout(parts=2, region_bytes=(48 << 10, 16 << 10))
PAGES, BATCH = 200, 20
FINGERPRINT = b"several-paths-01"
OPTIONS = tardis.StoreOptions(
    capacity_bytes=128 << 20, segment_bytes=4 << 20, free_space_floor=0, engine="sync", io_workers=2
)
# Opens a store with the further folders given, stores what it is told to, and is killed, or says what stops it.
PROGRAM = """
import os, signal, sys
import numpy as np
import test_paths as tests
first, *further = sys.argv[1:]
try:
    store = tests.open_store(first, further)
except tests.tardis.TardisError as error:
    print(f"{type(error).__name__}: {error}")
    sys.exit(3)
print("open", flush=True)
if sys.stdin.readline() == "kill\\n":
    store.flush()
    os.kill(os.getpid(), signal.SIGKILL)
store.close()
"""


class Pages:
    """Pages in memory whose bytes follow from the seed."""

    def __init__(self, count: int = PAGES, seed: int = 0) -> None:
        self.hashes = np.frombuffer(
            b"".join(hashlib.sha256(f"{seed}/{number}".encode()).digest() for number in range(count)), dtype=np.uint8
        ).reshape(count, 32)
        self.bytes = np.random.default_rng(seed).integers(0, 256, (count, LAYOUT.object_bytes), dtype=np.uint8)
        regions = [0, LAYOUT.region_bytes[0]]
        starts = [part * sum(LAYOUT.region_bytes) + start for part in range(LAYOUT.parts) for start in regions]
        self._starts = np.array(starts, dtype=np.uint64)

    def pieces(self, memory: np.ndarray) -> np.ndarray:
        """Addresses of the pages in an array shaped as `bytes`."""
        pages = np.arange(len(memory), dtype=np.uint64)[:, None] * np.uint64(LAYOUT.object_bytes)
        return np.uint64(memory.ctypes.data) + pages + self._starts

    def put(self, space: tardis.Namespace) -> None:
        """Store all, a batch at a time."""
        pieces = self.pieces(self.bytes)
        for first in range(0, len(self.hashes), BATCH):
            batch = slice(first, first + BATCH)
            parent = self.hashes[first - 1].tobytes() if first else None
            assert space.set(self.hashes[batch], pieces[batch], parent=parent).all()

    def hits(self, space: tardis.Namespace) -> set[int]:
        """Numbers of the pages that come back, each of which must be whole, and be found by lookup as well."""
        found = set()
        memory = np.zeros_like(self.bytes)
        pieces = self.pieces(memory)
        for number in range(len(self.hashes)):
            one = slice(number, number + 1)
            looked_up = space.lookup(self.hashes[one])
            got = bool(space.get(self.hashes[one], pieces[one])[0])
            assert looked_up == got
            if got:
                assert np.array_equal(memory[number], self.bytes[number])
                found.add(number)
        return found


ALL = set(range(PAGES))


def open_store(first, further=None) -> tardis.Store:
    return tardis.Store(first, msgspec.structs.replace(OPTIONS, more_paths=further))


def space_of(store: tardis.Store) -> tardis.Namespace:
    return store.namespace(FINGERPRINT, '{"model_name": "m"}', LAYOUT)


def hits(first, further=None) -> set[int]:
    """What an opening of the store gives back."""
    with open_store(first, further) as store:
        return Pages().hits(space_of(store))


def segments(folder: Path) -> list[Path]:
    return sorted((folder / "segments").glob("*.seg"))


def states(store: tardis.Store) -> dict[str, str]:
    return {one["path"]: one["state"] for one in store.path_report()["paths"]}


def start(*folders: Path) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, folders)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def crash(*folders: Path) -> None:
    """Let a process open the store, and be killed with it open."""
    with start(*folders) as process:
        assert process.communicate("kill\n", timeout=60)[0] == "open\n"
    assert process.returncode < 0


@pytest.fixture
def a(tmp_path: Path) -> Path:
    return tmp_path / "a"


@pytest.fixture
def b(tmp_path: Path) -> Path:
    """Of a drive of its own, so that all of it can go away."""
    (tmp_path / "drive").mkdir()
    return tmp_path / "drive" / "b"


@pytest.fixture
def filled(a: Path, b: Path) -> tuple[set[int], set[int]]:
    """A store in both folders; numbers of the pages that lie in each."""
    with open_store(a, [b]) as store:
        Pages().put(space_of(store))
        store.flush()
    there = segments(b)
    assert segments(a) and there
    data = b"".join(file.read_bytes() for file in there)
    pages = Pages()
    in_b = {number for number in range(PAGES) if pages.bytes[number, : 48 << 10].tobytes() in data}
    assert in_b and in_b != ALL, "the pages are not spread"
    return ALL - in_b, in_b


def test_pages_are_spread_and_come_back(a: Path, b: Path):
    with open_store(a, [b]) as store:
        space = space_of(store)
        Pages().put(space)
        assert Pages().hits(space) == ALL
        report, stats = store.path_report()["paths"], store.stats()
        assert [(one["path"], one["state"], one["reason"]) for one in report] == [
            (str(a), "in use", ""),
            (str(b), "in use", ""),
        ]
        assert [one["segments"] for one in report] == [len(segments(a)), len(segments(b))]
        assert all(one["segments"] > 0 and one["free_bytes"] > 0 for one in report)
        assert (stats["paths"], stats["paths_out"]) == (2, 0)
    assert (b / "tardis.path").is_file()
    assert {entry.name for entry in b.iterdir()} == {"tardis.path", "segments", "LOCK"}
    assert hits(a, [b]) == ALL
    assert hits(a) == ALL, "without a list: the folders that the store has"
    assert segments(b)


def test_capacity_counts_all_folders(a: Path, b: Path):
    options = msgspec.structs.replace(OPTIONS, capacity_bytes=(16 << 20) + (1 << 20), more_paths=[b])
    with tardis.Store(a, options) as store:
        space = space_of(store)
        pages = Pages()
        for first in range(0, PAGES, BATCH):
            batch = slice(first, first + BATCH)
            space.set(pages.hashes[batch], pages.pieces(pages.bytes)[batch])
        store.flush()
        assert store.stats()["allocated_bytes"] <= 16 << 20
    files = segments(a) + segments(b)
    assert sum(file.stat().st_blocks * 512 for file in files) <= options.capacity_bytes
    assert segments(b)


def test_a_missing_folder_is_left_out_and_comes_back(a: Path, b: Path, filled):
    in_a, _ = filled
    b.parent.rename(b.parent.with_name("unmounted"))
    with open_store(a, [b]) as store:
        assert Pages().hits(space_of(store)) == in_a
        assert states(store) == {str(a): "in use", str(b): "out"}
        assert store.path_report()["paths"][1]["reason"]
        assert any(str(b) in note for note in store.path_report()["notes"])
        assert (store.stats()["paths"], store.stats()["paths_out"]) == (2, 1)
        more = Pages(BATCH, seed=1)
        more.put(space_of(store))
        assert len(more.hits(space_of(store))) == BATCH, "the store goes on"
    assert not b.parent.exists(), "nothing is made in the place of what is missing"
    assert [one["state"] for one in tardis.inspect(a)["paths"]] == ["present", "missing"]
    b.parent.with_name("unmounted").rename(b.parent)
    with open_store(a, [b]) as store:
        assert Pages().hits(space_of(store)) == ALL
        assert len(more.hits(space_of(store))) == BATCH
        assert set(states(store).values()) == {"in use"}


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_what_was_deleted_while_a_folder_was_away_stays_deleted(a: Path, b: Path, filled, how: str):
    in_a, _ = filled
    b.parent.rename(b.parent.with_name("unmounted"))
    with open_store(a, [b]) as store:
        assert store.clear() == len(in_a)
    b.parent.with_name("unmounted").rename(b.parent)
    if how == "killed":
        crash(a, b)
    for _ in range(2):
        with open_store(a, [b]) as store:
            pages = Pages()
            assert store.stats()["paths_out"] == 0
            assert pages.hits(space_of(store)) == set() and pages.hits(space_of(store)) == set()
    with open_store(a, [b]) as store:  # and the folder is of use again
        Pages().put(space_of(store))
    assert hits(a, [b]) == ALL and segments(b)


def test_one_page_deleted_while_a_folder_was_away(a: Path, b: Path, filled):
    """What is there cannot be told from what was deleted, so all of it goes."""
    in_a, in_b = filled
    b.parent.rename(b.parent.with_name("unmounted"))
    with open_store(a, [b]) as store:
        store.remove(Pages().hashes[min(in_b)].tobytes().hex())
    b.parent.with_name("unmounted").rename(b.parent)
    assert hits(a, [b]) == in_a


def test_a_folder_that_is_not_named_is_forgotten(a: Path, b: Path, filled):
    in_a, _ = filled
    assert hits(a, []) == in_a
    assert [one["path"] for one in tardis.inspect(a)["paths"]] == [str(a)]
    assert hits(a) == in_a, "without a list: as it was named last"
    with open_store(a, [b]) as store:
        assert Pages().hits(space_of(store)) == in_a, "it starts empty"
        assert states(store) == {str(a): "in use", str(b): "in use"}
        Pages().put(space_of(store))
        assert Pages().hits(space_of(store)) == ALL
    assert hits(a, [b]) == ALL


def test_a_folder_that_is_forgotten_while_it_is_away_starts_empty(a: Path, b: Path, filled):
    in_a, _ = filled
    b.parent.rename(b.parent.with_name("unmounted"))
    assert hits(a, []) == in_a
    b.parent.with_name("unmounted").rename(b.parent)
    assert hits(a, [b]) == in_a


def test_processes_with_other_folders_are_refused(a: Path, b: Path, tmp_path: Path):
    c = tmp_path / "c"
    with open_store(a, [b]) as store:
        Pages().put(space_of(store))
        for further in ([c], [], [b, c]):
            with start(a, *further) as process:
                said = process.communicate("", timeout=60)[0]
            assert process.returncode == 3 and said.startswith("StoreSettingError: "), said
            assert str(b) in said and all(str(folder) in said for folder in further), said
        assert not c.exists()
        with start(a, b) as process:
            assert process.communicate("", timeout=60)[0] == "open\n"
        assert process.returncode == 0
        assert Pages().hits(space_of(store)) == ALL


def test_tools_are_given_the_first_folder_only(a: Path, b: Path, filled):
    facts = tardis.inspect(a)
    assert facts["objects"] == PAGES and facts["payload_bytes"] == PAGES * LAYOUT.object_bytes
    assert [(one["path"], one["state"], one["segments"]) for one in facts["paths"]] == [
        (str(a), "present", len(segments(a))),
        (str(b), "present", len(segments(b))),
    ]
    assert {info.key for info in tardis.list_objects(a)} == {key.tobytes() for key in Pages().hashes}
    report, problems = tardis.verify(a)
    assert (report["objects"], problems) == (PAGES, [])
    assert tardis.verify_live(a)[0]["objects"] == PAGES


def test_verify_finds_and_repairs_a_corrupt_page_in_a_further_folder(a: Path, b: Path, filled):
    number = min(filled[1])
    needle = Pages().bytes[number, : 48 << 10].tobytes()
    file = next(file for file in segments(b) if needle in file.read_bytes())
    with file.open("r+b") as opened:
        opened.seek(file.read_bytes().index(needle) + 100)
        opened.write(bytes([needle[100] ^ 1]))
    report, problems = tardis.verify(a, repair=True)
    assert report["bad_payloads"] == 1 and str(file) in problems[0]
    assert hits(a, [b]) == ALL - {number}


def test_a_folder_of_another_store_is_refused(a: Path, b: Path, tmp_path: Path, filled):
    other = tmp_path / "other"
    for further in (b, a):  # a further folder of another store, and another store's own
        with pytest.raises(tardis.TardisError, match=str(further)):
            open_store(other, [further])
    assert hits(a, [b]) == ALL, "it is left as it was"


def test_a_folder_with_something_else_in_it_is_left_alone(a: Path, b: Path):
    """Somebody may have named a folder of their own by mistake; it may be used, but not emptied."""
    b.mkdir()
    (b / "thesis.tex").write_text("years of work")
    try:
        open_store(a, [b]).close()
    except tardis.TardisError as error:
        assert str(b) in str(error)
    assert (b / "thesis.tex").read_text() == "years of work"


def test_a_folder_given_twice_is_refused(a: Path, b: Path, tmp_path: Path):
    link = tmp_path / "link"
    link.symlink_to(b)
    for further in ([b, b], [a], [b, f"{b}/"], [b, link]):
        with pytest.raises(tardis.StoreSettingError, match=str(further[-1]).rstrip("/")):
            open_store(a, further)


def test_sixteen_folders_and_no_more(a: Path, tmp_path: Path):
    further = [tmp_path / f"further-{number}" for number in range(16)]
    with pytest.raises(tardis.StoreSettingError, match="15"):
        open_store(a, further)
    with open_store(a, further[:15]) as store:
        assert len(states(store)) == 16 and store.stats()["paths"] == 16
        Pages().put(space_of(store))
    assert hits(a) == ALL


def test_the_report_is_of_the_moment_and_outlives_the_store(a: Path, b: Path):
    store = open_store(a, [b])
    before = store.path_report()["paths"]
    assert [one["segments"] for one in before] == [0, 0]
    Pages().put(space_of(store))
    assert sum(one["segments"] for one in store.path_report()["paths"]) > 0
    store.close()
    assert store.path_report()["engine"] == "sync"


def test_layers_are_striped_over_the_folders(a: Path, b: Path):
    layers = msgspec.structs.replace(OPTIONS, more_paths=[b], placement="layers")
    with tardis.Store(a, layers) as store:
        Pages().put(space_of(store))
        assert Pages().hits(space_of(store)) == ALL
    parts = sorted(
        folder / "segments" / part.name for folder in (a, b) for part in (folder / "segments").glob("*.part")
    )
    assert parts and len(parts) == len(segments(a) + segments(b))
    assert sum(file.stat().st_size for file in [*parts, *segments(a), *segments(b)]) <= OPTIONS.capacity_bytes
    # The parts of a page lie on the two drives in turn, each as one run of bytes.
    halves = [(folder, b"".join(file.read_bytes() for file in (folder / "segments").iterdir())) for folder in (a, b)]
    for number in range(0, PAGES, 37):
        size = sum(LAYOUT.region_bytes)
        page = Pages().bytes[number].tobytes()
        where = [[folder for folder, half in halves if page[at : at + size] in half] for at in (0, size)]
        assert sorted(where) == [[a], [b]]
    assert hits(a) == ALL  # whatever the setting says now
    report, problems = tardis.verify(a)
    assert report["objects"] == PAGES and problems == []
    b.rename(b.with_name("away"))
    assert hits(a) == set()
    b.with_name("away").rename(b)
    assert hits(a) == ALL
    crash(a, b)
    assert hits(a) == ALL


def test_the_benchmark_of_several_drives(tmp_path: Path):
    root = Path(__file__).resolve().parent.parent
    result = tmp_path / "result.json"
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    command = [sys.executable, "bench/paths.py", "--quick", "--mib", "16", "--repetitions", "1", "--json", str(result)]
    for folder in folders:
        command += ["--folder", str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run(command, cwd=root, env=environment, check=True, timeout=300, stdout=subprocess.DEVNULL)
    rows = json.loads(result.read_text())["rows"]
    assert {row["system"] for row in rows if row["ratio"]} == {"all drives, objects", "all drives, layers"}
    assert all(row["value"] > 0 for row in rows) and not list(tmp_path.glob("*/paths-bench"))
