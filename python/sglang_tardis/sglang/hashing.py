# SPDX-License-Identifier: Apache-2.0
"""SGLang's own page hash, tried before it is needed."""

from __future__ import annotations

__all__ = ["exercise_hashing"]


def exercise_hashing(page_tokens: int) -> None:
    """Build SGLang's hash extension, which is compiled at first use: a missing compiler must show now."""
    from sglang.srt.mem_cache.utils import get_hash_str

    try:
        keys = get_hash_str(list(range(2 * page_tokens)), None, page_size=page_tokens)
    except Exception as error:
        raise RuntimeError(
            f"SGLang's page hash does not work here ({error}). It is compiled at first use: install a C++ compiler, "
            "ninja and the OpenSSL headers (Debian and Ubuntu: g++ ninja-build libssl-dev)."
        ) from error
    if len(keys) != 2 or any(len(key) != 64 for key in keys):
        raise RuntimeError(f"SGLang's page hash answered {keys!r}; expected two keys of 64 hexadecimal digits.")
