# SPDX-License-Identifier: Apache-2.0
"""`tardis doctor`: what it finds, and what it says of it."""

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import environment, needs_core, run
from sglang_tardis.cli import doctor, doctor_storage


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


def test_doctor_on_a_tmpfs_of_small_pages(other_device: Path, capsys, monkeypatch, no_sglang):
    needs_core()
    monkeypatch.setenv("TARDIS_CONFIG", json.dumps({"path": str(other_device / "store"), "free_space_floor": 0}))
    options = {"rw", "size=1g"}
    monkeypatch.setattr(doctor_storage, "mount_options", lambda device: options)
    status, found = findings(capsys)
    assert status == 0 and found["pages"]["status"] == "note" and "huge=always" in found["pages"]["detail"]
    options.add("huge=within_size")
    assert "pages" not in findings(capsys)[1]


def test_options_of_a_mount(tmp_path: Path):
    device = os.stat("/dev/shm").st_dev
    assert doctor_storage.mount_options(device) >= {"rw"}
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "21 1 254:0 / / rw,relatime - ext4 /dev/vda rw,errors=remount-ro\n"
        f"30 21 {os.major(device)}:{os.minor(device)} / /a\\040b rw shared:3 master:1 - tmpfs tmpfs rw,huge=always\n"
    )
    assert doctor_storage.mount_options(device, str(mounts)) == {"rw", "huge=always"}
    assert doctor_storage.mount_options(os.makedev(9, 9), str(mounts)) is None
    assert doctor_storage.mount_options(device, str(tmp_path / "absent")) is None
