# SPDX-License-Identifier: Apache-2.0
"""Releases whose page keys do not tell LoRA adapters and salts apart.

SGLang 0.5.16 hashes tokens only: a prompt under adapter X, under a salt, and under neither has the same page keys,
and one would be served the KV of another. Newer releases seed the chain (``storage_namespace_seed``). Where they do
not, prompts with such a key are neither stored nor looked up; they work as without storage.
"""

from __future__ import annotations

from typing import Any

from sglang_tardis.log import logger

__all__ = ["TREES", "keys_are_namespaced", "skip_prefetch", "skip_write"]

TREES = (
    ("sglang.srt.mem_cache.hiradix_cache", "HiRadixCache"),
    ("sglang.srt.mem_cache.unified_radix_cache", "UnifiedRadixCache"),
)

_said = False


def keys_are_namespaced() -> bool:
    """Whether this SGLang seeds page keys with the request's extra key and salt."""
    from sglang.srt.mem_cache import utils

    return hasattr(utils, "storage_namespace_seed")


def _applies(cache: Any, node: Any) -> bool:
    from sglang_tardis.sglang import seams

    global _said
    key = getattr(node, "key", None)
    if getattr(key, "extra_key", None) is None:
        return False
    if not seams.is_ours(getattr(getattr(cache, "cache_controller", None), "storage_backend", None)):
        return False
    if not _said:
        _said = True
        logger.warning(
            "SGLang %s: page keys do not tell LoRA adapters and cache salts apart, so such prompts are not stored.",
            seams.sglang_version(),
        )
    return True


def skip_write(original, self, node, *args, **kwargs):
    """Tree.write_backup_storage: leave out a node whose key would be taken for another's."""
    if _applies(self, node):
        return None
    return original(self, node, *args, **kwargs)


def skip_prefetch(original, self, req_id, last_host_node, *args, **kwargs):
    """Tree.prefetch_from_storage: never extend a node of one adapter by pages of another."""
    if _applies(self, last_host_node):
        return None
    return original(self, req_id, last_host_node, *args, **kwargs)
