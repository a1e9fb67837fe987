# SPDX-License-Identifier: Apache-2.0
"""A real server of SGLang 0.5.16 on the CPU, from the folder that holds its wheel (README.md says how it is made)."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import pytest
import sglang_tardis
from server import MODELS, Server, ServerSpec, cached_by_a_hit, prompt

SITE = os.environ.get("TARDIS_SGLANG16_SITE", "")
HERE = Path(__file__).parent
PAGE, TOKENS, VOCABULARY = 64, 1024, 1024
HIT = cached_by_a_hit(TOKENS, PAGE)
ENTRY_POINTS = {
    "sglang-tardis": "tardis = sglang_tardis.sglang.plugin:register",
    "tardis-cpu-support": "tardis_cpu_support = tardis_cpu_support:register",
    "tardis-sglang16-support": "tardis_sglang16_support = tardis_sglang16_support:register",
}

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.skipif(
        not (SITE and Path(SITE, "sglang").is_dir()),
        reason="TARDIS_SGLANG16_SITE names no folder with SGLang 0.5.16 (README.md here); `make test` makes one",
    ),
]


def _plugins(folder: Path) -> Path:
    """A folder on PYTHONPATH that announces those of our plugins that are not installed in this environment."""
    for name, line in ENTRY_POINTS.items():
        try:
            importlib.metadata.distribution(name)
            continue
        except importlib.metadata.PackageNotFoundError:
            pass
        info = folder / f"{name.replace('-', '_')}-0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
        (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{line}\n")
    return folder


def _port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sglang16")
    path = [
        SITE,
        _plugins(folder / "plugins"),
        HERE / "sglang16_support",
        HERE.parents[1] / "demo" / "cpu_support",
        Path(sglang_tardis.__file__).parents[1],
    ]
    spec = ServerSpec(
        model=MODELS / "tiny-llama",
        port=_port(),
        page_size=PAGE,
        extra_config={"path": str(folder / "store"), "capacity": "1GiB"},
        environment={"PYTHONPATH": os.pathsep.join(map(str, path))},
    )
    server = Server(spec, folder / "server.log")
    server.start(timeout=400)
    yield server
    server.stop()


def test_a_prompt_comes_back_from_storage(server):
    """Cold, warm, and from storage alone: the same token and log probabilities as a device hit, bit for bit."""
    assert "sglang" in server.log_text() and "tardis: store" in server.log_text()
    ids = prompt(1, TOKENS, VOCABULARY)
    assert server.generate(ids).cached == {"device": 0, "host": 0, "storage": 0}
    device = server.generate(ids)
    assert device.cached == {"device": HIT, "host": 0, "storage": 0}
    server.wait_until_stored(TOKENS)
    server.flush_cache()
    stored = server.generate(ids)
    assert stored.cached == {"device": 0, "host": 0, "storage": HIT}
    assert stored.storage_backend == "TardisStorage"
    assert stored.same_first_token(device)
    assert server.metrics()["tardis_written_pages_total"] >= TOKENS // PAGE
    # a prompt that shares a part of it gets that part
    server.flush_cache()
    half = TOKENS // 2
    assert server.generate(ids[:half] + prompt(2, half, VOCABULARY)).cached == {
        "device": 0,
        "host": 0,
        "storage": half,
    }


def test_detach_attach_and_clear_at_run_time(server):
    ids = prompt(3, TOKENS, VOCABULARY)
    before = server.stored_tokens()
    server.generate(ids)
    server.wait_until_stored(before + TOKENS)
    server.flush_cache()
    assert server.detach_storage()[0] == 200
    assert server.generate(ids).cached == {"device": 0, "host": 0, "storage": 0}
    server.flush_cache()
    status, answer = server.attach_storage("tardis", {**server.spec.extra_config, "flush_intervall_ms": 1})
    assert status != 200 and "flush_intervall_ms" in answer
    status, answer = server.attach_storage("tardis", server.spec.extra_config)
    assert status == 200, answer
    assert server.generate(ids).cached == {"device": 0, "host": 0, "storage": HIT}
    server.flush_cache()
    assert server.clear_storage()[0] == 200
    assert server.generate(ids).cached == {"device": 0, "host": 0, "storage": 0}
