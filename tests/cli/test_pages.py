# SPDX-License-Identifier: Apache-2.0
"""`tardis ls`, `rm`, `prune` and `verify` on stores that nobody uses and on stores that another process has open."""

import contextlib
import io
import json
import sys
from pathlib import Path

import pytest
from cli_stores import (
    LLAMA,
    PAGE,
    PARTS,
    QWEN,
    Pages,
    answer,
    fill,
    flip_bit_of,
    flip_header_bit_of,
    in_use,
    key,
    open_store,
    space_of,
    stored,
)
from command_line import failure, needs_core, run


@pytest.fixture
def store(tmp_path: Path) -> Path:
    needs_core()
    folder = tmp_path / "store"
    fill(folder, LLAMA, 0, 10)
    fill(folder, QWEN, 10, 4)
    return folder


@pytest.fixture(params=["nobody", "another process"])
def user(request, store: Path):
    """Who uses the store meanwhile."""
    with in_use(store) if request.param == "another process" else contextlib.nullcontext(0) as pid:
        yield pid


def numbers(pages: list[dict]) -> set[int]:
    known = {key(number).tobytes().hex(): number for number in range(64)}
    return {known[page["key"]] for page in pages}


# --- ls


def test_ls_tells_every_page(store: Path, user, capsys):
    listed = answer(capsys, "ls", store)
    assert listed["path"] == str(store) and listed["count"] == 14 and listed["more"] is False
    assert numbers(listed["pages"]) == set(range(14))
    by_key = {page["key"]: page for page in listed["pages"]}
    for number in range(14):
        page = by_key[key(number).tobytes().hex()]
        assert page["namespace"] == (LLAMA if number < 10 else QWEN).hex()
        assert (page["bytes"], page["parts"], page["state"]) == (PAGE, PARTS, "stored")
        # The second page's parent is the first: its key begins with these digits. The first of each fill has none.
        before = None if number in (0, 10) else key(number - 1).tobytes().hex()[:16]
        assert page["parent"] == before
    assert len({(page["segment"], page["slot"]) for page in listed["pages"]}) == 14


def test_ls_by_key_namespace_and_limit(store: Path, capsys):
    assert numbers(answer(capsys, "ls", store, "--key", "3")["pages"]) == {3}
    assert numbers(answer(capsys, "ls", store, "--key", key(3).tobytes().hex().upper())["pages"]) == {3}
    assert answer(capsys, "ls", store, "--key", "ffff")["count"] == 0
    assert numbers(answer(capsys, "ls", store, "--namespace", QWEN.hex()[:4])["pages"]) == {10, 11, 12, 13}
    assert answer(capsys, "ls", store, "--namespace", LLAMA.hex(), "--key", "b")["count"] == 0
    for limit, more in ((0, True), (5, True), (14, False), (15, False)):
        listed = answer(capsys, "ls", store, "--limit", limit)
        assert (listed["count"], listed["more"]) == (min(limit, 14), more)
        assert len(listed["pages"]) == listed["count"]


def test_ls_in_words(store: Path, capsys):
    status, out, err = run(capsys, "ls", store)
    lines = out.splitlines()
    assert (status, err) == (0, "") and len(lines) == 16
    assert lines[0].split() == ["key", "namespace", "bytes", "generation", "segment/slot", "parent", "state"]
    assert lines[-1] == f"14 pages, {14 * PAGE // 1024}.0 KiB"
    assert sum(LLAMA.hex() in line for line in lines) == 10
    _, out, err = run(capsys, "ls", store, "--limit", 3)
    assert len(out.splitlines()) == 5 and "--limit 3" in err


def test_ls_summary(store: Path, capsys):
    sums = answer(capsys, "ls", store, "--summary")
    assert sums["namespaces"] == [
        {"namespace": LLAMA.hex(), "model": "llama", "pages": 10, "bytes": 10 * PAGE, "quarantined": 0},
        {"namespace": QWEN.hex(), "model": "qwen", "pages": 4, "bytes": 4 * PAGE, "quarantined": 0},
    ]
    _, out, _ = run(capsys, "ls", store, "--summary", "--namespace", "aaaa")
    assert len(out.splitlines()) == 2 and "llama" in out and "qwen" not in out
    assert "no pages" in run(capsys, "ls", store, "--summary", "--key", "ffff")[1]


def test_ls_tells_of_a_quarantined_page(store: Path, capsys):
    flip_bit_of(store, 4)
    run(capsys, "verify", store, "--repair")
    states = {page["key"]: page["state"] for page in answer(capsys, "ls", store)["pages"]}
    assert [digest for digest, state in states.items() if state == "quarantined"] == [key(4).tobytes().hex()]
    assert answer(capsys, "ls", store, "--summary")["namespaces"][0]["quarantined"] == 1


@pytest.mark.parametrize("command", ["ls", "rm", "prune"])
def test_what_is_not_exact_is_refused(command: str, store: Path, capsys):
    more = ["--to", "0"] if command == "prune" else []
    assert "at least 4 digits" in failure(capsys, command, store, *more, "--namespace", "a")
    assert "0 namespaces begin" in failure(capsys, command, store, *more, "--namespace", "ffff")
    if command != "prune":
        for text in ("", "xyz", "0" * 65):
            assert "hexadecimal" in failure(capsys, command, store, "--key", text)
    assert "--limit -1" in failure(capsys, "ls", store, "--limit", "-1")
    assert answer(capsys, "ls", store)["count"] == 14


# --- rm


@pytest.mark.parametrize(
    ("argv", "gone"),
    [
        (["--key", "3"], {3}),
        (["--key", key(3).tobytes().hex()[:7]], {3}),
        (["--key", key(12).tobytes().hex()], {12}),
        (["--namespace", "AAAA"], set(range(10))),
        (["--namespace", QWEN.hex(), "--key", "3"], set()),
        (["--namespace", QWEN.hex(), "--key", "d"], {13}),
    ],
)
def test_rm(store: Path, capsys, argv: list[str], gone: set[int]):
    planned = answer(capsys, "rm", store, *argv, "--dry-run")
    assert (planned["found"], planned["found_bytes"], planned["deleted"]) == (len(gone), len(gone) * PAGE, 0)
    assert answer(capsys, "ls", store)["count"] == 14, "a dry run deletes nothing"
    done = answer(capsys, "rm", store, *argv, "--yes")
    assert (done["found"], done["deleted"], done["dry_run"]) == (len(gone), len(gone), False)
    assert numbers(answer(capsys, "ls", store)["pages"]) == set(range(14)) - gone
    assert stored(store, LLAMA) | stored(store, QWEN) == set(range(14)) - gone, "what was deleted does not come back"


def test_rm_in_use(store: Path, capsys):
    with in_use(store):
        assert answer(capsys, "rm", store, "--key", "3", "--yes")["deleted"] == 1
        assert numbers(answer(capsys, "ls", store)["pages"]) == set(range(14)) - {3}
    assert stored(store, LLAMA) | stored(store, QWEN) == set(range(14)) - {3}


def test_rm_in_words_and_asking(store: Path, capsys, monkeypatch):
    assert "--yes" in failure(capsys, "rm", store, "--key", "3"), "stdin is no terminal here"
    assert "say what to delete" in failure(capsys, "rm", store, "--yes")
    assert run(capsys, "rm", store, "--key", "3", "--dry-run")[1] == (
        f"would delete 1 pages (32.0 KiB) with keys 3... in {store}\n"
    )

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    status, out, err = run(capsys, "rm", store, "--key", "3")
    assert (status, out) == (2, "") and err.endswith("tardis rm: nothing deleted\n")
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    status, out, err = run(capsys, "rm", store, "--key", "3")
    assert (status, out) == (0, f"deleted 1 pages with keys 3... in {store}\n") and "32.0 KiB" in err


# --- prune


def test_prune_evicts_the_coldest(store: Path, user, capsys):
    used = Pages(0, 10)
    with open_store(store) as opened:  # llama's are used again, though qwen's were stored later
        assert space_of(opened, LLAMA).get(used.hashes, used.pieces).all()
    planned = answer(capsys, "prune", store, "--to", 10 * PAGE, "--dry-run")
    assert (planned["stored_bytes"], planned["target_bytes"], planned["evicted"]) == (14 * PAGE, 10 * PAGE, 0)
    done = answer(capsys, "prune", store, "--to", 10 * PAGE, "--yes")
    assert done["evicted"] == 4 and done["stored_bytes"] == 10 * PAGE
    if user:  # while the store stays open nothing brings an evicted page back
        with open_store(store) as opened:
            assert opened.stats()["payload_bytes"] == 10 * PAGE
            assert space_of(opened, LLAMA).get(used.hashes, used.pieces).all()


def test_prune_by_percent_and_namespace(store: Path, capsys):
    done = answer(capsys, "prune", store, "--percent", 50, "--namespace", LLAMA.hex(), "--yes")
    assert (done["target_bytes"], done["evicted"]) == (5 * PAGE, 5)
    assert answer(capsys, "prune", store, "--percent", 0, "--yes")["evicted"] == 0
    assert answer(capsys, "prune", store, "--to", "1TiB", "--yes")["evicted"] == 0


def test_prune_refuses_and_asks(store: Path, capsys):
    assert "--yes" in failure(capsys, "prune", store, "--to", "0")
    assert "expected 0 to 100" in failure(capsys, "prune", store, "--percent", "101")
    assert "size such as" in failure(capsys, "prune", store, "--to", "200G")
    for argv in (["prune", store], ["prune", store, "--to", "1", "--percent", "1"]):
        with pytest.raises(SystemExit) as caught:
            run(capsys, *argv)
        assert caught.value.code == 2
    assert "nothing to evict" in run(capsys, "prune", store, "--to", "1GiB", "--dry-run")[1]
    assert run(capsys, "prune", store, "--percent", "100", "--yes")[1] == f"evicted 14 pages of {store}; 0 B are left\n"


# --- verify while another process has the store open


def test_verify_in_use_is_clean_and_says_so(store: Path, capsys):
    with in_use(store) as pid:
        status, out, err = run(capsys, "verify", store)
        assert status == 0 and f"in use by pid {pid}" in err and out.endswith("clean\n") and "14 pages" in out
        report = answer(capsys, "verify", store)
        assert f"pid {pid}" in report["in_use_by"] and report["report"]["objects"] == 14
    assert answer(capsys, "verify", store)["in_use_by"] is None


def test_verify_in_use_finds_a_flipped_bit_and_changes_nothing(store: Path, capsys):
    flip_bit_of(store, 4)
    with in_use(store):
        for _ in range(2):
            status, out, _ = run(capsys, "verify", store)
            assert status == 1 and "1 corrupt pages" in out and key(4).tobytes().hex() in out
        assert all(page["state"] == "stored" for page in answer(capsys, "ls", store)["pages"])


def test_verify_repairs_a_store_in_use(store: Path, capsys):
    flip_bit_of(store, 4)
    (store / "namespaces" / f"{QWEN.hex()}.json").unlink()
    with in_use(store):
        status, out, _ = run(capsys, "verify", store, "--repair", "--json")
        found = json.loads(out)
        assert status == 1 and not found["clean"] and len(found["problems"]) == 1
        assert found["problems"][0].startswith(f"key {key(4).tobytes().hex()}: ")
        assert found["report"] == {
            "objects": 9,
            "bytes": 9 * PAGE,
            "bad_payloads": 1,
            "bad_headers": 0,
            "gone": 0,
            "unknown": 4,
        }
        status, out, _ = run(capsys, "verify", store, "--repair")
        assert status == 0 and out.endswith("clean\n") and "9 pages" in out
    assert stored(store, LLAMA) == set(range(10)) - {4}
    assert stored(store, QWEN) == {10, 11, 12, 13}


def test_verify_frees_broken_headers_of_a_store_in_use(store: Path, capsys):
    with in_use(store):
        flip_header_bit_of(store, 4)
        status, out, _ = run(capsys, "verify", store, "--repair")
        assert status == 1 and "1 broken headers" in out and "13 pages" in out
        status, out, _ = run(capsys, "verify", store, "--repair")
        assert status == 0 and out.endswith("clean\n")
    assert stored(store, LLAMA) == set(range(10)) - {4}
    (store / "index.checkpoint").unlink()
    assert stored(store, LLAMA) == set(range(10)) - {4}
    report = answer(capsys, "verify", store)["report"]
    assert report["quarantined"] == report["bad_headers"] == 0
