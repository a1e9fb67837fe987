# SPDX-License-Identifier: Apache-2.0
"""What bench/torch_ops.py works on: pools with a copy of them, a session, and one graph that restores all layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from sglang_tardis.gpu import GioSession, KvPools

OPS = torch.ops.tardis
POISON = 0x5A5A5A5A5A5A5A5A


class Shape:
    """Pools of one layout: all bytes of them are one tensor, so that one comparison sees every byte."""

    def __init__(
        self,
        name: str,
        layers: int,
        key: tuple[int, int],
        value: tuple[int, int] | None,
        dtype: torch.dtype,
        tokens: int,
    ) -> None:
        self.name, self.layers, self.key, self.value, self.dtype, self.tokens = name, layers, key, value, dtype, tokens

    def pools(self, pages: int, device: str) -> tuple[KvPools, list[torch.Tensor]]:
        """The pools, and per side all of its bytes: int64 `[layers, pages, page words]`."""
        raw, views = [], []
        for side in (self.key, self.value):
            if side is None:
                continue
            words = self.tokens * side[0] * side[1] * self.dtype.itemsize // 8
            memory = torch.empty((self.layers, pages, words), dtype=torch.int64, device=device)
            raw.append(memory)
            views.append([memory[i].view(self.dtype).view(pages * self.tokens, *side) for i in range(self.layers)])
        return KvPools(views[0], views[1] if len(views) > 1 else None, page_tokens=self.tokens), raw


LLAMA = Shape("Llama-3.1-8B, page 64", 32, (8, 128), (8, 128), torch.bfloat16, 64)
SHAPES = (
    Shape("GQA, page 16", 8, (8, 128), (8, 128), torch.bfloat16, 16),
    Shape("K and V of different heads, fp8", 6, (8, 128), (4, 64), torch.float8_e4m3fn, 32),
    Shape("MLA, page 64", 8, (1, 576), None, torch.bfloat16, 64),
)


class Rig:
    """Pools, a copy of them, poison, and a session; ids that ops read from the device."""

    def __init__(self, shape: Shape, pages: int, slots: int, device: str, capacity: int, **options: Any) -> None:
        self.shape, self.device, self.pages = shape, device, pages
        self.pools, self.raw = shape.pools(pages, device)
        self.layout = self.pools.layout()
        self.session = GioSession(self.layout, bytes=slots * self.layout.object_bytes, device=device, **options)
        self.slots = slots
        self.page_ids = torch.zeros(capacity, dtype=torch.int32, device=device)
        self.slot_ids = torch.zeros(capacity, dtype=torch.int32, device=device)
        self.count = torch.zeros(1, dtype=torch.int32, device=device)
        self.at: dict[int, int] = {}  # slot: page of self.stored

    def fill(self) -> None:
        """Fresh random bytes in the pools, kept as self.stored."""
        for memory in self.raw:
            memory.view(torch.uint8).random_(0, 256)
        self.stored = [memory.clone() for memory in self.raw]

    def poison(self) -> None:
        for memory in self.raw:
            memory.fill_(POISON)

    def choose(self, pages: list[int], slots: list[int]) -> None:
        """What the next transfer moves; whatever is behind the count is nonsense."""
        for ids, chosen in ((self.page_ids, pages), (self.slot_ids, slots)):
            ids.fill_(-77)
            ids[: len(chosen)] = torch.tensor(chosen, dtype=torch.int32, device=self.device)
        self.count.fill_(len(pages))

    def enqueue(self, op: Callable[..., None], **more: Any) -> None:
        """All layers on the current stream."""
        for layer in range(self.shape.layers):
            op(
                self.session.handle,
                layer,
                self.pools.layer(layer),
                self.page_ids,
                self.slot_ids,
                self.count,
                self.session.flags,
                **more,
            )

    def run(self, op: Callable[..., None], **more: Any) -> list[int]:
        """All layers; returns the flags."""
        self.session.flags.zero_()
        self.enqueue(op, **more)
        return self.session.flags.tolist()

    def store(self) -> list[int]:
        """Every page of the pools into a slot of its own, in random order."""
        capacity = self.page_ids.numel()
        order = np.random.default_rng().permutation(self.slots)[: self.pages].tolist()
        self.at = {slot: page for page, slot in enumerate(order)}
        flags: list[int] = []
        for first in range(0, self.pages, capacity):
            chosen = list(range(first, min(first + capacity, self.pages)))
            self.choose(chosen, [order[page] for page in chosen])
            flags += self.run(OPS.batch_put)
        return flags

    def wanted(self, pages: list[int], slots: list[int]) -> Iterator[torch.Tensor]:
        """Per side what the pools must hold after a get into poison."""
        to = torch.tensor(pages, dtype=torch.int64, device=self.device)
        of = torch.tensor([self.at[slot] for slot in slots], dtype=torch.int64, device=self.device)
        for stored in self.stored:
            wanted = torch.full_like(stored, POISON)
            wanted[:, to] = stored[:, of]
            yield wanted

    def right(self, pages: list[int], slots: list[int]) -> bool:
        """Whether every byte of the pools is what it must be."""
        return all(torch.equal(mine, wanted) for mine, wanted in zip(self.raw, self.wanted(pages, slots), strict=True))

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()
        self.session.close()


def quick_options(device: str) -> dict[str, Any]:
    """Of sessions that are checked, not measured."""
    return {"threads": 4, "queues": 4, "entries": 32} if device != "cpu" else {"threads": 1, "queues": 2, "entries": 16}


def random_choice(rig: Rig, most: int, random: np.random.Generator) -> tuple[list[int], list[int]]:
    """Pages, all different, and slots that hold something."""
    count = int(random.integers(0, most + 1))
    pages = random.permutation(rig.pages)[:count].tolist()
    return pages, random.choice(np.array(list(rig.at)), count).tolist()


class RestoreGraph:
    """All layers on one stream; a second one waits for each and reads it."""

    def __init__(self, rig: Rig, before: Callable[[], None] | None = None, waits: bool = True, **more: Any) -> None:
        self.rig, self.waits = rig, waits
        self.sums = torch.zeros((rig.shape.layers, len(rig.raw)), dtype=torch.int64, device=rig.device)
        io, compute = torch.cuda.Stream(), torch.cuda.Stream()
        # Nothing may be loaded or allocated for the first time behind a wait.
        rig.session.flags.zero_()
        if before:
            before()
        rig.enqueue(OPS.batch_get, **more)
        self.consume()
        torch.cuda.synchronize()
        calls = rig.session.host_calls
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=io):
            rig.session.flags.zero_()
            if before:
                before()
            compute.wait_stream(io)
            rig.enqueue(OPS.batch_get, **more)
            with torch.cuda.stream(compute):
                self.consume()
            io.wait_stream(compute)
        self.host_calls = rig.session.host_calls - calls

    def consume(self) -> None:
        rig = self.rig
        for layer in range(rig.shape.layers):
            if self.waits:
                OPS.wait_layer(rig.session.handle, layer, rig.pools.layer(layer), rig.session.flags)
            for side, memory in enumerate(rig.raw):
                torch.sum(memory[layer].view(-1), dim=0, out=self.sums[layer, side])

    def replay_is_right(self, pages: list[int], slots: list[int]) -> bool:
        rig = self.rig
        rig.poison()
        self.sums.zero_()
        rig.choose(pages, slots)
        self.graph.replay()
        wanted = list(rig.wanted(pages, slots))
        good = all(torch.equal(mine, other) for mine, other in zip(rig.raw, wanted, strict=True))
        sums = torch.stack([other.sum(dim=(1, 2)) for other in wanted], dim=1)
        return good and torch.equal(sums, self.sums) and set(rig.session.flags.tolist()) == {1}
