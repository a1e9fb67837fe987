# SPDX-License-Identifier: Apache-2.0
"""`tardis sglang-patch` on copies of the released SGLang packages; the installed ones are only read."""

from __future__ import annotations

import base64
import csv
import ctypes
import difflib
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import py_compile
import re
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import sglang_tardis
from command_line import needs_core
from sglang_tardis.cli.main import main
from sglang_tardis.patching import load_patches

CHECKS = Path(__file__).with_name("sglang_patch_checks.py")
PATCHES = {patch.release: patch for patch in load_patches()}
PYTHON = str(Path(sglang_tardis.__file__).parents[1])


def installed(release: str) -> Path | None:
    """The folder that holds a released `sglang`: 0.5.23 is in this environment, 0.5.16 where `make test` put it."""
    if release == "0.5.16":
        site = os.environ.get("TARDIS_SGLANG16_SITE", "")
        return Path(site) if site and Path(site, "sglang").is_dir() else None
    spec = importlib.util.find_spec("sglang")
    return Path(spec.origin).parents[1] if spec and spec.origin else None


RELEASES = [
    pytest.param(
        release,
        marks=pytest.mark.skipif(installed(release) is None, reason=f"no SGLang {release} here; `make test` gets it"),
    )
    for release in PATCHES
]


@pytest.fixture(params=RELEASES)
def release(request) -> str:
    return request.param


@pytest.fixture
def site(tmp_path: Path, release: str) -> Path:
    """A folder with the metadata and the files that the patch changes, as released."""
    source, folder = installed(release), tmp_path / "site"
    (folder / "sglang").mkdir(parents=True)
    shutil.copy(source / "sglang" / "__init__.py", folder / "sglang")
    shutil.copytree(source / f"sglang-{release}.dist-info", folder / f"sglang-{release}.dist-info")
    for file in PATCHES[release].files:
        (folder / file.path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / file.path, folder / file.path)
    return folder


def paths(release: str) -> list[str]:
    return [file.path for file in PATCHES[release].files]


def content(site: Path) -> dict[str, tuple[bytes, int]]:
    """Every file with its bytes and mode, whatever its name."""
    return {
        str(file.relative_to(site)): (file.read_bytes(), stat.S_IMODE(file.stat().st_mode))
        for file in sorted(site.rglob("*"))
        if file.is_file()
    }


def run(capsys, action: str, site: Path, *more: str) -> tuple[int, str, str]:
    status = main(["sglang-patch", action, "--site", str(site), *more])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def facts(capsys, site: Path, action: str = "status") -> dict:
    status, out, err = run(capsys, action, site, "--json")
    answer = json.loads(out)
    assert err == "" and status == (0 if answer["state"] in ("original", "patched") else 1)
    return answer


def refused(capsys, site: Path, action: str) -> str:
    status, out, err = run(capsys, action, site)
    assert status == 2 and out == ""
    assert err.startswith("tardis sglang-patch: ") and err.count("\n") == 1 and "Traceback" not in err
    return err


def command(action: str, site: Path, **options) -> subprocess.CompletedProcess:
    """The command in a process of its own."""
    words = [sys.executable, "-m", "sglang_tardis.cli", "sglang-patch", action, "--site", str(site)]
    environment = dict(os.environ, PYTHONPATH=PYTHON)
    return subprocess.run(words, capture_output=True, text=True, timeout=60, env=environment, **options)


# --- there and back


def test_apply_and_revert(capsys, site, release):
    for number, path in enumerate(paths(release)):
        (site / path).chmod(0o600 if number == 0 else 0o644)
    released = content(site)
    answer = facts(capsys, site)
    assert (answer["state"], answer["release"], answer["version"]) == ("original", release, release)

    answer = facts(capsys, site, "apply")
    assert (answer["state"], answer["changed"]) == ("patched", paths(release))
    patched = content(site)
    for path, (data, mode) in released.items():
        if path not in paths(release):
            assert patched[path] == (data, mode)
            continue
        assert patched[path][1] == mode
        compile(patched[path][0], path, "exec")
        before, after = data.decode().splitlines(), patched[path][0].decode().splitlines()
        added = [line[2:] for line in difflib.ndiff(before, after) if line.startswith("+ ")]
        removed = [line for line in difflib.ndiff(before, after) if line.startswith("- ")]
        assert 1 <= len(added) <= 8 and len(removed) <= 1
    assert patched.keys() == released.keys()

    statuses = {path: (site / path).stat() for path in paths(release)}
    answer = facts(capsys, site, "apply")
    assert (answer["state"], answer["changed"]) == ("patched", [])
    assert statuses == {path: (site / path).stat() for path in paths(release)}

    answer = facts(capsys, site, "revert")
    assert (answer["state"], answer["changed"]) == ("original", paths(release))
    assert content(site) == released
    assert facts(capsys, site, "revert")["changed"] == []
    assert content(site) == released


def test_what_is_restored_is_what_the_wheel_holds(capsys, site, release):
    """pip's own record of the installation agrees with every file again."""
    run(capsys, "apply", site)
    run(capsys, "revert", site)
    with (site / f"sglang-{release}.dist-info" / "RECORD").open(newline="") as stream:
        record = {row[0]: row[1] for row in csv.reader(stream)}
    for path in paths(release):
        digest = base64.urlsafe_b64encode(hashlib.sha256((site / path).read_bytes()).digest()).decode().rstrip("=")
        assert record[path] == f"sha256={digest}"


def test_what_is_printed(capsys, site, release):
    status, out, _ = run(capsys, "status", site)
    assert status == 0 and f"SGLang {release} in {site / 'sglang'}: as released" in out
    assert out.count("original") == len(paths(release))
    assert "patched  sglang/srt/plugins/__init__.py" in run(capsys, "apply", site)[1]
    assert run(capsys, "apply", site)[1].startswith("nothing to do")
    assert "restored  sglang/srt/plugins/__init__.py" in run(capsys, "revert", site)[1]


def test_the_release_is_told_by_the_files(capsys, site, release):
    """Not by the version that the metadata claims, nor by there being metadata."""
    folder = site / f"sglang-{release}.dist-info"
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 9.9\n")
    answer = facts(capsys, site)
    assert (answer["state"], answer["release"], answer["version"]) == ("original", release, "9.9")
    shutil.rmtree(folder)
    assert facts(capsys, site, "apply")["state"] == "patched"
    assert facts(capsys, site)["version"] is None


def test_other_names_of_a_file_keep_their_content(capsys, site, release, tmp_path):
    """Installers share files between environments by hard links."""
    cache = tmp_path / "cache"
    os.link(site / paths(release)[0], cache)
    before = cache.read_bytes()
    run(capsys, "apply", site)
    assert cache.read_bytes() == before != (site / paths(release)[0]).read_bytes()


def constants(site: Path, path: str) -> str:
    """What Python's import system makes of a module: its cached form if that is held to be fresh."""
    loader = importlib.machinery.SourceFileLoader("module", str(site / path))
    return str(walk(loader.get_code("module")))


def walk(code) -> list:
    return [walk(one) if hasattr(one, "co_consts") else one for one in code.co_consts] + list(code.co_names)


@pytest.mark.parametrize("mode", list(py_compile.PycInvalidationMode))
def test_no_stale_bytecode_is_used(capsys, site, release, mode):
    path = "sglang/srt/mem_cache/storage/backend_factory.py"
    other = site / "sglang/srt/mem_cache/storage/backend_factory_of_another.py"
    other.write_text("x = 1\n")
    for file in (site / path, other):
        py_compile.compile(str(file), doraise=True, invalidation_mode=mode)
    assert "TardisStorage" not in constants(site, path)
    run(capsys, "apply", site)
    assert "TardisStorage" in constants(site, path)
    py_compile.compile(str(site / path), doraise=True, invalidation_mode=mode)
    run(capsys, "revert", site)
    assert "TardisStorage" not in constants(site, path)
    assert Path(importlib.util.cache_from_source(str(other))).exists()


def test_every_patch_changes_the_size(site, release, capsys):
    """Which is how Python notices that a module's cached form is stale, whatever the clock says."""
    before = {path: (site / path).stat().st_size for path in paths(release)}
    run(capsys, "apply", site)
    assert all((site / path).stat().st_size != before[path] for path in paths(release))


# --- trees that are left alone


@pytest.mark.parametrize("start", ["original", "patched"])
def test_a_modified_file_is_refused(capsys, site, release, start):
    if start == "patched":
        run(capsys, "apply", site)
    for file in PATCHES[release].files:
        good = (site / file.path).read_bytes()
        (site / file.path).write_bytes(good + b"# mine\n")
        before = content(site)
        found = hashlib.sha256(good + b"# mine\n").hexdigest()
        for action in ("apply", "revert"):
            message = refused(capsys, site, action)
            for expected in (file.path, file.before, file.after, found, "Nothing was changed", f"sglang=={release}"):
                assert expected in message
        status, out, _ = run(capsys, "status", site)
        assert status == 1 and f"unknown   {file.path}" in out and found in out
        assert content(site) == before
        (site / file.path).write_bytes(good)


def test_a_missing_file_is_refused(capsys, site, release):
    (site / paths(release)[-1]).unlink()
    message = refused(capsys, site, "apply")
    assert paths(release)[-1] in message and "no such file" in message
    assert facts(capsys, site)["state"] == "unknown"


def test_another_release_is_refused(capsys, site, release):
    """A release that shares a file with a known one, and one that shares nothing."""
    metadata = site / f"sglang-{release}.dist-info" / "METADATA"
    metadata.write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.20\n")
    for path in paths(release)[:-1]:
        (site / path).write_text("# other\n")
    message = refused(capsys, site, "apply")
    assert "SGLang 0.5.20" in message and "0.5.16, 0.5.23" in message and "(and 3 more of its files)" in message
    (site / paths(release)[-1]).write_text("# other\n")
    message = refused(capsys, site, "apply")
    assert "0.5.20" in message and "0.5.16, 0.5.23" in message and "not one file matches" in message
    assert facts(capsys, site)["release"] is None


def test_links_and_special_files_are_refused(capsys, site, release, tmp_path):
    path = site / paths(release)[0]
    outside = tmp_path / "outside"
    shutil.move(path, outside)
    before = outside.read_bytes()
    for make, what in (
        (lambda: path.symlink_to(outside), "a symbolic link"),
        (lambda: os.mkfifo(path), "not a regular file"),
        (path.mkdir, "not a regular file"),
    ):
        make()
        for action in ("apply", "revert"):
            assert what in refused(capsys, site, action)
        assert outside.read_bytes() == before
        path.rmdir() if path.is_dir() else path.unlink()
    shutil.copy(outside, path)
    # ... and a folder on the way that leads out of the package
    elsewhere = tmp_path / "elsewhere"
    shutil.move(path.parent, elsewhere)
    path.parent.symlink_to(elsewhere)
    inside = content(elsewhere)
    assert "symbolic link" in refused(capsys, site, "apply") and content(elsewhere) == inside


def test_no_sglang(capsys, tmp_path, site):
    assert "--site" in refused(capsys, tmp_path / "nowhere", "status")
    assert "give the folder above it" in refused(capsys, site / "sglang", "status")
    (tmp_path / "sglang" / "srt").mkdir(parents=True)  # a folder of that name in the working directory is no package
    alone = tmp_path / "alone"  # where sglang_tardis is installed, SGLang is its neighbour
    alone.mkdir()
    (alone / "sglang_tardis").symlink_to(Path(PYTHON) / "sglang_tardis")
    done = subprocess.run(
        [sys.executable, "-S", "-c", "from sglang_tardis.patching import find_package; find_package()"],
        capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": str(alone)}, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "SGLang is not installed in this Python environment" in done.stderr


def test_the_installed_package_is_found_without_importing_it(site, release):
    program = (
        "import sys; from sglang_tardis.patching import find_package; print(find_package()); "
        "sys.exit(bool({'sglang', 'torch', 'numpy'} & set(sys.modules)))"
    )
    environment = {"PYTHONPATH": os.pathsep.join([str(site), PYTHON])}
    # __init__.py may be a link into an installer's cache; the package is where the link is
    init = site / "sglang" / "__init__.py"
    shutil.move(init, site.parent / "cached.py")
    init.symlink_to(site.parent / "cached.py")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, str(site / "sglang")), done.stderr


# --- when something goes wrong on the way


def killed_at_fsync(fatal: int, action: str, site: Path) -> bool:
    """Run the command in a fork that is killed when it is about to make something durable for the nth time.

    Each file's new content is written, then made durable; later each is renamed, and its folder made durable: so that
    is a kill within each of these steps. Returns whether the fork was killed; otherwise it came to its end.
    """
    child = os.fork()
    if child == 0:
        calls = []

        def fsync(_descriptor):
            calls.append(1)
            if len(calls) == fatal:
                os.kill(os.getpid(), signal.SIGKILL)

        os.fsync = fsync
        try:
            os._exit(main(["sglang-patch", action, "--site", str(site)]))
        finally:
            os._exit(99)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


@pytest.mark.parametrize("action", ["apply", "revert"])
def test_a_killed_process_leaves_a_tree_that_can_go_both_ways(capsys, site, release, monkeypatch, action):
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)  # hundreds of them would only take time
    released = content(site)
    if action == "revert":
        run(capsys, "apply", site)
    start, ends = content(site), {"apply": "patched", "revert": "original"}
    other = "revert" if action == "apply" else "apply"
    states, fatal = [], 1
    while killed_at_fsync(fatal, action, site):
        shutil.copytree(site, site.parent / "copy")
        states.append(facts(capsys, site)["state"])
        assert facts(capsys, site, other)["state"] == ends[other]
        assert content(site) == start, "something was left behind"
        shutil.rmtree(site)
        (site.parent / "copy").rename(site)  # as the kill left it
        assert facts(capsys, site, action)["state"] == ends[action]
        facts(capsys, site, "revert")
        assert content(site) == released
        if action == "revert":
            facts(capsys, site, "apply")
        fatal += 1
    files = len(paths(release))
    assert states == [ends[other]] * files + ["partial"] * (files - 1) + [ends[action]]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("function", ["replace", "open"])
def test_a_failure_takes_everything_back(capsys, site, release, monkeypatch, function, error):
    before, original = content(site), getattr(os, function)
    for fatal in range(1, len(paths(release)) + 1):
        calls = []

        def failing(path, *args, fatal=fatal, calls=calls, **kwargs):
            if str(path).endswith(".tardis-patch"):
                calls.append(path)
                if len(calls) == fatal:
                    raise error
            return original(path, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, function, failing)
            status, _, err = run(capsys, "apply", site)
        assert len(calls) >= fatal
        assert status == (130 if isinstance(error, KeyboardInterrupt) else 2)
        if status == 2:
            assert paths(release)[fatal - 1] in err and "No space left" in err and "Nothing was changed" in err
        assert content(site) == before


def test_a_failure_that_cannot_be_taken_back_is_told(capsys, site, release, monkeypatch):
    before, original, calls = content(site), os.replace, []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) >= 3:
            raise OSError(5, "Input/output error")
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", failing)
        message = refused(capsys, site, "apply")
    assert "could not be put back" in message and "run apply or revert again" in message
    assert "Nothing was changed" not in message
    answer = facts(capsys, site)
    assert answer["state"] == "partial"
    assert "half patched" in run(capsys, "status", site)[1]
    assert facts(capsys, site, "apply")["state"] == "patched"
    run(capsys, "revert", site)
    assert content(site) == before


def test_a_folder_that_cannot_be_written(site, release):
    """Root may write everywhere, so it gives that right up first."""
    before = content(site)
    folders = [folder for folder in site.rglob("*") if folder.is_dir()]
    for folder in folders:
        folder.chmod(0o555)
    try:
        capability_dac_override, drop_from_bounding_set = 1, 24
        libc = ctypes.CDLL(None)
        done = command(
            "apply",
            site,
            preexec_fn=lambda: libc.prctl(drop_from_bounding_set, capability_dac_override, 0, 0, 0),
        )
        assert done.returncode == 2 and done.stdout == "", done.stderr
        assert "Permission denied" in done.stderr and paths(release)[0] in done.stderr
        assert "Nothing was changed" in done.stderr and "user who installed SGLang" in done.stderr
        assert content(site) == before
        assert command("status", site).returncode == 0
    finally:
        for folder in folders:
            folder.chmod(0o755)


def test_two_at_once(capsys, site, release):
    descriptor = os.open(site / "sglang", os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        assert "another tardis sglang-patch" in refused(capsys, site, "apply")
        assert facts(capsys, site)["state"] == "original"
    finally:
        os.close(descriptor)
    assert facts(capsys, site, "apply")["state"] == "patched"


# --- the patch files


def test_there_is_a_patch_for_every_supported_release():
    assert list(PATCHES) == ["0.5.16", "0.5.23"]


def test_a_damaged_patch_file_changes_nothing(capsys, site, release, tmp_path, monkeypatch):
    from sglang_tardis.patching import patches_folder

    good = (patches_folder() / f"sglang-{release}.patch").read_bytes()
    folder = tmp_path / "patches"
    folder.mkdir()
    before = content(site)
    damages = [
        (good.replace(b'"tardis"', b'"tardes"', 1), "the patch promises SHA-256"),
        (good.replace(b"@@ -", b"@@ -1", 1), "not what the hunk expects"),
        (good[: good.rindex(b"\n+")], "cut off"),
        (good[: good.rindex(b"\n ") + 1], "ends too early"),
        (good.replace(b"before ", b"befor ", 1), "expected one 'before'"),
        (good.replace(b"a/sglang/srt", b"a/../srt", 1), "expected '--- a/PATH'"),
        (good.replace(b"/sglang/srt", b"/sglang/../srt", 2), "not a path inside the package"),
        (b"", "changes no file"),
    ]
    for damaged, why in damages:
        assert damaged != good
        (folder / f"sglang-{release}.patch").write_bytes(damaged)
        with monkeypatch.context() as patch:
            patch.setattr("sglang_tardis.cli.sglang_patch.load_patches", lambda: load_patches(folder))
            message = refused(capsys, site, "apply")
        assert why in message or "cut off" in message, message
        assert content(site) == before


# --- what a patched SGLang does


def whole_package(source: Path, folder: Path, release: str) -> None:
    """All of an installed SGLang: the files that the patch changes as copies, everything else as links to it."""
    folder.mkdir(parents=True)
    (folder / f"sglang-{release}.dist-info").symlink_to(source / f"sglang-{release}.dist-info")
    copies = {Path(path) for path in paths(release)}
    real = {parent for path in copies for parent in path.parents} - {Path(".")}
    for inner in sorted(real):
        (folder / inner).mkdir()
        for entry in (source / inner).iterdir():
            name = inner / entry.name
            if name in copies:
                shutil.copy2(entry, folder / name)
            elif entry.name == "__pycache__":
                shutil.copytree(entry, folder / name)
            elif name not in real:
                (folder / name).symlink_to(entry)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, dict[str, str | None]]:
    """sglang_patch_checks.py on both releases at once: importing SGLang is what takes the time."""
    running = {}
    for release in PATCHES:
        source = installed(release)
        if source is None:
            continue
        folder = tmp_path_factory.mktemp(f"sglang-{release}")
        whole_package(source, folder / "site", release)
        assert main(["sglang-patch", "apply", "--site", str(folder / "site")]) == 0
        entry_point = folder / "site" / "sglang_tardis-0.dist-info"
        entry_point.mkdir()
        (entry_point / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-tardis\nVersion: 0\n")
        (entry_point / "entry_points.txt").write_text(
            "[sglang.srt.plugins]\ntardis = sglang_tardis.sglang.plugin:register\n"
        )
        environment = dict(
            os.environ,
            PYTHONPATH=os.pathsep.join([str(folder / "site"), str(source), PYTHON]),  # 0.5.16 brings dependencies
            SGLANG_USE_CPU_ENGINE="0",
            CUDA_VISIBLE_DEVICES="",
        )
        environment.pop("SGLANG_PLUGINS", None)
        if release == "0.5.16":  # torch keeps one page hash of a name in a folder, and the two at work here differ
            extensions = environment.get("TORCH_EXTENSIONS_DIR")
            environment["TORCH_EXTENSIONS_DIR"] = f"{extensions}-0.5.16" if extensions else str(folder / "extensions")
        running[release] = (
            folder,
            subprocess.Popen(
                [sys.executable, str(CHECKS), str(folder)],
                stdout=subprocess.PIPE,
                stderr=(folder / "stderr").open("w"),
                text=True,
                env=environment,
                cwd=folder,
            ),
        )
    results = {}
    for release, (folder, process) in running.items():
        try:
            output = process.communicate(timeout=300)[0]
        finally:
            process.kill()
        lines = [line for line in output.splitlines() if line.startswith("RESULTS ")]
        assert lines, f"exit status {process.returncode}: {(folder / 'stderr').read_text()[-4000:]}"
        results[release] = json.loads(lines[-1].removeprefix("RESULTS "))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("name", re.findall(r"^def (check_\w+)", CHECKS.read_text(), re.MULTILINE))
def test_patched_sglang(outcomes, release, name):
    needs_core()
    problem = outcomes[release][name]
    if problem is not None:
        pytest.fail(problem, pytrace=False)
