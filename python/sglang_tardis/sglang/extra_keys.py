# SPDX-License-Identifier: Apache-2.0
"""Releases whose page keys do not tell LoRA adapters, salts and images apart.

SGLang 0.5.16 hashes tokens only: a prompt under adapter X, under a salt, and under neither has the same page keys,
and one would be served the KV of another. Newer releases seed the chain (``storage_namespace_seed``). Where they do
not, prompts with such a key are neither stored nor looked up; they work as without storage.

The same release puts 30 bits of a hash in the place of an image's tokens (newer ones 248). Among the 30 000 images that
a store may meet, two of one size agree with a probability of a third; so what follows an image is not stored either.
"""

from __future__ import annotations

from typing import Any

from sglang_tardis.log import logger

__all__ = ["TREES", "keys_are_namespaced", "skip_prefetch", "skip_write"]

TREES = (
    ("sglang.srt.mem_cache.hiradix_cache", "HiRadixCache"),
    ("sglang.srt.mem_cache.unified_radix_cache", "UnifiedRadixCache"),
)

_FIRST_IMAGE_ID = 1_000_000  # SGLang's MM_PAD_SHIFT_VALUE: token ids from here on stand for images, audio and video
_said = False


def keys_are_namespaced() -> bool:
    """Whether this SGLang seeds page keys with the request's extra key and salt."""
    from sglang.srt.mem_cache import utils

    return hasattr(utils, "storage_namespace_seed")


def _has_extra_key(node: Any) -> bool:
    return getattr(getattr(node, "key", None), "extra_key", None) is not None


def _follows_image(node: Any) -> bool:
    """Whether the prompt up to this node holds an image; kept at the node, which every later write passes again."""
    path = []
    while node is not None and not hasattr(node, "_tardis_follows_image"):
        path.append(node)
        node = node.parent
    follows = node is not None and node._tardis_follows_image
    for one in reversed(path):
        ids = one.key.token_ids[: getattr(one.key, "limit", None)] if one.key is not None else ()
        follows = follows or max(ids, default=0) >= _FIRST_IMAGE_ID
        one._tardis_follows_image = follows
    return follows


def _is_tardis(cache: Any) -> bool:
    from sglang_tardis.sglang import seams

    global _said
    if not seams.is_ours(getattr(getattr(cache, "cache_controller", None), "storage_backend", None)):
        return False
    if not _said:
        _said = True
        logger.warning(
            "SGLang %s: page keys do not tell LoRA adapters, salts and images apart, so such prompts are not stored.",
            seams.sglang_version(),
        )
    return True


def skip_write(original, self, node, *args, **kwargs):
    """Tree.write_backup_storage: leave out a node whose key would be taken for another's."""
    if (_has_extra_key(node) or _follows_image(node)) and _is_tardis(self):
        return None
    return original(self, node, *args, **kwargs)


def skip_prefetch(original, self, req_id, last_host_node, *args, **kwargs):
    """Tree.prefetch_from_storage: never extend a node of one adapter by pages of another."""
    if _has_extra_key(last_host_node) and _is_tardis(self):
        return None
    return original(self, req_id, last_host_node, *args, **kwargs)
