# SPDX-License-Identifier: Apache-2.0
"""Sizes that go together in serving.py: model, pools, workloads and loads for a GPU, and for a check on a CPU."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from typing import Any

from common import ServedModel
from serving_workloads import WORKLOADS, HitRate, LvEval, Misses, MultiTurn, Setting, Trace, WorkingSet, Workload
from ttft_campaign import GPU_FLAGS, HERE


@dataclasses.dataclass(frozen=True)
class Pools:
    """Tokens that a server's KV pools hold: the device's, and the DRAM tier's (HiCache host pool)."""

    device_tokens: int
    dram_tokens: int


@dataclasses.dataclass(frozen=True)
class Profile(ServedModel):
    """How the servers are started and what is asked of them."""

    device: str
    model: pathlib.Path
    attention: str
    page_size: int
    pools: dict[str, Pools]
    """By workload; one server for each size."""
    workloads: dict[str, Workload]
    loads: dict[str, tuple[str, ...]]
    capacity: str
    """Of a tardis store."""
    flags: tuple[str, ...] = ()
    attach: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Extra config of every storage backend: SGLang's own keys."""

    def setting(self, letter: str, seed: int) -> Setting:
        """What the workload's plan depends on."""
        return Setting(self.page_size, self.shape["vocab_size"], self.pools[letter].dram_tokens, seed)

    def setup(self, letter: str) -> dict[str, Any]:
        """The server of a workload, as it is recorded."""
        return {
            "device": self.device,
            "model": self.model.name,
            "attention": self.attention,
            "page_size": self.page_size,
            **dataclasses.asdict(self.pools[letter]),
        }


def gpu_profile(quick: bool) -> Profile:
    """Llama-3.1-8B's shape, 128 KiB of KV a token.

    Two servers: one whose DRAM tier holds workloads a, d and f (8.6 GB on the device, 48 GB of DRAM), and one that b, c
    and e overflow (5.9 and 8 GB).
    """
    token = 131_072
    roomy, small = Pools(65_536, int(48e9) // token), Pools(45_056, int(8e9) // token)
    workloads: dict[str, Workload] = {kind.letter: kind() for kind in WORKLOADS}
    loads = {
        "a": ("seq", "0.25", "0.5", "1", "2", "inf"),
        "b": ("waves",),
        "c": ("trace", "1", "2", "6", "inf"),
        "d": ("seq",),
        "e": ("seq", "0.5", "1", "2", "4", "8", "inf"),
        "f": ("seq", "1", "2", "4"),
    }
    if quick:
        loads = {"a": ("seq", "1"), "b": ("waves",), "c": ("6",), "d": ("seq",), "e": ("seq", "2", "8"), "f": ("seq",)}
        workloads |= {
            "b": MultiTurn(rounds=5),
            "c": Trace(requests=60),
            "f": Misses(prompts=8),
        }
    return Profile(
        device="cuda",
        model=HERE / "models" / "llama-3.1-8b-shape",
        attention="fa3",
        page_size=64,
        pools={letter: roomy if letter in "adf" else small for letter in "abcdef"},
        workloads=workloads,
        loads=loads,
        capacity="56GiB",
        flags=tuple(GPU_FLAGS),
    )


def cpu_profile(quick: bool) -> Profile:
    """A tiny model, through demo/cpu_support: checks the program, its times mean nothing. One server."""
    workloads: dict[str, Workload] = {
        "a": LvEval(prompts=8, shortest=700, longest=900, shared=200),
        "b": MultiTurn(rounds=6 if quick else 10, added=240),
        "c": Trace(requests=40 if quick else 300, divisor=64),
        "d": HitRate(documents=3, length=1600),
        "e": WorkingSet(length=1280, rounds=1 if quick else 2),
        "f": Misses(stored=2, prompts=8 if quick else 16, length=1024),
    }
    loads = {"a": ("seq", "4"), "b": ("waves",), "c": ("trace",), "d": ("seq",), "e": ("seq", "8"), "f": ("seq",)}
    if quick:
        loads |= {"c": ("8",), "e": ("8",)}
    return Profile(
        device="cpu",
        model=HERE.parent / "demo" / "models" / "tiny-llama",
        attention="torch_native",
        page_size=16,
        pools=dict.fromkeys("abcdef", Pools(2560, 7168)),
        workloads=workloads,
        loads=loads,
        capacity="512MiB",
        attach={"prefetch_threshold": 64},
    )


def resize(workloads: dict[str, Workload], changes: list[str]) -> dict[str, Workload]:
    """`LETTER.FIELD=VALUE` for each change; VALUE is JSON. Errors say which fields there are."""
    changed = dict(workloads)
    for text in changes:
        name, separator, value = text.partition("=")
        letter, _, field = name.partition(".")
        fields = (
            {entry.name: entry for entry in dataclasses.fields(changed[letter])} if letter in changed else {}  # type: ignore[arg-type]
        )
        if not separator or field not in fields:
            raise ValueError(
                f"--set {text!r}: expected LETTER.FIELD=VALUE with a workload in {''.join(changed)}"
                + (f" and a field of {letter}: {', '.join(fields)}" if fields else "")
            )
        try:
            content = json.loads(value)
        except ValueError:
            content = value
        now = getattr(changed[letter], field)
        if isinstance(now, tuple):
            content = tuple(content) if isinstance(content, list) else content
        if not isinstance(content, (int, float) if isinstance(now, float) else type(now)):
            raise ValueError(f"--set {text!r}: expected a value like {now!r}")
        changed[letter] = dataclasses.replace(changed[letter], **{field: content})
    return changed


def reload(loads: dict[str, tuple[str, ...]], workloads: dict[str, Workload], changes: list[str]) -> dict:
    """`LETTER:LOAD,LOAD...` for each change; each load must fit its workload."""
    changed = dict(loads)
    for text in changes:
        letter, _, names = text.partition(":")
        if letter not in changed or not names:
            raise ValueError(f"--loads {text!r}: expected LETTER:LOAD,LOAD with a workload in {''.join(changed)}")
        for load in names.split(","):
            allowed = workloads[letter].loads
            try:
                good = load != "rate" and (load in allowed or ("rate" in allowed and float(load) > 0))
            except ValueError:
                good = False
            if not good:
                raise ValueError(
                    f"--loads {text!r}: {load!r} does not fit workload {letter}, which takes {', '.join(allowed)} "
                    "(rate: a number of requests a second, or inf)"
                )
        changed[letter] = tuple(names.split(","))
    return changed


def profile(arguments: argparse.Namespace) -> Profile:
    """The profile of the command line. Raises ValueError with what does not fit."""
    chosen = (cpu_profile if arguments.device == "cpu" else gpu_profile)(arguments.quick)
    workloads = dict(chosen.workloads)
    if arguments.trace:
        workloads["c"] = dataclasses.replace(workloads["c"], file=str(arguments.trace))
    workloads = resize(workloads, arguments.set)
    if arguments.model_path:
        chosen = dataclasses.replace(chosen, model=arguments.model_path)
    pools = chosen.pools
    if arguments.device_tokens:
        pools = {x: dataclasses.replace(now, device_tokens=arguments.device_tokens) for x, now in pools.items()}
    if arguments.dram_gb:
        tokens = int(arguments.dram_gb * 1e9) // chosen.token_bytes
        pools = {x: dataclasses.replace(now, dram_tokens=tokens) for x, now in pools.items()}
    attention = arguments.attention_backend or chosen.attention
    if "triton" in attention:
        raise ValueError(
            f"--attention-backend {attention}: the recompute baseline must be the fastest that runs; expected a "
            "FlashAttention-class backend such as fa3"
        )
    flags = chosen.flags if arguments.device == "cpu" else ("--attention-backend", attention, *chosen.flags)
    return dataclasses.replace(
        chosen,
        attention=attention,
        pools=pools,
        workloads=workloads,
        loads=reload(chosen.loads, workloads, arguments.loads),
        capacity=arguments.capacity or chosen.capacity,
        flags=(*flags, *arguments.server_flag),
    )
