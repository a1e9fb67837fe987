# SPDX-License-Identifier: Apache-2.0
"""SGLang's KV pool in host memory: where its buffers are allocated, and how many tokens it has.

SGLang allocates K and V of a KV pool inside of a `torch.cuda.MemPool` if `maybe_init_custom_mem_pool` gives it one:
that is all it has to be told. Its size comes from `KVCacheConfigurator._profile_available_bytes`, which
measures HBM: here host memory decides, and ``--mem-fraction-static`` limits nothing.
"""

from __future__ import annotations

import contextlib
from typing import Any

from sglang_tardis.config import TardisConfig
from sglang_tardis.log import logger
from sglang_tardis.sglang import attention_mode
from sglang_tardis.sglang.server_settings import ServerSettings

__all__ = ["budget_bytes", "check_available", "check_configure", "create_buffers", "custom_mem_pool", "profiled_bytes"]

_AUTO_SHARE = 0.8
"""Of what the machine has left: the rest is SGLang's own processes', page cache, pinned staging."""
_NO_LIMIT = 1 << 50
"""More than any pool takes, so that --max-total-tokens decides alone; what is allocated is checked then."""


def budget_bytes(explicit: int, max_total_tokens: int | None, available: int, ranks: int) -> int:
    """Bytes of KV that a rank may have in host memory.

    Args:
        explicit: setting `attention_host`, of each rank; 0: none.
        max_total_tokens: ``--max-total-tokens``, which lowers the result further by itself.
        available: host memory that may be taken now, in bytes.
        ranks: on this host, which share it.

    Raises:
        NotImplementedError: ranks that would measure at different times, and so not agree.
    """
    if explicit:
        return explicit
    if max_total_tokens:
        return _NO_LIMIT
    if ranks > 1:
        raise NotImplementedError(
            f"--attention-backend tardis: expected the size of the KV pool for {ranks} ranks, found none; set "
            "attention_host (of each rank) in TARDIS_CONFIG, or --max-total-tokens"
        )
    return int(available * _AUTO_SHARE)


def check_configure(configurator: Any, *_args: Any, **_kwargs: Any) -> None:
    """Before SGLang makes its pools: refuse what is not supported."""
    if attention_mode.is_wanted():
        attention_mode.refuse_server(configurator, ServerSettings())


def profiled_bytes(original: Any, configurator: Any, *args: Any, **kwargs: Any) -> int:
    """KVCacheConfigurator._profile_available_bytes: of host memory in place of HBM."""
    if not attention_mode.is_wanted() or str(configurator.device) == "cpu":
        return original(configurator, *args, **kwargs)
    from sglang_tardis.attention.pool_memory import available_bytes

    settings = ServerSettings()
    config = attention_mode.settings_of(configurator.server_args)
    tokens = settings.get("max_total_tokens")
    replicas = 1 if settings.get("enable_dp_attention") else int(settings.get("dp_size", 1))  # else within tp_size
    world = int(settings.get("tp_size", 1)) * int(settings.get("pp_size", 1))
    ranks = -(-world // int(settings.get("nnodes", 1))) * replicas
    available = available_bytes()
    budget = budget_bytes(config.attention_host_bytes, tokens, available, ranks)
    said = f"--max-total-tokens {tokens}" if budget == _NO_LIMIT else f"{budget / 2**30:.2f} GiB"
    logger.info(
        "tardis: KV pool in host memory, sized by %s (%.2f GiB available); --mem-fraction-static does not limit it",
        said,
        available / 2**30,
    )
    return budget


def custom_mem_pool(original: Any, *args: Any, **kwargs: Any) -> Any:
    """maybe_init_custom_mem_pool(device): a pool of host memory."""
    device = kwargs.get("device", args[0] if args else "")
    if not _is_cuda(device) or not attention_mode.is_wanted():
        return original(*args, **kwargs)
    enabled, _pool, kind = original(*args, **kwargs)
    if enabled:
        raise NotImplementedError(
            f"--attention-backend tardis: expected no other memory pool for KV, found {kind}; unset "
            "SGLANG_MOONCAKE_CUSTOM_MEM_POOL"
        )
    from sglang_tardis.attention.pool_memory import make_pool

    config = attention_mode.settings_of(None)
    pool = make_pool(check=config.attention_host_check)
    return True, pool, "TARDIS_HOST"


def create_buffers(original: Any, pool: Any, *args: Any, **kwargs: Any) -> Any:
    """MHATokenToKVPool._create_buffers: say what is missing of host memory in its own words, and that it is there.

    Raises:
        ValueError: there is no room for a page.
        HostMemoryError: there is not that much host memory.
    """
    if not _is_cuda(pool.device) or not attention_mode.is_wanted():
        return original(pool, *args, **kwargs)
    from sglang_tardis.attention import pool_memory

    wanted = _bytes_of(pool)
    if pool.size < pool.page_size:
        raise ValueError(
            f"--attention-backend tardis: expected room for a page of {pool.page_size} tokens, found {pool.size}; a "
            f"page takes {wanted // (pool.size + pool.page_size) * pool.page_size} bytes: set a larger attention_host "
            "or --max-total-tokens"
        )
    check_available(wanted, pool_memory.available_bytes(), pool.size, attention_mode.settings_of(None))
    before = pool_memory.usage().bytes
    with pool_memory.explained():
        result = original(pool, *args, **kwargs)
    after = pool_memory.usage()
    if after.bytes - before < wanted:
        raise RuntimeError(
            f"tardis: expected {wanted} bytes of KV in host memory, found {after.bytes - before}; SGLang allocated its "
            "pool elsewhere. Use a supported release (0.5.23)"
        )
    logger.info(
        "tardis: KV of running requests: %.2f GiB of pinned host memory in %d blocks, NUMA node %s%s; in HBM: 0",
        after.bytes / 2**30,
        after.blocks,
        after.node if after.node >= 0 else "any",
        f", {after.reserved_page_bytes / 2**30:.2f} GiB in reserved huge pages" if after.reserved_page_bytes else "",
    )
    return result


def check_available(wanted: int, available: int, tokens: int, config: TardisConfig) -> None:
    """Before the first layer's block is taken, the whole pool.

    Raises:
        HostMemoryError: there is not that much.
    """
    from sglang_tardis.attention.pool_memory import HostMemoryError

    if config.attention_host_check and wanted > available:
        raise HostMemoryError(
            f"--attention-backend tardis: expected {wanted / 2**30:.2f} GiB of host memory for KV of {tokens} tokens, "
            f"found {available / 2**30:.2f} GiB available; set a smaller attention_host or --max-total-tokens, free "
            "memory, or set attention_host_check to false if this machine's memory grows as it is touched"
        )


def _bytes_of(pool: Any) -> int:
    """K and V of all layers of a MHATokenToKVPool that has no buffers yet."""
    row = pool.head_num * (pool.head_dim + pool.v_head_dim) * pool.store_dtype.itemsize
    return (pool.size + pool.page_size) * row * pool.layer_num


def _is_cuda(device: Any) -> bool:
    with contextlib.suppress(AttributeError):
        device = device.type
    return str(device).startswith("cuda")
