# SPDX-License-Identifier: Apache-2.0
"""The switch ``"mode": "direct"``: HiCache's flags become those of SGLang's external linker.

SGLang lets ``--enable-hierarchical-cache`` and its linker exclude each other, so the flags that people know are
declared anew before anything reads them. Declarations are SGLang's own means for that: they are part of the arguments'
resolution and reach the scheduler processes with them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sglang_tardis.config import EXTRA_CONFIG_FLAG, load_config
from sglang_tardis.config_text import parse_text
from sglang_tardis.log import logger

__all__ = ["LINKER_CLASS", "LINKER_MODULE", "declare_direct_mode", "linker_settings", "resolving_settings"]

LINKER_MODULE = "sglang_tardis.sglang.linker"
LINKER_CLASS = "TardisLinker"

_BACKEND = "tardis"
_FLAG = '--hicache-storage-backend tardis with "mode": "direct"'
# They shape the host pool, or the way between it and the storage.
_WITHOUT_MEANING = (
    "hicache_mem_layout",
    "hicache_io_backend",
    "hicache_write_policy",
    "hicache_host_memory_mode",
    "hicache_storage_prefetch_policy",
)


def declare_direct_mode(server_args: Any, *_args: Any, **_kwargs: Any) -> None:
    """Before SGLang resolves its arguments: put the linker in place of HiCache if the settings say ``direct``.

    Raises:
        ConfigError: a setting is unknown or wrong.
        ValueError: this SGLang has no external linker, or the flags contradict each other.
    """
    view = resolving_settings(server_args)
    if view.hicache_storage_backend != _BACKEND:
        return
    text = view.hicache_storage_backend_extra_config
    if load_config(text).mode != "direct":
        return
    fields = {field.name: field for field in _fields(server_args)}
    if "unified_cache_external_linker_config" not in fields:
        from sglang_tardis.sglang.seams import sglang_version

        raise ValueError(
            f"{_FLAG} needs SGLang's external linker, which came with 0.5.20; this is {sglang_version()}. Use 0.5.23, "
            'or leave "mode" out for the way through the host pool.'
        )
    if view.enable_unified_cache_external_linker:
        raise ValueError(
            f"{_FLAG} and --enable-unified-cache-external-linker are two ways to choose a linker; give one of them."
        )
    if not view.enable_hierarchical_cache:
        raise ValueError(f"{_FLAG} needs --enable-hierarchical-cache as well.")
    from sglang.srt.arg_groups.overrides import declare_resolution

    declare_resolution(
        server_args,
        "tardis_direct_mode",
        enable_hierarchical_cache=False,
        hicache_storage_backend=None,
        enable_unified_cache_external_linker=True,
        unified_cache_external_linker_backend="dynamic",
        unified_cache_external_linker_config={
            "linker": LINKER_CLASS,
            "linker_module_path": LINKER_MODULE,
            "linker_extra_config": linker_settings(text),
        },
    )
    ignored = [
        f"--{name.replace('_', '-')} {getattr(server_args, name)}"
        for name in _WITHOUT_MEANING
        if name in fields and getattr(server_args, name) != fields[name].default
    ]
    logger.info(
        "tardis: mode direct: HiCache's flags stand for SGLang's external linker %s, without a host pool%s",
        LINKER_CLASS,
        f"; without meaning there and ignored: {', '.join(ignored)}" if ignored else "",
    )


def linker_settings(extra_config: Any) -> dict[str, Any]:
    """What the linker is given of ``--hicache-storage-backend-extra-config`` (text, ``@file`` or a mapping)."""
    if isinstance(extra_config, str):
        extra_config, _source = parse_text(extra_config, EXTRA_CONFIG_FLAG)
    return {name: value for name, value in (extra_config or {}).items() if name != "mode"}


def resolving_settings(server_args: Any) -> Any:
    """The arguments with what was declared so far; older releases resolve in place."""
    try:
        from sglang.srt.arg_groups.overrides import resolving_view
    except ImportError:
        return server_args
    return resolving_view(server_args)


def _fields(server_args: Any) -> Any:
    import dataclasses

    kind = type(server_args)
    return msgspec.structs.fields(kind) if issubclass(kind, msgspec.Struct) else dataclasses.fields(kind)
