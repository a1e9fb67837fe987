# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of checkpoints: what changes them, what does not, and what is refused."""

import hashlib
import json
import os
import random
import shutil
from pathlib import Path

import pytest
from sglang_tardis.weights import WeightsError, model_config_digest, weights_fingerprint


def write_safetensors(path: Path, tensors: dict[str, bytes], metadata: dict[str, str] | None = None) -> None:
    header: dict = {} if metadata is None else {"__metadata__": metadata}
    offset = 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + b"".join(tensors.values()))


def tensors(seed: int = 0) -> dict[str, bytes]:
    rng = random.Random(seed)
    return {f"layer.{i}": rng.randbytes(size) for i, size in enumerate((20_000, 3072, 10, 0, 4097))}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    root = tmp_path / "model"
    root.mkdir()
    write_safetensors(root / "model-00001-of-00002.safetensors", tensors(1))
    write_safetensors(root / "model-00002-of-00002.safetensors", tensors(2))
    (root / "config.json").write_text('{"hidden_size": 64, "rope_theta": 10000, "transformers_version": "4.1"}')
    (root / "model.safetensors.index.json").write_text(
        '{"weight_map": {"layer.0": "model-00001-of-00002.safetensors"}}'
    )
    (root / "tokenizer.json").write_text("{}")
    return root


def test_deterministic_and_independent_of_place_time_and_threads(model: Path, tmp_path: Path):
    one = weights_fingerprint(model)
    assert one.startswith("weights-v1:") and len(one) == len("weights-v1:") + 64
    copy = tmp_path / "elsewhere" / "other name"
    shutil.copytree(model, copy)
    for path in copy.iterdir():
        os.utime(path, (1, 1))
    assert weights_fingerprint(copy) == one
    assert weights_fingerprint(str(copy), threads=1) == weights_fingerprint(copy, threads=7) == one


def test_golden(model: Path):
    """Namespaces are named by it: it may not change between releases or machines."""
    assert weights_fingerprint(model) == "weights-v1:32c6166b7d38e5f4471f2492e9b5877ff30935f49a20cc717e42179c8a1d71da"


def test_huggingface_snapshot_of_symbolic_links(model: Path, tmp_path: Path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for path in model.iterdir():
        blob = blobs / hashlib.sha256(path.name.encode()).hexdigest()
        shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    link = tmp_path / "current"
    link.symlink_to(snapshot)
    assert weights_fingerprint(snapshot) == weights_fingerprint(link) == weights_fingerprint(model)
    blob = (snapshot / "model-00002-of-00002.safetensors").resolve()
    blob.unlink()
    with pytest.raises(WeightsError, match=r"model-00002.*weights_revision"):
        weights_fingerprint(snapshot)


def data_start(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("where", [0, 1023, 10_000, 19_999, 20_000, 20_000 + 1536, 23_072 + 9, -1])
def test_one_changed_byte_in_a_sampled_place(model: Path, where: int):
    """First, middle and last KiB of a long tensor, anywhere in a short one; the headers stay equal."""
    before = weights_fingerprint(model)
    path = model / "model-00001-of-00002.safetensors"
    size = path.stat().st_size
    flip(path, where if where < 0 else data_start(path) + where)
    assert path.stat().st_size == size
    assert weights_fingerprint(model) != before


def test_a_byte_between_samples_goes_unnoticed_as_documented(model: Path):
    before = weights_fingerprint(model)
    path = model / "model-00001-of-00002.safetensors"
    flip(path, data_start(path) + 5_000)
    assert weights_fingerprint(model) == before


def test_same_header_other_content(model: Path):
    before = weights_fingerprint(model)
    write_safetensors(model / "model-00001-of-00002.safetensors", tensors(3))
    assert weights_fingerprint(model) != before


def test_names_count(model: Path):
    before = weights_fingerprint(model)
    path = model / "model-00001-of-00002.safetensors"
    renamed = {name.replace("layer.0", "layer.9"): data for name, data in tensors(1).items()}
    write_safetensors(path, renamed)
    tensor_renamed = weights_fingerprint(model)
    write_safetensors(path, tensors(1))
    assert weights_fingerprint(model) == before
    path.rename(model / "model-00009-of-00002.safetensors")
    assert len({before, tensor_renamed, weights_fingerprint(model)}) == 3


def test_a_file_more_or_less_counts(model: Path):
    before = weights_fingerprint(model)
    write_safetensors(model / "adapter.safetensors", {})
    assert weights_fingerprint(model) != before
    (model / "adapter.safetensors").unlink()
    (model / "model-00002-of-00002.safetensors").unlink()
    assert weights_fingerprint(model) != before


def test_files_that_do_not_change_kv_are_ignored(model: Path):
    before = weights_fingerprint(model)
    (model / "tokenizer.json").write_text('{"changed": 1}')
    for name in (
        "README.md",
        "generation_config.json",
        "training_args.bin",
        "rng_state_0.pth",
        "optimizer.pt",
        ".x.bin",
    ):
        (model / name).write_bytes(b"anything")
    (model / "original").mkdir()
    (model / "original" / "consolidated.pth").write_bytes(b"anything")
    config = json.loads((model / "config.json").read_text())
    config["transformers_version"] = "5.0"
    (model / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=7))
    assert weights_fingerprint(model) == before


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", '{"hidden_size": 64, "rope_theta": 500000}'),
        ("hf_quant_config.json", '{"kv_cache_scheme": "fp8"}'),
        ("modeling_custom.py", "SCALE = 2"),
        ("model.safetensors.index.json", '{"weight_map": {"layer.0": "model-00002-of-00002.safetensors"}}'),
    ],
)
def test_files_that_change_what_the_weights_compute(model: Path, name: str, content: str):
    before = weights_fingerprint(model)
    (model / name).write_text(content)
    assert weights_fingerprint(model) != before


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.gguf", "consolidated.00.pth"])
@pytest.mark.parametrize("size", [0, 1, 262_144, 262_145, 1_000_003])
def test_other_formats_are_sampled_evenly(tmp_path: Path, name: str, size: int):
    path = tmp_path / name
    data = random.Random(size).randbytes(size)
    path.write_bytes(data)
    (tmp_path / "config.json").write_text("{}")
    before = weights_fingerprint(tmp_path)
    for offset in {0, size - 1} if size else ():
        flip(path, offset)
        assert weights_fingerprint(tmp_path) != before
        flip(path, offset)
    assert weights_fingerprint(tmp_path) == before
    path.write_bytes(data + b"\0")
    assert weights_fingerprint(tmp_path) != before
    assert weights_fingerprint(path) != before, "one file, without the folder's config.json"


def test_blob_samples_leave_no_gap_wider_than_the_sixty_third_part(tmp_path: Path):
    size = 10_000_000
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(size))
    before = weights_fingerprint(path)
    for start in (0, 3_333_333, size - size // 63):
        with path.open("r+b") as file:
            file.seek(start)
            file.write(b"\xff" * (size // 63))
        assert weights_fingerprint(path) != before
        path.write_bytes(bytes(size))


def test_no_weights_is_marked_dummy(tmp_path: Path, model: Path):
    (tmp_path / "config.json").write_text('{"a": 1, "b": 2, "_name_or_path": "x"}')
    one = weights_fingerprint(tmp_path)
    assert one.startswith("dummy-v1:")
    (tmp_path / "config.json").write_text('{"b": 2, "a": 1}')
    assert weights_fingerprint(tmp_path) == one
    (tmp_path / "config.json").write_text('{"a": 1, "b": 3}')
    assert weights_fingerprint(tmp_path) != one
    assert weights_fingerprint(model, dummy=True).startswith("dummy-v1:")


def hostile_headers() -> dict[str, bytes]:
    def framed(header: bytes, data: bytes = b"") -> bytes:
        return len(header).to_bytes(8, "little") + header + data

    def tensor(offsets: object) -> bytes:
        return framed(json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": offsets}}).encode(), bytes(8))

    return {
        "empty": b"",
        "short": b"1234567",
        "length 2^63": (2**63).to_bytes(8, "little") + bytes(100),
        "length 2^64-1": b"\xff" * 8 + bytes(100),
        "length beyond the file": (1000).to_bytes(8, "little") + b"{}",
        "not JSON": framed(b"{nonsense"),
        "not UTF-8": framed(b'{"\xff": 1}'),
        "too deep": framed(b"[" * 100_000),
        "a list": framed(b"[]"),
        "no offsets": framed(b'{"a": {"dtype": "U8"}}'),
        "an entry that is no object": framed(b'{"a": 1}'),
        "negative": tensor([-1, 4]),
        "backwards": tensor([4, 0]),
        "beyond the end": tensor([0, 9]),
        "huge": tensor([0, 2**70]),
        "floats": tensor([0.0, 4.0]),
        "booleans": tensor([False, True]),
        "one offset": tensor([0]),
        "Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    }


@pytest.mark.parametrize("kind", hostile_headers())
def test_hostile_safetensors_headers(model: Path, kind: str):
    path = model / "model-00002-of-00002.safetensors"
    path.write_bytes(hostile_headers()[kind])
    with pytest.raises(WeightsError, match=r"model-00002-of-00002\.safetensors.*weights_revision"):
        weights_fingerprint(model)


def test_truncated_at_every_kind_of_place(model: Path):
    path = model / "model-00001-of-00002.safetensors"
    data = path.read_bytes()
    start = data_start(path)
    for length, problem in (
        (0, "too short"),
        (7, "too short"),
        (8, "does not fit"),
        (start - 1, "does not fit"),
        (start, "truncated: tensor"),
        (start + 1, "truncated: tensor"),
        (len(data) - 1, "truncated: tensor"),
    ):
        path.write_bytes(data[:length])
        with pytest.raises(WeightsError, match=f"model-00001.*{problem}"):
            weights_fingerprint(model)
    path.write_bytes(data)
    weights_fingerprint(model)


def test_a_header_within_the_file_but_beyond_the_limit_is_not_read(model: Path):
    path = model / "model-00002-of-00002.safetensors"
    with path.open("wb") as file:
        file.write((150_000_000).to_bytes(8, "little"))
        file.truncate(200_000_000)  # sparse
    with pytest.raises(WeightsError, match="150000000 bytes does not fit"):
        weights_fingerprint(model)


def test_folders_without_anything(tmp_path: Path):
    with pytest.raises(WeightsError, match="neither weights nor a config"):
        weights_fingerprint(tmp_path)
    with pytest.raises(WeightsError, match=r"missing.*weights_revision"):
        weights_fingerprint(tmp_path / "missing")
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(WeightsError, match=r"config\.json.*not JSON"):
        weights_fingerprint(tmp_path)


def test_things_that_are_no_files(model: Path):
    os.mkfifo(model / "pipe.bin")
    with pytest.raises(WeightsError, match=r"pipe\.bin.*not a regular file"):
        weights_fingerprint(model)
    os.unlink(model / "pipe.bin")
    (model / "folder.safetensors").mkdir()
    with pytest.raises(WeightsError, match=r"folder\.safetensors.*not a regular file"):
        weights_fingerprint(model)


def test_deadline(model: Path):
    with pytest.raises(WeightsError, match=r"not finished after.*weights_revision"):
        weights_fingerprint(model, deadline_seconds=0.0)


def test_model_config_digest():
    one = model_config_digest({"a": 1, "b": [1, 2], "_name_or_path": "here"})
    assert one == model_config_digest({"b": [1, 2], "a": 1, "_name_or_path": "there"})
    assert one != model_config_digest({"a": 1, "b": [2, 1]})
    assert one != model_config_digest({"a": "1", "b": [1, 2]})
    assert len(one) == 64
