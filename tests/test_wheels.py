# SPDX-License-Identifier: Apache-2.0
"""What scripts/make-wheels refuses. Building wheels takes minutes and is done by hand: `make wheel`."""

import importlib.util
import subprocess
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "wheel_contents.py"


@pytest.fixture(scope="module")
def contents():
    spec = importlib.util.spec_from_file_location("wheel_contents", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for name, text in (("python/sglang_tardis/store.py", "x = 1\n"), ("patches/sglang-1.patch", "diff\n")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def good() -> dict[str, bytes]:
    return {
        "sglang_tardis/store.py": b"x = 1\n",
        "sglang_tardis/patches/sglang-1.patch": b"diff\n",
        "sglang_tardis/libtardis.so": b"\x7fELF",
        "sglang_tardis/_core.cpython-312-x86_64-linux-gnu.so": b"\x7fELF",
        "sglang_tardis-1.dist-info/licenses/LICENSE": b"licence",
    }


def test_a_good_wheel_has_no_problems(contents, source: Path):
    assert list(contents.problems(good(), ["BUILD-FOLDER", "vm", "localhost"], source)) == []


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("sglang_tardis/store.py", None, "store.py: missing"),
        ("sglang_tardis/store.py", b"x = 2\n", "store.py: missing, or not as in the source tree"),
        ("sglang_tardis/patches/sglang-1.patch", None, "patches/sglang-1.patch: missing"),
        ("sglang_tardis/libtardis.so", None, "libtardis.so: missing"),
        ("sglang_tardis/_core.cpython-312-x86_64-linux-gnu.so", None, "_core.: missing"),
        (
            "sglang_tardis/libtardis.so",
            b"....BUILD-FOLDER/cpp/store.cpp",
            "contains 'BUILD-FOLDER' of this machine",
        ),
        ("sglang_tardis.libs/libgomp-1.so.1", b"\x7fELF", "a library of this machine was copied in"),
        ("sglang_tardis-1.dist-info/licenses/LICENSE", None, "no licence"),
    ],
)
def test_each_fault_is_found(contents, source: Path, name: str, content: bytes | None, problem: str):
    files = {**good(), name: content}
    found = list(contents.problems({key: value for key, value in files.items() if value is not None},
                                   ["BUILD-FOLDER"], source))  # fmt: skip
    assert len(found) == 1 and problem in found[0]


def test_the_program_reads_wheels(contents, source: Path, tmp_path: Path, monkeypatch, capsys):
    wheel = tmp_path / "some.whl"
    monkeypatch.chdir(source)
    for files, status in ((good(), 0), ({**good(), "sglang_tardis/store.py": b""}, 1)):
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        assert contents.main([str(wheel)]) == status
        out, err = capsys.readouterr()
        assert out.startswith("5 files, ") and bool(err) == bool(status)


def test_an_interpreter_that_is_none_is_named():
    result = subprocess.run(
        [ROOT / "scripts" / "make-wheels", "/nonexistent/python"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "/nonexistent/python FAILED: no interpreter" in result.stderr
    assert "No wheel for: /nonexistent/python" in result.stderr
