# SPDX-License-Identifier: Apache-2.0
"""Crashes, corruption and failing storage under SGLang's real tree: slower, never wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tree_server import Split, TreeServer, prompt

TESTS = Path(__file__).parent


def test_killed_server(tmp_path, model):
    """kill -9 after a flush; the next server finds everything that had been flushed."""
    script = textwrap.dedent(
        f"""
        import os, signal, sys
        sys.path[:0] = [{str(TESTS)!r}, {str(TESTS.parents[1] / "demo" / "cpu_support")!r}]
        from pathlib import Path
        from sglang.srt.plugins import load_plugins
        from sglang_tardis.sglang import seams
        from tardis_cpu_support import apply_cpu_support
        load_plugins(); seams.install_late(); apply_cpu_support()
        from tree_server import TreeServer, prompt
        server = TreeServer(Path({str(tmp_path / "store")!r}), Path({str(model)!r}))
        server.prefill(prompt(1, 20))
        server.storage._store.flush()
        server.prefill(prompt(2, 3))
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert process.returncode == -signal.SIGKILL, process.stderr[-2000:]
    with TreeServer(tmp_path / "store", model) as server:
        assert server.prefill(prompt(1, 20)) == Split(0, 0, 320, 0)
        late = server.prefill(prompt(2, 3))  # written after the flush: there or not, but never wrong (prefill compares)
        assert late.storage + late.computed == 48
        assert server.storage._store.stats()["get_pages_corrupt"] == 0


def flip_bit(folder, content):
    """Flip one bit of the stored bytes that begin with `content`; they must be found exactly once."""
    hits = []
    for file in sorted((folder / "segments").iterdir()):
        data = file.read_bytes()
        place = data.find(content)
        while place >= 0:
            hits.append((file, place, data[place]))
            place = data.find(content, place + 1)
    assert len(hits) == 1, hits
    file, place, value = hits[0]
    with file.open("r+b") as handle:
        handle.seek(place)
        handle.write(bytes([value ^ 0x10]))
        handle.flush()
        os.fsync(handle.fileno())


@pytest.fixture
def damaged(tmp_path, model):
    """A store with ten pages of one prompt, the seventh with a flipped bit in its layer 2."""
    tokens = prompt(1, 10)
    with TreeServer(tmp_path / "store", model, mem_layout="page_first_direct", io_backend="direct") as server:
        server.prefill(tokens)
        content = server.page_content(tokens, 7 * 16)[2][1]
    flip_bit(tmp_path / "store", content.reshape(-1)[:64].numpy().tobytes())
    return tmp_path / "store", tokens


def test_corrupt_page_is_a_miss(damaged, model, caplog):
    folder, tokens = damaged
    with TreeServer(folder, model, mem_layout="page_first_direct", io_backend="direct") as server:
        assert server.prefill(tokens) == Split(0, 0, 96, 64)  # six good pages; prefill compared every byte
        stats = server.storage._store.stats()
        assert stats["get_pages_corrupt"] + stats["get_pages_torn"] == 1
        server.flush()
        assert server.prefill(tokens) == Split(0, 0, 160, 0)  # the page was stored again, elsewhere


def test_without_verification_the_corrupt_page_is_served(damaged, model):
    """Negative control: the test above passes because of the check, not because the flipped bit does not matter."""
    folder, tokens = damaged
    options = dict(mem_layout="page_first_direct", io_backend="direct", extra={"verify_reads": False})
    server = TreeServer(folder, model, **options)
    try:
        with pytest.raises(AssertionError, match="foreign bytes: page at token 96, layer 2, stream 1"):
            server.prefill(tokens)
    finally:
        server.close()


def test_missing_and_truncated_data_files(tmp_path, model):
    """What a file held is a miss; the rest is served, and the server starts."""
    tokens = prompt(1, 200)
    options = dict(tokens=8192, mem_layout="page_first_direct", io_backend="direct")
    with TreeServer(tmp_path / "store", model, **options) as server:
        server.prefill(tokens)
    files = sorted((tmp_path / "store" / "segments").iterdir())
    assert len(files) == 3
    os.truncate(files[1], files[1].stat().st_size // 2)
    with TreeServer(tmp_path / "store", model, **options) as server:
        first = server.prefill(tokens)
        assert 0 < first.storage < 3200
    files[0].unlink()
    with TreeServer(tmp_path / "store", model, **options) as server:
        split = server.prefill(tokens)
        assert split.storage + split.computed == 3200
        server.flush()
        assert server.prefill(tokens) == Split(0, 0, 3200, 0)


@pytest.mark.parametrize("core", ["python", "rust"])
def test_failing_storage(tmp_path, model, core):
    """SGLang's own fault injector, at 0.3 a call and with delays: every prompt is served, every byte is right."""
    from sglang.srt.environ import envs
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageFailureInjector

    prompts = [prompt(seed % 4, 3 + seed % 4) for seed in range(16)]
    with (
        envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.override(0.3),
        envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY.override(0.01),
        TreeServer(tmp_path / "store", model, core=core) as server,
    ):
        assert isinstance(server.controller.storage_backend, HiCacheStorageFailureInjector)
        assert server.controller.page_set_func == server.controller._page_set_zero_copy
        assert server.cache.hicache_storage_pass_prefix_keys
        outcomes = []
        for tokens in prompts:
            outcomes.append(server.prefill(tokens))
            server.flush()
        assert any(split.storage for split in outcomes[4:])
        assert any(split.computed for split in outcomes[4:])  # with 40 calls, all spared: 1 in 10^6
        ok, message = server.cache.detach_storage_backend()
        assert ok, message
        assert server.attach()[0]
    with TreeServer(tmp_path / "store", model, core=core) as server:  # the injector passed close() on
        server.prefill(prompts[0])
        server.flush()
        assert server.prefill(prompts[0]).computed == 0


def test_unwritable_folder_is_an_error_at_start(tmp_path, model):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(Exception, match="not a folder"):
        TreeServer(blocked, model)
