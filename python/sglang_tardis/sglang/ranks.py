# SPDX-License-Identifier: Apache-2.0
"""The ranks of one server: what this one may do, and what all of them must agree on.

Every rank is a process with a backend of its own, and all of them open one store. Ranks whose bytes differ (tensor
parallel shards of MHA, pipeline stages, context-parallel ranks) have namespaces of their own; ranks whose bytes are
equal (MLA under tensor parallelism, data-parallel replicas) share one.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from sglang_tardis.log import logger
from sglang_tardis.sglang.server_settings import ServerSettings

__all__ = ["PeerError", "Rank", "UnsupportedRanksError", "common_name", "rank_of", "refuse_unsupported", "together"]


class UnsupportedRanksError(NotImplementedError):
    """A parallel set-up that this release does not store; the message names it and the reason."""


class PeerError(RuntimeError):
    """Another rank of this server could not attach, so this one does not either."""


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a server, as SGLang describes it to storage backends.

    Attributes:
        groups: (name, rank, size) of every parallel group with more than one member.
        writes: whether SGLang hands this rank's pages to storage. Of ranks that hold equal bytes (MLA), one writes and
            all read.
    """

    groups: tuple[tuple[str, int, int], ...]
    writes: bool

    def __str__(self) -> str:
        """Such as ``tp 1 of 4, pp 0 of 2 (reads only)``."""
        where = ", ".join(f"{name} {rank} of {size}" for name, rank, size in self.groups) or "the only one"
        return where if self.writes else f"{where} (reads only)"


def rank_of(config: Any) -> Rank:
    """The rank of this process, from SGLang's HiCacheStorageConfig."""
    groups = (
        ("tp", config.tp_rank, config.tp_size),
        ("pp", config.pp_rank, config.pp_size),
        ("cp", getattr(config, "attn_cp_rank", 0) or 0, getattr(config, "attn_cp_size", 1) or 1),
        ("dp", *_data_parallel(config)),
    )
    writes = getattr(config, "is_storage_writer", None)
    if writes is None:  # releases in which only the cache controller knows
        writes = not config.is_mla_model or config.tp_rank == 0
    return Rank(groups=tuple(group for group in groups if group[2] > 1), writes=bool(writes))


def _data_parallel(config: Any) -> tuple[int, int]:
    """Rank and size among data-parallel replicas, as far as SGLang tells them; for messages only."""
    try:
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        for rank, size in (("attn_dp_rank", "attn_dp_size"), ("dp_rank", "dp_size")):
            if int(getattr(parallel, size, 1)) > 1:
                return int(getattr(parallel, rank)), int(getattr(parallel, size))
    except Exception:  # older releases do not tell; tools have nothing published
        pass
    return int(getattr(config, "dp_rank", 0) or 0), 1


def refuse_unsupported(config: Any, settings: ServerSettings) -> None:
    """Raise UnsupportedRanksError for set-ups in which pages would never be found, or would be another rank's.

    The answer is the same on every rank of a server.
    """
    if getattr(config, "should_split_heads", False) or getattr(config, "tp_lcm_size", None):
        raise UnsupportedRanksError(
            "tp_lcm_size (heads split so that servers of different TP sizes share pages) is not supported by this "
            "release of tardis: it stores a page of one rank as one object. Remove it from "
            "--hicache-storage-backend-extra-config; every TP size then has pages of its own."
        )
    dcp_size = max(int(getattr(config, "dcp_size", 1) or 1), int(settings.get("dcp_size", 1) or 1))
    if dcp_size > 1:
        raise UnsupportedRanksError(
            f"Decode context parallelism (--dcp-size {dcp_size}) is not supported by this release of tardis: SGLang "
            "hands its page shards to the file and mooncake backends only. Use --dcp-size 1."
        )
    if not config.is_mla_model:
        return
    cp_size = getattr(config, "attn_cp_size", 1) or 1
    if cp_size > 1 and not _dp_attention(settings):
        raise UnsupportedRanksError(
            f"MLA with attention context parallelism (size {cp_size}) and without --enable-dp-attention is not "
            "supported: SGLang lets rank 0 alone write, but every context-parallel rank reads pages of its own, so "
            "nothing would ever be found. Use another storage backend or one context-parallel rank."
        )
    _refuse_distant_writer(config, settings)


def _refuse_distant_writer(config: Any, settings: ServerSettings) -> None:
    """MLA ranks read what one rank of their TP group writes, so all of them must have its disk."""
    nodes = int(settings.get("nnodes", 1) or 1) // max(int(config.pp_size), 1)
    tp_size = int(settings.get("tp_size", config.tp_size) or config.tp_size)
    if nodes <= 1:
        return
    per_node = max(tp_size // nodes, 1)
    # TP groups (attention groups under DP attention) are runs of config.tp_size ranks.
    if per_node % config.tp_size:
        raise UnsupportedRanksError(
            f"MLA over several nodes ({per_node} TP ranks a node, TP groups of {config.tp_size}) is not supported: one "
            "rank of a group writes to its local store, and those on other nodes would find nothing. Use TP groups "
            "that fit a node (--enable-dp-attention with --dp-size), or another storage backend."
        )


def _dp_attention(settings: ServerSettings) -> bool:
    try:
        from sglang.srt.layers.dp_attention import is_dp_attention_enabled

        return bool(is_dp_attention_enabled())
    except Exception:
        return bool(settings.get("enable_dp_attention", False))


# ---- agreement ----------------------------------------------------------------------------------------------------


@contextmanager
def together(controller: Any) -> Iterator[None]:
    """Run the body on every rank of the server; if it fails on one, it fails on all.

    SGLang makes process groups right after it has created a backend, and every rank must take part: where one rank
    alone had failed, the others would wait for it until a time-out. So this asks all ranks first, in the same way and
    only where SGLang is about to do so.

    Args:
        controller: SGLang's cache controller, or None where there is no server (tools, tests).

    Raises:
        PeerError: another rank failed. The body's own error otherwise.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    failed = _failures(controller, error)
    if error is not None:
        raise error
    if failed:
        raise PeerError(
            "tardis is attached on all ranks or on none, and other ranks could not: "
            + "; ".join(f"rank {rank}: {why}" for rank, why in failed)
        )


def _failures(controller: Any, error: Exception | None) -> list[tuple[int, str]]:
    """(world rank, message) of every rank whose body failed."""
    if not _makes_groups(controller):
        return []
    import torch.distributed as dist

    mine = None if error is None else f"{type(error).__name__}: {error}"
    said: list[str | None] = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(said, mine)
    except Exception:
        if error is None:
            raise
        logger.exception("tardis: the other ranks could not be told that attaching failed here")
        return []
    return [(rank, why) for rank, why in enumerate(said) if why is not None]


def _makes_groups(controller: Any) -> bool:
    """Whether SGLang is about to make process groups, which takes every rank of the world."""
    import torch.distributed as dist

    if controller is None or not dist.is_available() or not dist.is_initialized():
        return False
    groups = [getattr(controller, name, None) for name in ("attn_cp_group", "attn_tp_group")]
    if groups == [None, None]:
        groups = [getattr(controller, "tp_group", None)]
    if hasattr(controller, "_create_sync_groups"):  # the newer release; the older one leaves stages out
        groups.append(getattr(controller, "pp_group", None))
    return any(group is not None and dist.get_world_size(group=group) > 1 for group in groups)


# ---- names --------------------------------------------------------------------------------------------------------

_lock = threading.Lock()
_names: dict[str, str] = {}
_process: tuple[int, str] = (0, "")  # process id, and a name that no other process has


def common_name(what: str) -> str:
    """A made-up name that no other server uses, the same on every rank of this one and in every call for `what`.

    Ranks that share pages (MLA) must agree on names of things that no file identifies, such as weights that came from
    memory. The first rank to ask chooses; SGLang's rendezvous store tells the others. Where there is none, the name is
    this process's own, which costs hits and nothing else.
    """
    global _process
    with _lock:
        if _process[0] != os.getpid():  # not asked yet, or forked since
            _process = (os.getpid(), uuid.uuid4().hex)
            _names.clear()
        if what not in _names:
            _names[what] = _agree(f"sglang-tardis/{what}", _process[1])
        return _names[what]


def _agree(key: str, process: str) -> str:
    mine = uuid.uuid4().hex
    try:
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            return mine
        store = dist.distributed_c10d._get_default_store()
        # A rank that was started anew counts its weight updates from the beginning; names given out before are not its.
        if store.compare_set(f"{key}/rank-{dist.get_rank()}", "", process) != process.encode():
            return mine
        return store.compare_set(key, "", mine).decode()
    except Exception as error:
        logger.warning("tardis: the ranks could not agree on a name (%s); each of them uses its own", error)
        return mine
