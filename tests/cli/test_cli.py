# SPDX-License-Identifier: Apache-2.0
"""The command `tardis` on real stores: what it prints, its exit statuses, one line per error and no traceback."""

import ctypes
import io
import json
import os
import pty
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import sglang_tardis
from sglang_tardis.cli import choose, doctor, render
from sglang_tardis.cli.main import main

PARTS, REGION = 2, 8192


@pytest.fixture(autouse=True)
def no_configuration(monkeypatch):
    monkeypatch.delenv("TARDIS_CONFIG", raising=False)


def needs_core():
    pytest.importorskip("sglang_tardis._core", reason="the C++ core is not built: pip install .")


def identity(model: str = "llama"):
    from sglang_tardis.bridge.namespace import NamespaceIdentity

    return NamespaceIdentity(
        model_name=model, model_config="c" * 64, weights="weights-v1:" + "0" * 64, kv_dtype="bfloat16", layers=PARTS,
        start_layer=0, end_layer=PARTS, kv_heads=2, head_dim=64, v_head_dim=64, page_size=32, layout="layer-major",
    )  # fmt: skip


def fill(folder: Path, model: str, pages: int, seed: int) -> None:
    from sglang_tardis.config import load_config
    from sglang_tardis.store import ObjectLayout, Store

    options = load_config({"capacity": "64MiB", "free_space_floor": 0}, {"HOME": "/root"}).store_options()
    rng = np.random.default_rng(seed)
    memory = rng.integers(0, 256, (pages, PARTS, 2, REGION), dtype=np.uint8)
    pieces = memory.ctypes.data + np.arange(pages * PARTS * 2, dtype=np.uint64).reshape(pages, -1) * np.uint64(REGION)
    hashes = rng.integers(0, 256, (pages, 32), dtype=np.uint8)
    with Store(folder, options) as store:
        one = identity(model)
        space = store.namespace(one.fingerprint(), one.description(), ObjectLayout(PARTS, (REGION, REGION)))
        assert space.set(hashes, pieces).all()
        store.flush()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    needs_core()
    folder = tmp_path / "store"
    fill(folder, "llama", 5, 1)
    fill(folder, "qwen\x1b[31m", 3, 2)
    return folder


def run(capsys, *argv: str) -> tuple[int, str, str]:
    status = main([str(part) for part in argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def failure(capsys, *argv: str) -> str:
    status, out, err = run(capsys, *argv)
    assert status == 2 and out == ""
    assert err.count("\n") == 1 and "Traceback" not in err and err.startswith(f"tardis {argv[0]}: ")
    return err


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


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **extra}


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


# --- doctor


def findings(capsys, *argv: str) -> tuple[int, dict[str, dict[str, str]]]:
    status, out, err = run(capsys, "doctor", "--json", *argv)
    assert err == ""
    answer = json.loads(out)
    assert answer["usable"] == (status == 0)
    return status, {one["name"]: one for one in answer["findings"]}


@pytest.fixture
def no_sglang(monkeypatch):
    """Checking SGLang's seams imports SGLang, which takes long; one test below does it."""
    version = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda package: None if package == "sglang" else version(package))


def test_doctor_on_a_store(store: Path, capsys, no_sglang):
    status, found = findings(capsys, str(store))
    assert status == 0
    assert found["configuration"]["detail"] == f"store at {store} (from PATH)"
    path = found["storage path"]
    assert path["status"] == "ok" and "why: " in path["detail"]
    from sglang_tardis.store import probe

    assert f"chose: {probe(store)['engine']}" in path["detail"]
    assert "8 pages" in found["store"]["detail"] and "nobody" in found["store"]["detail"]
    assert found["SGLang"] == {"name": "SGLang", "status": "note", "detail": "not installed in this Python environment"}


@pytest.mark.parametrize(
    "setting", [{"capacity": 1}, {"segment_size": 1}, {"segment_size": "64MiB", "capacity": "64MiB"}]
)
def test_doctor_finds_sizes_that_no_store_takes(setting, tmp_path: Path, capsys, monkeypatch, no_sglang):
    needs_core()
    from sglang_tardis.config import load_config
    from sglang_tardis.store import Store, StoreSettingError

    monkeypatch.setenv("TARDIS_CONFIG", json.dumps({"path": str(tmp_path / "new"), "free_space_floor": 0, **setting}))
    status, found = findings(capsys)
    assert status == 1 and found["sizes"]["status"] == "problem"
    config = load_config(None)
    with pytest.raises(StoreSettingError):
        Store(config.path, config.store_options())


def test_doctor_finds_another_segment_size(store: Path, capsys, monkeypatch, no_sglang):
    monkeypatch.setenv("TARDIS_CONFIG", json.dumps({"path": str(store), "segment_size": "1GiB", "capacity": "4GiB"}))
    status, found = findings(capsys)
    assert status == 1 and "leave it out" in found["sizes"]["detail"]


def test_doctor_before_the_first_start(tmp_path: Path, capsys, monkeypatch, no_sglang):
    needs_core()
    monkeypatch.setenv("TARDIS_CONFIG", json.dumps({"path": str(tmp_path / "a" / "b"), "free_space_floor": 0}))
    status, found = findings(capsys)
    assert status == 0 and "from TARDIS_CONFIG" in found["configuration"]["detail"]
    assert f"{tmp_path}, since {tmp_path / 'a' / 'b'} does not exist yet" in found["storage path"]["detail"]
    assert found["store"]["status"] == "note"
    assert list(tmp_path.iterdir()) == [], "doctor leaves nothing behind"


def test_doctor_looks_at_the_shared_memory(tmp_path: Path, monkeypatch):
    found = doctor._shared_memory()
    assert found.name == "/dev/shm" and found.status in ("ok", "note") and "pages of a store in use" in found.detail
    assert doctor._shared_memory(str(tmp_path / "none")).status == "problem"
    monkeypatch.setattr(doctor, "_LITTLE_SHARED_MEMORY", 1 << 60)
    assert doctor._shared_memory(str(tmp_path)).status == "note"
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    assert "not writable" in doctor._shared_memory(str(tmp_path)).detail


def test_doctor_reports_a_forced_engine(tmp_path: Path, capsys, monkeypatch, no_sglang):
    needs_core()
    monkeypatch.setenv(
        "TARDIS_CONFIG",
        json.dumps({"path": str(tmp_path), "engine": "sync", "direct_io": "off", "free_space_floor": 0}),
    )
    _, found = findings(capsys)
    assert "chose: sync, through the page cache" in found["storage path"]["detail"]


def test_doctor_says_when_the_disk_is_too_full(tmp_path: Path, capsys, monkeypatch, no_sglang):
    monkeypatch.setenv("TARDIS_CONFIG", json.dumps({"path": str(tmp_path), "free_space_floor": "4000PiB"}))
    status, found = findings(capsys)
    assert status == 1 and found["folder"]["status"] == "problem" and "free_space_floor" in found["folder"]["detail"]


def test_doctor_takes_paths_like_the_other_commands(store: Path, capsys, monkeypatch, no_sglang):
    needs_core()
    monkeypatch.chdir(store.parent)
    _, found = findings(capsys, store.name)
    assert f"store at {store} " in found["configuration"]["detail"]
    status, found = findings(capsys, f"{store}\udcff")
    assert status == 1 and "UTF-8" in found["configuration"]["detail"]


@pytest.fixture
def other_device(tmp_path: Path) -> Iterator[Path]:
    """A folder on another device than tmp_path."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        if os.stat(folder).st_dev == os.stat(tmp_path).st_dev:
            pytest.skip("the temporary folder lies in /dev/shm")
        yield Path(folder)


def configure(monkeypatch, *folders: Path, **settings) -> None:
    path = [str(folder) for folder in folders]
    monkeypatch.setenv("TARDIS_CONFIG", json.dumps({"path": path, "free_space_floor": 0, **settings}))


def having(monkeypatch, store: Path, *further: tuple[Path, str], owner: str = "") -> None:
    """Let a store have further folders, each present or missing."""
    import sglang_tardis.store

    facts = sglang_tardis.store.inspect(store) | {"owner": owner}
    folders = ((store, "present"), *further)
    facts["paths"] = [{"path": str(path), "state": state, "segments": 3} for path, state in folders]
    monkeypatch.setattr(sglang_tardis.store, "inspect", lambda _: facts)


def test_doctor_tests_every_folder(tmp_path: Path, other_device: Path, capsys, monkeypatch, no_sglang):
    needs_core()
    first, second = tmp_path / "first", other_device / "new"
    first.mkdir()
    configure(monkeypatch, first, second, direct_io="off")
    status, found = findings(capsys)
    assert status == 0, found
    assert found["configuration"]["detail"] == (f"store at {first}, spread over {second} as well (from TARDIS_CONFIG)")
    assert found["folder"]["status"] == found["folder 2"]["status"] == "ok"
    assert f"free in {other_device}" in found["folder 2"]["detail"]
    assert f"self-test in {first} chose: " in found["storage path"]["detail"]
    assert f"{other_device}, since {second} does not exist yet" in found["storage path 2"]["detail"]
    assert "drives" not in found and not second.exists()


def test_doctor_warns_of_folders_on_one_device(tmp_path: Path, capsys, monkeypatch, no_sglang):
    needs_core()
    configure(monkeypatch, tmp_path / "a", tmp_path / "b")
    status, found = findings(capsys)
    assert status == 0 and found["drives"]["status"] == "note"
    assert f"{tmp_path / 'a'} and {tmp_path / 'b'} are on the same device" in found["drives"]["detail"]


def test_doctor_finds_folders_that_are_not_alike(tmp_path: Path, capsys, monkeypatch, no_sglang):
    needs_core()
    import sglang_tardis.store

    (tmp_path / "b").mkdir()
    probe = sglang_tardis.store.probe
    monkeypatch.setattr(
        sglang_tardis.store,
        "probe",
        lambda path, options: {**probe(path, options), "direct_io": path != str(tmp_path / "b")},
    )
    configure(monkeypatch, tmp_path, tmp_path / "b")
    status, found = findings(capsys)
    assert status == 1 and found["direct I/O"]["status"] == "problem"
    assert f"{tmp_path} takes O_DIRECT and {tmp_path / 'b'} does not" in found["direct I/O"]["detail"]


def test_doctor_with_one_full_drive_of_several(tmp_path: Path, capsys, monkeypatch, no_sglang):
    needs_core()
    from sglang_tardis.cli import doctor_storage

    full, statvfs = [tmp_path / "a"], os.statvfs
    none_free = types.SimpleNamespace(f_bavail=0, f_frsize=4096)
    monkeypatch.setattr(doctor_storage.os, "statvfs", lambda path: none_free if path in full else statvfs(path))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    configure(monkeypatch, tmp_path / "a", tmp_path / "b")
    status, found = findings(capsys)
    assert status == 0 and found["folder"]["status"] == "note" and found["folder 2"]["status"] == "ok"
    assert "free_space_floor" in found["folder"]["detail"]
    full.append(tmp_path / "b")
    status, found = findings(capsys)
    assert status == 1 and found["folder"]["status"] == found["folder 2"]["status"] == "problem"


def test_doctor_on_a_store_whose_drive_is_not_mounted(store: Path, tmp_path: Path, capsys, monkeypatch, no_sglang):
    away = tmp_path / "mnt" / "tardis"
    having(monkeypatch, store, (away, "missing"))
    configure(monkeypatch, store, away)
    for argv in ([], [str(store)]):
        status, found = findings(capsys, *argv)
        assert status == 0 and found["folder 2"]["status"] == "note"
        assert f"{away} is missing (not mounted?)" in found["folder 2"]["detail"]
        assert "storage path 2" not in found and "drives" not in found and "paths" not in found
    assert not away.parent.exists()


def test_doctor_says_what_another_list_of_folders_means(store: Path, tmp_path: Path, capsys, monkeypatch, no_sglang):
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    configure(monkeypatch, store, new)
    having(monkeypatch, store, (old, "present"))
    _, out, _ = run(capsys, "doctor")
    lines = [line for line in out.splitlines() if " paths " in line]
    assert len(lines) == 2 and all(line.startswith("note") for line in lines)
    assert f"the store has {old}, which `path` does not name: the next start forgets" in lines[0]
    assert f"takes in {new}" in lines[1]
    having(monkeypatch, store, (old, "present"), owner="pid 1")
    status, found = findings(capsys)
    assert status == 1 and found["paths"]["status"] == "problem"
    assert f"in use with the further folders {old}, `path` names {new}" in found["paths"]["detail"]
    _, found = findings(capsys, str(store))  # only the folder is given: as the store knows
    assert "paths" not in found and found["folder 2"]["detail"].endswith("of it kept free")


def test_commands_take_the_first_folder_of_the_configured(store: Path, tmp_path: Path, capsys, monkeypatch):
    configure(monkeypatch, store, tmp_path / "further")
    assert json.loads(run(capsys, "info", "--json")[1])["objects"] == 8
    assert run(capsys, "clear", "--yes")[:2] == (0, f"deleted 8 pages of {store}\n")
    assert not (tmp_path / "further").exists(), "tools leave the store's list of folders as it is"


def test_doctor_with_a_wrong_configuration(capsys, monkeypatch, no_sglang):
    monkeypatch.setenv("TARDIS_CONFIG", '{"queue_depth": -1}')
    status, found = findings(capsys)
    assert status == 1 and "queue_depth" in found["configuration"]["detail"]
    assert "storage path" not in found and "GPU" in found


def test_doctor_without_the_core(tmp_path: Path, capsys, monkeypatch, no_sglang):
    monkeypatch.setitem(sys.modules, "sglang_tardis.store", None)
    status, found = findings(capsys, str(tmp_path))
    assert status == 1 and "reinstall" in found["core"]["detail"]


def test_doctor_in_words(tmp_path: Path, capsys, no_sglang):
    _, out, _ = run(capsys, "doctor", str(tmp_path))
    assert {line.split()[0] for line in out.splitlines()} <= {"ok", "note", "problem"}
    assert len(out.splitlines()) >= 7


def test_doctor_does_not_import_torch_or_sglang(tmp_path: Path):
    program = (
        "import sys; from sglang_tardis.cli import doctor; doctor._version = lambda package: None;"
        "from sglang_tardis.cli.main import main; main(['doctor', sys.argv[1]]);"
        "assert not {'torch', 'sglang'} & set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], env=environment(), check=True, stdout=subprocess.DEVNULL
    )


def test_doctor_asks_the_kernel_about_io_uring(monkeypatch):
    class Refusing:
        @staticmethod
        def syscall(*_):
            ctypes.set_errno(1)
            return -1

    assert doctor._io_uring().name == "io_uring"
    monkeypatch.setattr(doctor.ctypes, "CDLL", lambda *_, **__: Refusing)
    finding = doctor._io_uring()
    assert finding.status == "note" and "seccomp" in finding.detail and "pool of threads" in finding.detail


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ('print(\'noise\'); print(\'MARK[["cli", true, "fine"], ["factory", false, "gone in 9.9"]]\')', None),
        ("raise SystemExit('boom')", "exit status 1): boom"),
        ("print('noise')", "exit status 0): no output"),
        ("import os; os.abort()", "exit status -6"),
        ("import time; time.sleep(60)", "did not finish importing"),
    ],
)
def test_doctor_on_seams_that_answer_or_do_not(monkeypatch, program: str, expected: str | None):
    monkeypatch.setattr(doctor, "_version", lambda package: "9.9")
    monkeypatch.setattr(doctor, "_SEAMS_PROGRAM", program.replace("MARK", doctor._SEAMS_MARK))
    monkeypatch.setattr(doctor, "_SEAMS_TIMEOUT_SECONDS", 1 if "sleep" in program else 60)
    found = list(doctor._sglang())
    assert found[0].detail == "9.9, torch 9.9"
    if expected is None:
        assert [(one.name, one.status) for one in found[1:]] == [("seam cli", "ok"), ("seam factory", "problem")]
    else:
        assert found[1].status == "problem" and expected in found[1].detail


@pytest.mark.slow
def test_doctor_checks_the_installed_sglang(tmp_path: Path, capsys):
    if doctor._version("sglang") is None:
        pytest.skip("SGLang is not installed")
    _, found = findings(capsys, str(tmp_path))
    seams = {name: one for name, one in found.items() if name.startswith("seam")}
    assert len(seams) >= 4 and all(one["status"] == "ok" for one in seams.values()), seams


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
