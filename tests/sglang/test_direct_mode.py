# SPDX-License-Identifier: Apache-2.0
"""The switch "mode": "direct": what SGLang's arguments resolve to, in this process and in those it starts."""

from __future__ import annotations

import json
import pickle

import pytest
from host_pools import host_pool, storage_config
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang_tardis.config import ConfigError
from sglang_tardis.sglang import direct_mode, seams
from sglang_tardis.sglang.storage import TardisStorage

HICACHE = ("--enable-hierarchical-cache", "--hicache-storage-backend", "tardis")


def resolved(model, settings, *words):
    """The arguments of a command line, resolved; settings are text or a mapping."""
    text = settings if isinstance(settings, str) else json.dumps(settings)
    arguments = prepare_server_args(
        [
            *("--model-path", str(model), "--device", "cpu", *HICACHE),
            *("--hicache-storage-backend-extra-config", text, *words),
        ]
    )
    arguments.resolve_once()
    return arguments


def check(arguments, path):
    view = resolving_view(arguments)
    assert view.enable_unified_cache_external_linker and view.unified_cache_external_linker_backend == "dynamic"
    assert not view.enable_hierarchical_cache and view.hicache_storage_backend is None
    assert view.unified_cache_external_linker_config == {
        "linker": direct_mode.LINKER_CLASS,
        "linker_module_path": direct_mode.LINKER_MODULE,
        "linker_extra_config": {"path": path, "queue_depth": 8},
    }


def test_hicache_flags_become_the_linkers(model, tmp_path, capsys):
    settings = {"mode": "direct", "path": str(tmp_path / "kv"), "queue_depth": 8}
    flags = ("--hicache-size", "3", "--hicache-mem-layout", "layer_first", "--hicache-io-backend", "direct")
    arguments = resolved(model, settings, *flags)
    check(arguments, settings["path"])
    check(pickle.loads(pickle.dumps(arguments)), settings["path"])
    assert resolving_view(arguments).hicache_size == 3  # the linker sizes its DRAM tier by it
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "tardis: mode direct" in line]
    assert "--hicache-mem-layout layer_first" in line and "--hicache-io-backend direct" in line
    assert "--hicache-write-policy" not in line
    arguments.resolve_once()
    check(arguments, settings["path"])


def test_settings_from_a_file_and_for_an_engine(model, tmp_path):
    settings = {"mode": "direct", "path": str(tmp_path / "kv"), "queue_depth": 8}
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(settings))
    check(resolved(model, f"@{file}"), settings["path"])
    arguments = ServerArgs(  # as Engine(**kwargs) makes it
        model_path=str(model),
        device="cpu",
        enable_hierarchical_cache=True,
        hicache_storage_backend="tardis",
        hicache_storage_backend_extra_config=json.dumps(settings),
    )
    arguments.resolve_once()
    check(arguments, settings["path"])


def test_mode_from_the_environment(model, tmp_path, monkeypatch):
    monkeypatch.setenv("TARDIS_CONFIG", '{"mode": "direct"}')
    check(resolved(model, {"path": str(tmp_path / "kv"), "queue_depth": 8}), str(tmp_path / "kv"))


def test_other_servers_are_left_alone(model, tmp_path):
    view = resolving_view(resolved(model, {"path": str(tmp_path / "kv")}))
    assert view.enable_hierarchical_cache and view.hicache_storage_backend == "tardis"
    assert not view.enable_unified_cache_external_linker


def test_contradictions_are_named(model, tmp_path):
    settings = {"mode": "direct", "path": str(tmp_path / "kv")}
    with pytest.raises(ValueError, match="two ways to choose a linker"):
        resolved(model, settings, "--enable-unified-cache-external-linker")
    arguments = ServerArgs(
        model_path=str(model),
        device="cpu",
        hicache_storage_backend="tardis",
        hicache_storage_backend_extra_config=json.dumps(settings),
    )
    with pytest.raises(ValueError, match="needs --enable-hierarchical-cache"):
        arguments.resolve_once()
    with pytest.raises(ConfigError, match='"host", "direct"'):
        resolved(model, {**settings, "mode": "straight"})


def test_a_running_server_does_not_change_its_mode(model, tmp_path):
    """Attaching at run time, and the dynamic route, lead to the host door's constructor."""
    pool, _ = host_pool(model)
    with pytest.raises(ConfigError, match="it is chosen when the server starts"):
        TardisStorage(storage_config(tmp_path / "kv", extra={"mode": "direct"}), pool)
    assert not (tmp_path / "kv").exists()


def test_scheduler_steps_are_hooked_for_a_linker_only(monkeypatch):
    """Servers without one do not pass through the hooks; `tardis doctor` knows that they could be taken."""
    hooks = seams._direct_hooks()
    if not seams._direct:
        assert not any(hook.target in HookRegistry._hooks for hook in hooks)
    monkeypatch.setattr(seams, "_direct", False)
    (seam,) = [seam for seam in seams.check() if seam.name == "load results"]
    assert seam.ok and all(hook.target in seam.detail for hook in hooks)
    monkeypatch.setattr(seams, "_direct_hooks", lambda: [hooks[0]._replace(path="Scheduler.no_such_step")])
    import sglang.srt.managers.scheduler  # noqa: F401

    (seam,) = [seam for seam in seams.check() if seam.name == "load results"]
    assert not seam.ok and "no_such_step" in seam.detail
    with pytest.raises(seams.SeamError, match="no_such_step"):
        seams.install_direct()
