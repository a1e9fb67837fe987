# SPDX-License-Identifier: Apache-2.0
"""The GPU code without a GPU: it compiles, and its kernels are made of the instructions that they are meant to be."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
BUILD = Path(os.environ.get("TARDIS_BUILD_DIR") or REPOSITORY / "build" / "native").resolve()
NVCC = os.environ.get("TARDIS_NVCC_PATH", "")
# The first test compiles all GPU code.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
BULK_LOAD, BULK_STORE = "UBLKCP.S.G", "UBLKCP.G.S"


@pytest.fixture(scope="module")
def gpu_build(tmp_path_factory):
    """A build folder with libtardis_gpu.so and what runs on a GPU, or its objects: the product's if it has them."""
    if (BUILD / "libtardis_gpu.so").exists():
        return BUILD
    if not NVCC:
        pytest.skip("no nvcc on this machine, and none could be installed: GPU code was not compiled")
    build = tmp_path_factory.mktemp("gpu")
    definitions = ["-DTARDIS_CUDA=ON", "-DTARDIS_TESTS=ON", f"-DTARDIS_NVCC={NVCC}"]
    configured = subprocess.run(
        ["cmake", "-S", str(REPOSITORY), "-B", str(build), "-G", "Ninja", *definitions],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CUDACXX": NVCC},
    )
    assert configured.returncode == 0, configured.stdout + configured.stderr
    assert "CUDA on" in configured.stdout
    tests = REPOSITORY / "cpp" / "tests"
    programs = [*tests.glob("gpu_*_check.cu"), *tests.glob("gpu_*_bench.cu")]
    objects = [f"cpp/tests/CMakeFiles/tardis_{program.stem}.dir/{program.name}.o" for program in programs]
    subprocess.run(["cmake", "--build", str(build), "--target", "tardis_gpu", *objects], check=True)
    return build


def _cuobjdump() -> Path | None:
    """Of the toolkit, or of the Python package (requirements/test.txt)."""
    package = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin"
    beside = [Path(NVCC).parent] if NVCC else []
    for folder in (*beside, Path("/usr/local/cuda/bin"), package):
        found = shutil.which("cuobjdump", path=str(folder))
        if found:
            return Path(found)
    found = shutil.which("cuobjdump")
    return Path(found) if found else None


@pytest.fixture(scope="module")
def cuobjdump(gpu_build):
    """Calls cuobjdump on libtardis_gpu.so."""
    program = _cuobjdump()
    if program is None:
        pytest.skip("no cuobjdump, neither in a CUDA toolkit nor as a Python package: machine code was not looked at")
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ.get('PATH', '')}"}  # nvdisasm lies beside it

    def call(option: str) -> str:
        command = [program, option, gpu_build / "libtardis_gpu.so"]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout

    return call


@pytest.fixture(scope="module")
def machine_code(cuobjdump):
    """SASS by mangled kernel name."""
    parts = re.split(r"^\s*Function : (\S+)\s*$", cuobjdump("-sass"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_gpu_code_compiles(gpu_build):
    assert (gpu_build / "libtardis_gpu.so").stat().st_size > 0


def test_movers_are_bulk_copies(machine_code):
    movers = {name: code for name, code in machine_code.items() if "move_pieces" in name}
    assert len(movers) == 2, "with digests and without"
    for name, code in movers.items():
        assert BULK_LOAD in code, name
        assert BULK_STORE in code, name


def test_kernels_of_loads(machine_code):
    """Parts that were read again are copied by 16 bytes; what waits for the host sleeps between its looks."""

    def code_of(kernel: str) -> str:
        found = [code for name, code in machine_code.items() if re.search(rf"\d{kernel}E", name)]
        assert len(found) == 1, kernel
        return found[0]

    settle, gate = code_of("load_settle"), code_of("load_gate")
    assert re.search(r"\bLDG\.E\.128", settle)
    assert re.search(r"\bSTG\.E\.128", settle)
    for code in (settle, gate):
        assert "NANOSLEEP" in code
        assert re.search(r"\bLD\S*\.STRONG\.SYS", code)
    assert code_of("object_pieces")


def test_no_kernel_uses_local_memory(machine_code):
    """A spilled register or an array indexed at run time would cost more than what the kernel does."""
    assert machine_code
    for name, code in machine_code.items():
        assert not re.search(r"\b(LDL|STL)\b", code), name


def test_every_kernel_was_seen(cuobjdump, machine_code):
    """Without this a change in cuobjdump's output would pass in silence."""
    used = cuobjdump("-res-usage")
    assert set(re.findall(r"Function (\S+):", used)) == set(machine_code)
    assert all(int(stack) == 0 for stack in re.findall(r"\bSTACK:(\d+)", used))
