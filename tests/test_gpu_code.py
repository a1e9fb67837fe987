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


def test_decode_attention_is_tensor_copies_and_matrix_instructions(machine_code):
    """K and V come by tensor copies, and four matrix instructions follow each other for each 64 columns of a head."""
    kernels = {name: code for name, code in machine_code.items() if "decode_attention" in name}
    assert len(kernels) == 9, "bf16, fp16 and fp8, each with heads of 64, 128 and 256"
    for name, code in kernels.items():
        stored, columns = (int(number) for number in re.search(r"DecodeShapeILj(\d)ELj(\d+)E", name).groups())
        assert len(re.findall(r"\bUTMALDG\.4D\b", code)) == 2, name
        assert len(re.findall(r"\bHGMMA\.64x64x16\.F32", code)) == 2 * columns // 16, name
        assert ("BF16" in code) == ("half" not in name), name
        assert bool(re.search(r"\bF2FP\S*E4M3", code)) == (stored == 1), name


@pytest.fixture
def attention(gpu_build, monkeypatch):
    """sglang_tardis.attention.decode with the library of this build."""
    pytest.importorskip("torch", reason="torch is not installed: calls of decode attention were not looked at")
    from sglang_tardis import gio_abi
    from sglang_tardis.attention import abi, decode

    folders = [gpu_build, *gio_abi._folders()]
    monkeypatch.setattr(gio_abi, "_folders", lambda: folders)
    for cached in (gio_abi.gpu, abi.gpu):
        cached.cache_clear()
    yield decode
    for cached in (gio_abi.gpu, abi.gpu):
        cached.cache_clear()


def _attention(decode, **changes):
    import torch

    shape = {"query_heads": 8, "kv_heads": 2, "head_dim": 128, "page_tokens": 64, "max_tokens": 1024}
    return decode.DecodeAttention(**{"dtype": torch.bfloat16, **shape, **changes})


def test_decode_attention_says_what_it_was_built_for(attention):
    wanted = {f"{kind}:{columns}" for kind in ("bf16", "fp16", "fp8") for columns in (64, 128, 256)}
    assert set(attention.built_shapes()) == wanted


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"head_dim": 96}, "head_dim: expected 64, 128 or 256, found 96; use another attention backend"),
        ({"page_tokens": 1}, "page_tokens: expected 16, 32, 64 or 128, found 1; start the server with such"),
        ({"query_heads": 7}, "query_heads: expected a multiple of kv_heads, found 7 and 2"),
        ({"query_tokens": 17}, "query_tokens: .* at most 16, found 17"),
        ({"window_left": -2}, "window_left: expected -1 .all tokens. or more, found -2"),
        ({"soft_cap": -1.0}, "soft_cap: expected 0 .none. or more, found -1"),
        ({"splits": 257}, "splits: expected at most 256, found 257"),
        ({"max_tokens": 0}, "max_tokens: expected 1 to 2.30, found 0"),
    ],
)
def test_shapes_of_decode_attention_that_cannot_be(attention, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        _attention(attention, **changes).workspace_bytes(1)


def test_tensors_of_decode_attention_that_cannot_be(attention):
    import torch

    pool = attention.KvPool(*(torch.zeros(128, 2, 128, dtype=torch.bfloat16) for _ in range(2)))
    good = {
        "queries": torch.zeros(3, 8, 128, dtype=torch.bfloat16),
        "pools": [pool],
        "pages": torch.zeros(3, 16, dtype=torch.int32),
        "lengths": torch.zeros(3, dtype=torch.int32),
        "workspace": torch.zeros(16, dtype=torch.uint8),
        "scale": 1.0,
    }
    half = attention.KvPool(pool.keys.half(), pool.values)
    other = attention.KvPool(pool.keys, pool.values[:64])
    wide = torch.zeros(3, 8, 256, dtype=torch.bfloat16)
    for changes, sentence in [
        ({"queries": wide}, "queries: expected torch.bfloat16 .3, 8, 128. on cpu"),
        ({"queries": wide[..., :128]}, "queries: expected heads side by side"),
        ({"queries": good["queries"].half()}, "queries: expected torch.bfloat16"),
        ({"pools": []}, "pools: expected one or two, found 0"),
        ({"pools": [pool] * 3}, "pools: expected one or two, found 3"),
        ({"pools": [pool, half]}, "keys: expected torch.bfloat16"),
        ({"pools": [other]}, "values: expected torch.bfloat16 .128, 2, 128."),
        ({"pages": good["pages"].long()}, "pages: expected torch.int32"),
        ({"lengths": good["lengths"].long()}, "lengths: expected torch.int32"),
        ({"lengths": good["lengths"][:2]}, "queries: expected torch.bfloat16 .2, 8, 128."),
        ({"workspace": good["workspace"].int()}, "workspace: expected torch.uint8"),
        ({"out": good["queries"][:2]}, "out: expected torch.bfloat16"),
        ({"lse": torch.zeros(3, 4)}, "lse: expected torch.float32 .3, 8."),
        ({}, "queries: expected a tensor on a GPU, found one on cpu"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            _attention(attention)(**{**good, **changes})
    with pytest.raises(NotImplementedError, match=r"dtype: .* found torch.float32; use another attention backend"):
        _attention(attention, dtype=torch.float32)


def test_tensors_to_store_that_cannot_be(attention):
    import torch
    from sglang_tardis.attention.store import store_rows

    rows = torch.zeros(3, 2, 128, dtype=torch.bfloat16)
    pool = attention.KvPool(*(torch.zeros(128, 2, 128, dtype=torch.bfloat16) for _ in range(2)))
    good = {"keys": rows, "values": rows, "pools": [pool], "slots": torch.zeros(3, dtype=torch.int64)}
    for changes, sentence in [
        ({"pools": []}, "pools: expected one or two, found 0"),
        ({"keys": rows[0]}, "keys: expected .tokens, kv_heads, head_dim., found .2, 128."),
        ({"keys": rows.half()}, "keys: expected torch.bfloat16 .3, 2, 128. on cpu"),
        ({"values": rows[:2]}, "values: expected torch.bfloat16 .3, 2, 128."),
        ({"values": torch.zeros(3, 2, 256, dtype=torch.bfloat16)[..., :128]}, "values: expected heads side by side"),
        ({"pools": [attention.KvPool(pool.keys, pool.values[:, :1])]}, "values: expected torch.bfloat16 .128, 2, 128."),
        ({"slots": good["slots"].int()}, "slots: expected torch.int64 .3."),
        ({"entries": good["slots"]}, "entries: expected torch.int32"),
        ({}, "keys: expected a tensor on a GPU, found one on cpu"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            store_rows(**{**good, **changes}, page_tokens=64)
    wide = attention.KvPool(pool.keys.float(), pool.values.float())
    with pytest.raises(NotImplementedError, match=r"pools: .* found torch.float32; use the pool's own writer"):
        store_rows(**{**good, "pools": [wide]}, page_tokens=64)


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
