# SPDX-License-Identifier: Apache-2.0
"""Servers and sizes of direct.py: for a GPU, and for a check on a CPU."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from typing import Any

from common import ServedModel
from serving_workloads import LvEval, Request, Setting, WorkingSet
from sglang_tardis.config import parse_size
from ttft_campaign import GPU_FLAGS, HERE


@dataclasses.dataclass(frozen=True)
class Kind:
    """A server: what is below the device pool, and how large the pools are."""

    name: str
    title: str
    small: bool = False
    """The small pools: those that the working set overflows."""
    layout: str | None = None
    io: str | None = None
    door: str | None = None
    """`direct` or `host`: tardis by that door; None: SGLang's DRAM tier alone."""
    fresh: bool = False
    """It begins with an empty store."""
    disk: bool = False
    """Its store lies on a disk."""
    other: str | None = None
    """What keeps files instead: `nixl`, SGLang's name of a storage backend below its DRAM tier; `lmcache`, a server of
    its own, which has the DRAM tier too."""

    @property
    def backend(self) -> str | None:
        """What keeps files; None: nothing does."""
        return "tardis" if self.door else self.other

    @property
    def storage(self) -> str | None:
        """SGLang's name of the storage backend; None: there is none."""
        return None if self.other == "lmcache" else self.backend

    @property
    def dram_tier(self) -> str:
        """Where SGLang counts tokens that came from the DRAM tier."""
        return "storage" if self.other == "lmcache" else "host"

    @property
    def files_tier(self) -> str:
        """Where SGLang counts tokens that came from files: hits of an external linker are those of the host."""
        return "host" if self.door == "direct" else "storage"

    def extra_config(self, folder: pathlib.Path, capacity: str, more: dict[str, Any]) -> dict[str, Any]:
        """Settings of what keeps files; `more` are further ones of tardis, or of NIXL's plugin."""
        if self.storage is None:
            return {}
        if self.other == "nixl":
            # A tmpfs has no O_DIRECT to speak of, and what is measured must not be deleted meanwhile.
            plugin = {"posix": {"active": True, **more}}
            return {"plugin": plugin, "use_direct_io": False, "l3_cleaner_enabled": False}
        mode = {"mode": "direct"} if self.door == "direct" else {}
        io = {"direct_io": "on"} if self.disk else {}
        return {**mode, "path": str(folder), "capacity": capacity, **io, **more}


KINDS = {
    kind.name: kind
    for kind in (
        Kind("direct", "tardis direct, an empty store", door="direct", fresh=True),
        Kind("restart", "tardis direct, started anew on that store", small=True, door="direct"),
        Kind(
            "hicache-direct",
            "HiCache-DRAM, page_first_direct and direct",
            layout="page_first_direct",
            io="direct",
        ),
        Kind("hicache", "HiCache-DRAM, SGLang's defaults (page_first and kernel)", small=True),
        Kind(
            "host",
            "tardis through HiCache's host pool, an empty store",
            layout="page_first_direct",
            io="direct",
            door="host",
            fresh=True,
        ),
        Kind(
            "host-restart",
            "tardis through HiCache's host pool, started anew on that store",
            small=True,
            layout="page_first_direct",
            io="direct",
            door="host",
        ),
        Kind("disk", "tardis direct, an empty store on a disk", small=True, door="direct", fresh=True, disk=True),
        Kind(
            "nixl",
            "SGLang's HiCache with its `nixl` backend (POSIX), an empty folder",
            small=True,
            layout="page_first_direct",
            io="direct",
            fresh=True,
            other="nixl",
        ),
        Kind("lmcache", "LMCache's server: DRAM, and an empty folder", small=True, fresh=True, other="lmcache"),
    )
}
DEFAULT = ("direct", "restart", "hicache-direct", "hicache")
"""In the order of their importance: a deadline costs the last ones."""

STORE_OVERHEAD = 1.05
"""Bytes of a store over those of its pages, at most."""
TIER_FILL = 0.98
"""Of a DRAM tier, what prompts may take: their last pages and what is computed behind them want some too."""


@dataclasses.dataclass(frozen=True)
class Pools:
    """Tokens in the device pool and in the DRAM tier."""

    device: int
    dram: int


@dataclasses.dataclass(frozen=True)
class Profile(ServedModel):
    """How the servers are started and what is asked of them."""

    device: str
    model: pathlib.Path
    page_size: int
    large: Pools
    small: Pools
    sizes: tuple[int, ...]
    """Prompt lengths. The longest is asked of large pools only."""
    new: int
    """Tokens behind a prefix that is cached."""
    prefixes: tuple[int, ...]
    shared: LvEval
    """With the most prompts that are ever asked; `shared_prompts` are those that fit."""
    fillers: int
    """So many of them push others out of the large device pool."""
    alone: int
    requests: int
    together: int
    """Requests over `shared`: one at a time; by clients, and all at once; clients."""
    set_length: int
    misses: tuple[tuple[int, int], ...]
    """(length, how many)"""
    decode: tuple[int, int, int]
    """Streams, tokens of each, and the length of the prompt whose pages are stored meanwhile."""
    filler: int
    """Length of prompts that push others out of the small device pool."""
    repetitions: int
    capacity: str
    disk_capacity: str
    """Of a store on a disk, which holds a few prompts of one length."""
    disk_bytes: int
    """What a plain program reads beside it."""
    flags: tuple[str, ...] = ()

    def pools(self, kind: Kind) -> Pools:
        """Those of a kind of server."""
        return self.small if kind.small else self.large

    def store_capacity(self, kind: Kind) -> str:
        """That of its store."""
        return self.disk_capacity if kind.disk else self.capacity

    def other_bytes(self, kind: Kind) -> int:
        """What another storage backend keeps, at most, of prompts that its server is asked."""
        lengths = self.lengths(kind)
        tokens = self.repetitions * sum(lengths) + sum(lengths[:2]) + 2 * self.filler
        return round(tokens * self.token_bytes * STORE_OVERHEAD)

    def lengths(self, kind: Kind) -> tuple[int, ...]:
        """Prompt lengths that fit into its device pool."""
        room = self.pools(kind).device - 2 * self.page_size
        return tuple(size for size in self.sizes if size <= room)

    def setting(self, kind: Kind, seed: int) -> Setting:
        """What workloads depend on."""
        return Setting(self.page_size, self.shape["vocab_size"], self.pools(kind).dram, seed)

    def shared_prompts(self, kind: Kind, seed: int) -> tuple[Request, ...]:
        """Prompts over the shared context, as many as fit into the large DRAM tier and, beside what a restart is to
        find, into the store: the same on every server.
        """
        kept = sum(self.lengths(KINDS["restart"])) + self.sizes[0]
        stored = round(parse_size(self.capacity) / self.token_bytes / STORE_OVERHEAD) - kept
        room = min(round(self.large.dram * TIER_FILL), stored)
        asked = self.shared.plan(self.setting(kind, seed), "seq").prepare
        used, fit = 0, 0
        for number, request in enumerate(asked):
            own = len(request.tokens) - (self.shared.shared if number else 0)
            used += -(-own // self.page_size) * self.page_size
            if used > room:
                break
            fit = number + 1
        return asked[:fit]

    @property
    def working_set(self) -> WorkingSet:
        """Four times the DRAM tier, asked once more."""
        return WorkingSet(length=self.set_length, rounds=1)


def gpu_profile(quick: bool) -> Profile:
    """Llama-3.1-8B's shape, 128 KiB of KV a token: DRAM tiers of 34 and 11 GB, a store of 44 GiB."""
    return Profile(
        device="cuda",
        model=HERE / "models" / "llama-3.1-8b-shape",
        page_size=64,
        large=Pools(98_304, 262_144),
        small=Pools(36_864, 81_920),
        sizes=(8192, 32_768, 65_536),
        new=8192,
        prefixes=(8192, 73_728) if quick else (8192, 24_576, 40_960, 73_728),
        shared=LvEval(prompts=12),
        fillers=3,
        alone=6 if quick else 24,
        requests=40 if quick else 100,
        together=4,
        set_length=16_384,
        misses=((8192, 8),) if quick else ((8192, 12), (32_768, 3)),
        decode=(4, 192, 32_768),
        filler=19_456,
        repetitions=3,
        capacity="44GiB",
        disk_capacity="24GiB",
        disk_bytes=(512 if quick else 2048) << 20,
        flags=tuple(GPU_FLAGS),
    )


def cpu_profile(quick: bool) -> Profile:
    """A tiny model, through demo/cpu_support: checks the program, its times mean nothing."""
    return Profile(
        device="cpu",
        model=HERE.parent / "demo" / "models" / "tiny-llama",
        page_size=64,
        large=Pools(3072, 9216),
        small=Pools(1536, 4608),
        sizes=(512, 1024, 2048),
        new=256,
        prefixes=(256, 2304),
        shared=LvEval(prompts=6, shortest=1300, longest=1500, shared=256),
        fillers=3,
        alone=3,
        requests=12,
        together=4,
        set_length=1024,
        misses=((256, 2),),
        decode=(2, 12, 1024),
        filler=1024,
        repetitions=1 if quick else 2,
        capacity="512MiB",
        disk_capacity="256MiB",
        disk_bytes=64 << 20,
    )


def profile(arguments: argparse.Namespace) -> Profile:
    """The profile of `--device`, with what the command line overrides."""
    chosen = (cpu_profile if arguments.device == "cpu" else gpu_profile)(arguments.quick)
    flags = chosen.flags
    if chosen.device == "cuda":
        flags = ("--attention-backend", arguments.attention_backend, *flags)
    return dataclasses.replace(
        chosen,
        model=arguments.model_path or chosen.model,
        capacity=arguments.capacity or chosen.capacity,
        flags=(*flags, *arguments.server_flag),
    )
