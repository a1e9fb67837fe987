# SPDX-License-Identifier: Apache-2.0
"""Servers and sizes of attention_serving.py: for a GPU, and for a check on a CPU."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import random
from typing import Any

from common import ServedModel
from serving_workloads import Request, token_ids
from ttft_campaign import GPU_FLAGS, HERE

REFERENCE = "resident"
"""Whose answers the others' are compared with. It comes last, since it is asked what they decoded."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """A server: where KV of running requests lies."""

    name: str
    title: str
    in_host: bool = False
    flags: tuple[str, ...] = ()


KINDS = {
    kind.name: kind
    for kind in (
        Kind("host", "--attention-backend tardis: KV in host memory", in_host=True),
        Kind("hicache", "KV in HBM, SGLang's host tier with its defaults", flags=("--enable-hierarchical-cache",)),
        Kind(REFERENCE, "KV in HBM"),
    )
}
"""In the order in which they run."""
DEFAULT = ("host", REFERENCE)


@dataclasses.dataclass(frozen=True)
class Profile(ServedModel):
    """How the servers are started and what is asked of them."""

    device: str
    model: pathlib.Path
    page_size: int
    chunk: int
    """Tokens of a chunk of a prefill."""
    resident_tokens: int
    """Of the pool in HBM."""
    host_tokens: int | None
    """Of the pool in host memory; None: `attention_host` decides."""
    host_config: dict[str, Any]
    """Settings of tardis."""
    prompts: int
    """Of the comparison."""
    longest: int
    """Tokens of those that are not at a chunk's edge."""
    clients: int
    """Requests in flight while answers are compared."""
    decoded: int
    """Tokens of each answer that are compared."""
    beyond: int
    """Length of a prompt that does not fit the pool in HBM."""
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    batch_context: int
    rates: tuple[float, ...]
    rate_prompt: int
    rate_requests: int
    new: int
    """Tokens decoded where times are taken."""
    repetitions: int
    prefill_rate: float
    """Tokens a second, at least: by how long a case may take."""
    read_rate: float
    """Bytes of KV a second that decoding reads, at least."""
    overhead: float
    """Seconds of a case beside that."""
    flags: tuple[str, ...]
    reference_backend: str

    def seconds(self, prefilled: int, step_tokens: int = 0, steps: int | None = None) -> float:
        """How long tokens may take to be computed, and steps (None: `new`) that read the KV of `step_tokens` each."""
        often = self.new if steps is None else steps
        return prefilled / self.prefill_rate + often * step_tokens * self.token_bytes / self.read_rate + self.overhead

    @property
    def weight_bytes(self) -> int:
        """Of a Llama in bf16."""
        shape = self.shape
        hidden, head = shape["hidden_size"], shape["head_dim"]
        heads, groups = shape["num_attention_heads"], shape["num_key_value_heads"]
        attention = hidden * head * (2 * heads + 2 * groups)
        layer = attention + 3 * hidden * shape["intermediate_size"] + 2 * hidden
        tables = (1 if shape["tie_word_embeddings"] else 2) * shape["vocab_size"] * hidden
        return 2 * (shape["num_hidden_layers"] * layer + tables + hidden)

    def max_total_tokens(self, kind: Kind) -> int | None:
        """What a server is told of its pool's size."""
        return self.host_tokens if kind.in_host else self.resident_tokens

    def fits(self, count: int, tokens: int, pool: int) -> bool:
        """Whether so many requests of so many tokens fit a pool, with the page that each begins."""
        return count * -(-tokens // self.page_size) * self.page_size + 2 * self.page_size <= pool

    def request(self, seed: int, name: str, tokens: int, new_tokens: int | None = None) -> Request:
        """The prompt of this name, the same for every server; a longer one of a name begins as a shorter one."""
        label = f"{seed}/attention/{name}"
        return Request(name, token_ids(label, tokens, self.shape["vocab_size"]), new_tokens or self.new)

    def compared(self, seed: int) -> list[Request]:
        """Prompts whose answers are compared: lengths at edges of pages and chunks, and any others from 1 token on; a
        third of them begin as another of them does, up to a page's edge or not.
        """
        page, draw = self.page_size, random.Random(f"{seed}/attention/lengths")
        edges = [1, 2, page - 1, page, page + 1, self.chunk, self.chunk + 1, self.longest]
        others = [round(self.longest ** draw.random()) for _ in range(self.prompts - len(edges))]
        asked = [self.request(seed, f"c{i}", length, self.decoded) for i, length in enumerate(edges + others)]
        sharing = range(len(edges), self.prompts)[: -(-self.prompts // 3)]
        origins = [
            request
            for i, request in enumerate(asked)
            if i not in sharing and page < len(request.tokens) <= self.longest
        ]
        for i in sharing:
            origin = draw.choice(origins).tokens
            whole = draw.randrange(1, len(origin) // page + 1) * page
            shared = origin[: whole if draw.random() < 0.5 else draw.randrange(page, len(origin))]
            own = asked[i].tokens[: max(1, self.longest - len(shared))]
            asked[i] = dataclasses.replace(asked[i], tokens=shared + own)
        draw.shuffle(asked)
        return asked


def gpu_profile(quick: bool) -> Profile:
    """Llama-3.1-8B's shape, 128 KiB of KV a token: 24 GiB of it in host memory, 8 GiB in HBM."""
    return Profile(
        device="cuda",
        model=HERE / "models" / "llama-3.1-8b-shape",
        page_size=64,
        chunk=8192,
        resident_tokens=65_536,
        host_tokens=None,
        host_config={"attention_host": "24GiB"},
        prompts=100,
        longest=4096,
        clients=8,
        decoded=16,
        beyond=98_304,
        contexts=(1024, 8192, 32_768) if quick else (1024, 4096, 8192, 16_384, 32_768, 65_536, 131_072 - 64),
        batches=(1, 4, 16),
        batch_context=8192,
        rates=(2.0,) if quick else (1.0, 2.0, 4.0),
        rate_prompt=2048,
        rate_requests=16 if quick else 24,
        new=32,
        repetitions=1 if quick else 3,
        prefill_rate=10_000,
        read_rate=30e9,
        overhead=1.0,
        # All batches in graphs: with both servers, or the larger ones would measure launches.
        flags=(*GPU_FLAGS, "--cuda-graph-max-bs-decode", "16"),
        reference_backend="fa3",
    )


def cpu_profile(quick: bool) -> Profile:
    """A tiny model, through demo/cpu_support: checks the program, its times mean nothing."""
    return Profile(
        device="cpu",
        model=HERE.parent / "demo" / "models" / "tiny-llama",
        page_size=64,
        chunk=512,
        resident_tokens=3072,
        host_tokens=7168,
        host_config={},
        prompts=12 if quick else 40,
        longest=1024,
        clients=4,
        decoded=16,
        beyond=4608,
        contexts=(256, 1024) if quick else (256, 1024, 2048),
        batches=(1, 4, 16),
        batch_context=320,
        rates=(2.0,) if quick else (1.0, 2.0),
        rate_prompt=256,
        rate_requests=6,
        new=16,
        repetitions=1,
        prefill_rate=500,
        read_rate=50e6,
        overhead=3.0,
        flags=(),
        reference_backend="torch_native",
    )


def profile(arguments: argparse.Namespace) -> Profile:
    """The profile of `--device`, with what the command line overrides."""
    chosen = (cpu_profile if arguments.device == "cpu" else gpu_profile)(arguments.quick)
    return dataclasses.replace(
        chosen,
        model=arguments.model_path or chosen.model,
        host_config={**chosen.host_config, **arguments.tardis_config},
    )
