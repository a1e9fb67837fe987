# SPDX-License-Identifier: Apache-2.0
"""The command `tardis` on real stores: what it prints, its exit statuses, one line per error and no traceback."""

import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sglang_tardis
from command_line import PARTS, REGION, environment, failure, fill, identity, needs_core, run
from sglang_tardis.cli import choose, render
from sglang_tardis.cli.main import main

# --- info


def test_info(store: Path, capsys):
    status, out, err = run(capsys, "info", store)
    assert (status, err) == (0, "")
    assert f"store        {store}" in out and "in use by    nobody" in out and "64.0 MiB" in out
    assert "pages        8 in " in out and f"{(8 * PARTS * 2 * REGION) // 1024}.0 KiB" in out
    rows = {row.split()[1]: row for row in out.splitlines() if "layer-major" in row}
    assert set(rows) == {"llama", "qwen?[31m"}, "control characters must not reach the terminal"
    assert identity().fingerprint().hex() in rows["llama"] and rows["llama"].split()[-3] == "5"
    assert "bfloat16" in rows["llama"] and "0/1" in rows["llama"]
    assert "\x1b" not in out


def test_info_json_and_default_path(store: Path, capsys, monkeypatch):
    monkeypatch.setenv("TARDIS_CONFIG", json.dumps({"path": str(store)}))
    status, out, _ = run(capsys, "info", "--json")
    facts = json.loads(out)
    assert status == 0 and facts["objects"] == 8 and facts["path"] == str(store)
    described = {one["fingerprint"]: json.loads(one["description"]) for one in facts["namespaces"]}
    assert described[identity().fingerprint().hex()]["model_name"] == "llama"


def test_info_of_several_paths(store: Path, capsys, monkeypatch):
    import sglang_tardis.store

    facts = sglang_tardis.store.inspect(store)
    facts["paths"] = [{"path": str(store), "state": "present", "segments": 1}]
    monkeypatch.setattr(sglang_tardis.store, "inspect", lambda _: facts)
    assert "\npaths " not in run(capsys, "info", store)[1]
    facts["paths"].append({"path": "/nvme1/\x1b[31m", "state": "missing", "segments": 7})
    status, out, _ = run(capsys, "info", store)
    assert status == 0 and f"\npaths        {store} (present, 1 segments)\n" in out
    assert "\n             /nvme1/?[31m (missing, 7 segments)\n" in out
    assert json.loads(run(capsys, "info", store, "--json")[1])["paths"] == facts["paths"]


def test_info_of_a_store_in_use(store: Path, capsys):
    from sglang_tardis.store import Store

    with Store(store, create=False):
        _, out, _ = run(capsys, "info", store)
        assert f"in use by    pid {os.getpid()}" in out


def test_info_survives_damaged_descriptions(store: Path, capsys):
    texts = sorted((store / "namespaces").glob("*.json"))
    texts[0].write_text("[1]")
    texts[1].unlink()
    status, out, _ = run(capsys, "info", store)
    assert status == 0 and out.count("(no description)") == 2 and "pages        8 in" in out


@pytest.mark.parametrize("damage", [b"\xff\xfe{", b"[" * 100_000], ids=["not UTF-8", "nested deeply"])
def test_one_damaged_description_hides_nothing_else(store: Path, capsys, damage: bytes):
    sorted((store / "namespaces").glob("*.json"))[0].write_bytes(damage)
    status, out, _ = run(capsys, "info", store)
    assert status == 0 and out.count("(no description)") == 1 and "pages        8 in" in out
    assert run(capsys, "clear", store, "--yes")[:2] == (0, f"deleted 8 pages of {store}\n")


# --- verify


def test_verify_clean(store: Path, capsys):
    status, out, err = run(capsys, "verify", store)
    assert status == 0 and out.endswith("clean\n") and "8 pages (256.0 KiB)" in out
    assert "verify 100%" in err, "plain progress lines where stderr is no terminal"
    assert "\r" not in err
    status, out, _ = run(capsys, "verify", store, "--json")
    report = json.loads(out)
    assert status == 0 and report["clean"] and report["report"]["objects"] == 8 and report["problems"] == []


def corrupt_one_payload(store: Path) -> None:
    """Flip a bit in the first stored page's payload: find its bytes in a data file by their content."""
    rng = np.random.default_rng(1)
    needle = rng.integers(0, 256, (5, PARTS, 2, REGION), dtype=np.uint8)[0, 0, 0].tobytes()
    for path in store.rglob("*"):
        if path.is_file() and (place := path.read_bytes().find(needle)) >= 0:
            with path.open("r+b") as file:
                file.seek(place + 100)
                file.write(bytes([needle[100] ^ 1]))
            return
    raise AssertionError("page not found on disk")


def test_verify_finds_a_flipped_bit_and_repairs(store: Path, capsys):
    corrupt_one_payload(store)
    for _ in range(2):
        status, out, _ = run(capsys, "verify", store)
        assert status == 1 and "1 corrupt pages" in out and "digest" in out and "--repair" in out
    status, out, _ = run(capsys, "verify", store, "--json")
    report = json.loads(out)
    assert (
        status == 1 and not report["clean"] and report["report"]["bad_payloads"] == 1 and len(report["problems"]) == 1
    )
    status, out, _ = run(capsys, "verify", store, "--repair")
    assert status == 1 and "quarantined now" in out
    status, out, _ = run(capsys, "verify", store)
    assert status == 0 and out.endswith("clean\n") and "7 pages" in out and "1 quarantined before" in out


def test_verify_shows_a_bar_on_a_terminal(store: Path):
    ours, theirs = pty.openpty()
    result = subprocess.run(
        [sys.executable, "-m", "sglang_tardis.cli", "verify", str(store)],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=environment(),
        check=True,
    )
    os.close(theirs)
    drawn = os.read(ours, 65536).decode()
    os.close(ours)
    assert "\rverify [##############################] 100%" in drawn and drawn.endswith("\n")
    assert result.stdout.decode().endswith("clean\n")


def test_verify_stops_when_interrupted(store: Path, capsys, monkeypatch):
    """Ctrl-C during the pass over the data ends the command with one line, and the store stays usable."""

    def press(self, done, total):
        os.kill(os.getpid(), 2)
        return True

    monkeypatch.setattr(render.Progress, "__call__", press)
    status, out, err = run(capsys, "verify", store)
    assert (status, out, err) == (130, "", "tardis verify: interrupted\n")
    monkeypatch.undo()
    assert run(capsys, "verify", store)[0] == 0


# --- clear


def test_clear_everything(store: Path, capsys):
    status, out, _ = run(capsys, "clear", store, "--yes")
    assert status == 0 and "deleted 8 pages of" in out
    assert json.loads(run(capsys, "info", store, "--json")[1])["objects"] == 0
    assert run(capsys, "clear", store, "--yes")[1].startswith("deleted 0 pages")


def test_clear_one_namespace_by_prefix(store: Path, capsys):
    fingerprint = identity().fingerprint().hex()
    status, out, _ = run(capsys, "clear", store, "--namespace", fingerprint[:6].upper(), "--yes")
    assert status == 0 and f"deleted 5 pages of namespace {fingerprint}" in out
    facts = json.loads(run(capsys, "info", store, "--json")[1])
    assert {one["fingerprint"]: one["objects"] for one in facts["namespaces"] if one["objects"]} == {
        identity("qwen\x1b[31m").fingerprint().hex(): 3
    }
    fill(store, "llama", 5, 1)  # a server may come back with the same description
    assert json.loads(run(capsys, "info", store, "--json")[1])["objects"] == 8


def test_clear_refuses_what_is_not_exact(store: Path, capsys):
    assert "at least 4 digits" in failure(capsys, "clear", store, "--namespace", "ab", "--yes")
    assert "0 namespaces begin" in failure(capsys, "clear", store, "--namespace", "zzzzzzzz", "--yes")
    assert "--yes" in failure(capsys, "clear", store), "stdin is no terminal here"
    assert json.loads(run(capsys, "info", store, "--json")[1])["objects"] == 8


def test_clear_needs_no_description(store: Path, capsys):
    fingerprint = identity().fingerprint().hex()
    (store / "namespaces" / f"{fingerprint}.json").unlink()
    status, out, _ = run(capsys, "clear", store, "--namespace", fingerprint, "--yes")
    assert status == 0 and "deleted 5 pages" in out
    assert json.loads(run(capsys, "info", store, "--json")[1])["objects"] == 3


@pytest.mark.parametrize(("answer", "left"), [("y\n", 0), ("YES\n", 0), ("n\n", 8), ("\n", 8), ("", 8)])
def test_clear_asks(store: Path, capsys, monkeypatch, answer: str, left: int):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    status, out, err = run(capsys, "clear", store)
    question, _, said = err.partition("[y/N] ")
    assert question == f"Delete 8 pages (256.0 KiB) of {store}? "
    assert (status, said) == ((0, "") if left == 0 else (2, "tardis clear: nothing deleted\n"))
    assert out == (f"deleted 8 pages of {store}\n" if left == 0 else "")
    assert json.loads(run(capsys, "info", store, "--json")[1])["objects"] == left


def test_clear_answers_in_json(store: Path, capsys):
    fingerprint = identity().fingerprint().hex()
    _, out, _ = run(capsys, "clear", store, "--namespace", fingerprint, "--yes", "--json")
    assert json.loads(out) == {"path": str(store), "namespace": fingerprint, "deleted": 5}
    assert json.loads(run(capsys, "clear", store, "--yes", "--json")[1])["deleted"] == 3


def test_an_ambiguous_prefix_is_refused():
    spaces = [{"fingerprint": "abcd" + "0" * 28, "description": "{}"}, {"fingerprint": "abcd" + "1" * 28}]
    with pytest.raises(choose.CommandError, match="2 namespaces begin"):
        choose.namespace(spaces, "abcd")


# --- errors of every command


@pytest.mark.parametrize("command", ["info", "ls", "verify", "rm --key 1 --yes", "prune --to 0 --yes", "clear --yes"])
def test_paths_that_are_no_store(command: str, tmp_path: Path, capsys):
    needs_core()
    command, *options = command.split()
    (tmp_path / "file").write_text("hello")
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "missing", tmp_path / "file", tmp_path / "empty", tmp_path / "new\nline"):
        failure(capsys, command, path, *options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"], "nothing may be created"
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_damaged_superblock_is_one_line(store: Path, capsys):
    for path in store.iterdir():
        if path.is_file() and "lock" not in path.name:
            path.write_bytes(os.urandom(path.stat().st_size))
    for command in (["info"], ["ls"], ["verify"], ["rm", "--key", "1", "--yes"], ["clear", "--yes"]):
        failure(capsys, command[0], store, *command[1:])


def test_a_wrong_configuration_is_one_line(capsys, monkeypatch):
    monkeypatch.setenv("TARDIS_CONFIG", '{"pth": 1}')
    assert "Did you mean 'path'?" in failure(capsys, "info")


def test_a_path_that_is_given_needs_no_configuration(store: Path, capsys, monkeypatch):
    monkeypatch.setenv("TARDIS_CONFIG", '{"pth": 1}')
    assert run(capsys, "info", store)[0] == 0


def test_without_the_core(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang_tardis.store", None)
    assert "core" in failure(capsys, "info", "/")


def test_usage_errors_exit_with_2(capsys):
    for argv in ([], ["nonsense"], ["info", "a", "b"], ["verify", "--fix"], ["doctor", "a", "b"]):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == 2
        assert "Traceback" not in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0 and capsys.readouterr().out == f"tardis {sglang_tardis.__version__}\n"


def test_a_reader_that_has_gone_is_no_traceback(store: Path):
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run(
        [sys.executable, "-m", "sglang_tardis.cli", "info", str(store), "--json"],
        stdout=write, stderr=subprocess.PIPE, env=environment(), check=False,
    )  # fmt: skip
    os.close(write)
    assert (result.returncode, result.stderr) == (141, b"")


def test_streams_that_are_closed_or_full_change_no_result(store: Path):
    command = f"{sys.executable} -m sglang_tardis.cli"
    script = f"""
        {command} info {store} >&-; echo $?
        {command} verify {store} >&- 2>&- <&-; echo $?
        {command} verify {store} >/dev/null 2>/dev/full; echo $?
        {command} info {store}/none 2>/dev/full; echo $?
    """
    result = subprocess.run(["sh", "-c", script], capture_output=True, text=True, env=environment(), check=False)
    assert (result.stdout.split(), result.stderr) == (["0", "0", "0", "2"], "")


def test_a_terminal_without_the_names_characters(tmp_path: Path):
    needs_core()
    fill(tmp_path / "日本", "llama", 1, 1)
    for command in ("info", "ls --summary", "verify", "clear --yes"):
        result = subprocess.run(
            [sys.executable, "-m", "sglang_tardis.cli", *command.split(), str(tmp_path / "日本")],
            capture_output=True, text=True, env=environment(PYTHONIOENCODING="ascii"), check=False,
        )  # fmt: skip
        assert result.returncode == 0 and "Traceback" not in result.stderr


@pytest.mark.parametrize("command", ["info", "ls", "verify", "clear"])
def test_a_path_that_is_not_utf8_is_one_line(command: str, tmp_path: Path, capsys):
    needs_core()
    assert "expected a name in UTF-8" in failure(capsys, command, f"{tmp_path}/\udcff")


# --- text


def test_human_bytes():
    assert [render.human_bytes(count) for count in (0, 1023, 1024, 1536, 2**40, 2**62)] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 TiB", "4096.0 PiB",
    ]  # fmt: skip


def test_progress_lines_are_few():
    stream = io.StringIO()
    progress = render.Progress("verify", stream)
    for done in range(0, 10_001):
        assert progress(done, 10_000) is True
    progress.end()
    assert len(stream.getvalue().splitlines()) == 11
    empty = io.StringIO()
    render.Progress("verify", empty)(0, 0)
    assert "100%" in empty.getvalue()
