# SPDX-License-Identifier: Apache-2.0
"""Stores for the commands, and how the commands are run and judged."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from sglang_tardis.cli.main import main

PARTS, REGION = 2, 8192


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


def run(capsys, *argv: object) -> tuple[int, str, str]:
    status = main([str(part) for part in argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def failure(capsys, *argv: object) -> str:
    status, out, err = run(capsys, *argv)
    assert status == 2 and out == ""
    assert err.count("\n") == 1 and "Traceback" not in err and err.startswith(f"tardis {argv[0]}: ")
    return err


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **extra}
