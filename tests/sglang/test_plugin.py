# SPDX-License-Identifier: Apache-2.0
"""The plugin's seams on the installed SGLang: taken, verified, and silent for those who do not use them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from host_pools import host_pool, storage_config
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import prepare_server_args
from sglang_tardis.sglang import plugin, seams
from tree_server import TreeServer


def test_every_seam_holds():
    found = plugin.check_seams()
    names = {seam.name for seam in found}
    assert names >= {"cli choice", "registry", "factory", "zero-copy", "attach", "prefix keys"}
    assert names >= {"direct mode", "load results"}
    assert [seam for seam in found if not seam.ok] == []


def parse(model, *words):
    return prepare_server_args(["--model-path", str(model), "--device", "cpu", *words])


def test_command_line(model, capsys):
    arguments = parse(model, "--enable-hierarchical-cache", "--hicache-storage-backend", "tardis")
    assert arguments.hicache_storage_backend == "tardis"
    assert parse(model, "--hicache-storage-backend", "file").hicache_storage_backend == "file"
    with pytest.raises(SystemExit) as error:
        parse(model, "--hicache-storage-backend", "tardiss")
    assert error.value.code == 2
    assert "'tardis'" in capsys.readouterr().err  # it is among the choices that are listed


def test_registering_twice_changes_nothing():
    before = [list(hooks) for hooks in HookRegistry._hooks.values()]
    plugin.register()
    plugin.register()
    assert [list(hooks) for hooks in HookRegistry._hooks.values()] == before


@pytest.mark.parametrize("path", ["HiCacheController.attach_storage_backend", "StorageAttachment.apply_runtime_config"])
def test_a_hook_that_was_not_applied_stops_the_start(model, tmp_path, monkeypatch, path):
    """SGLang only logs a hook that fails; a server that asked for tardis must not start with a slow path instead."""
    hook = next(hook for hook in seams._hooks if hook.path == path)
    owner_name, method = path.split(".")
    owner = getattr(sys.modules[hook.module], owner_name)
    monkeypatch.setattr(owner, method, getattr(owner, method).__wrapped__)
    pool, _ = host_pool(model)
    with pytest.raises(seams.SeamError) as error:
        StorageBackendFactory.create_backend("tardis", storage_config(tmp_path / "store"), pool)
    assert seams.sglang_version() in str(error.value) and path in str(error.value) and hook.seam in str(error.value)
    with pytest.raises(seams.SeamError):
        TreeServer(tmp_path / "store", model)
    # ... and nobody else is affected
    with TreeServer(None, model) as server:
        assert server.prefill(list(range(16))).computed == 16


def test_a_missing_seam_is_named(monkeypatch):
    wanted = seams._wanted_hooks()
    monkeypatch.setattr(
        seams, "_wanted_hooks", lambda: [*wanted, wanted[0]._replace(seam="imaginary", path="No.where")]
    )
    bad = [seam for seam in seams.check() if not seam.ok]
    assert [seam.name for seam in bad] == ["imaginary"] and "No.where" in bad[0].detail
    with pytest.raises(seams.SeamError, match="imaginary"):
        seams.require()
    seams.require("factory", "zero-copy")


def test_a_missing_zero_copy_function_is_an_error(model, tmp_path, monkeypatch):
    from sglang.srt.managers.cache_controller import HiCacheController

    monkeypatch.delattr(HiCacheController, "_page_set_zero_copy")
    with pytest.raises(seams.SeamError, match="zero-copy"):
        TreeServer(tmp_path / "store", model)
    monkeypatch.undo()
    TreeServer(tmp_path / "store", model).close()  # the failed attach left no lock on the folder


def test_importing_the_plugin_is_cheap():
    """The plugin loader imports it in every process of every server: neither torch nor SGLang may come with it."""
    script = (
        "import sys, sglang_tardis.sglang.plugin; "
        "heavy = {'torch', 'sglang', 'numpy', 'sglang_tardis._core', 'sglang_tardis.store'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_broken_installation_hurts_nobody(monkeypatch, caplog):
    monkeypatch.setattr(seams, "install", lambda: 1 / 0)
    plugin.register()
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    monkeypatch.setattr(sys, "argv", ["launch_server", "--hicache-storage-backend=tardis"])
    plugin.register()
    assert "ZeroDivisionError" in caplog.text


def test_the_host_layout_is_left_to_sglang(model):
    from sglang.srt.arg_groups.overrides import resolving_view

    arguments = parse(model, "--enable-hierarchical-cache", "--hicache-storage-backend", "tardis")
    arguments.resolve_once()
    assert resolving_view(arguments).hicache_mem_layout == "page_first"
