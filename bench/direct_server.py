# SPDX-License-Identifier: Apache-2.0
"""One server of direct.py: prompts by name, where their KV must come from, what pushes them out of the device pool."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

from direct_campaign import Campaign
from direct_profile import Kind
from lmcache_server import LmcacheServer
from serving_client import TIERS, Client, Outcome
from serving_workloads import Request, full_hit, token_ids
from sglang_server import BenchServer, ServerSpec
from sglang_tardis.store import Store
from ttft_campaign import HERE

STATES = ("recompute", "device", "dram", "files", "any")


class WrongState(RuntimeError):
    """Nothing that follows would mean anything."""


class DirectServer:
    """A running server and what is in its device pool, as far as it follows from what was asked."""

    def __init__(self, campaign: Campaign, kind: Kind) -> None:
        self.campaign, self.kind, self.profile = campaign, kind, campaign.profile
        self.pools = self.profile.pools(kind)
        self.vocabulary = self.profile.shape["vocab_size"]
        self.sent = 0  # tokens that took new room in the device pool
        self.seen: dict[str, int] = {}
        self.turn = 0
        self.fillers: list[Request] = []
        arguments = campaign.arguments
        self.lmcache: LmcacheServer | None = None
        flags = self.profile.flags
        if kind.other == "lmcache":
            self.lmcache = LmcacheServer(
                campaign.store(kind),
                self.pools.dram * self.profile.token_bytes,
                self.profile.page_size,
                arguments.port + 1,
                campaign.out,
                arguments.lmcache_flag,
            )
            flags = (*flags, "--enable-lmcache", "--lmcache-config-file", str(self.lmcache.config))
        spec = ServerSpec(
            model=self.profile.model,
            port=arguments.port,
            hierarchical=kind.other != "lmcache",
            storage=kind.storage,
            extra_config=kind.extra_config(
                campaign.store(kind),
                self.profile.store_capacity(kind),
                arguments.nixl_config if kind.other else arguments.tardis_config,
            ),
            device=self.profile.device,
            page_size=self.profile.page_size,
            max_total_tokens=self.pools.device,
            hicache_ratio=self.pools.dram / self.pools.device,
            layout=kind.layout,
            io_backend=kind.io,
            flags=flags,
            environment={
                "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
                "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR": str(campaign.store(kind)),
                **({"OMP_NUM_THREADS": "1"} if self.profile.device == "cpu" else {}),
            },
        )
        self.server = BenchServer(spec, campaign.out / f"server-{kind.name}.log", arguments.launcher)
        self.client = Client(arguments.port, campaign.left)
        self.flags = [word.replace(f"{HERE.parent}{os.sep}", "") for word in spec.command()[3:]]

    def start(self, timeout: float) -> float:
        """Start it, and what it stands on. Returns the seconds."""
        begin = time.monotonic()
        if self.lmcache is not None:
            self.lmcache.start(self.server.spec.full_environment(), timeout)
        self.server.start(timeout)
        return time.monotonic() - begin

    def stop(self) -> None:
        """Stop it, and what it stands on."""
        self.server.stop()
        if self.lmcache is not None:
            self.lmcache.stop()

    # ---- requests ----

    def request(self, name: str, tokens: int, new_tokens: int = 1) -> Request:
        """The prompt of this name: the same tokens in every server. A longer one of a name begins as a shorter one."""
        label = f"{self.campaign.arguments.seed}/direct/{name}"
        return Request(name, token_ids(label, tokens, self.vocabulary), new_tokens)

    def behind(self, prefix: Sequence[int], name: str, tokens: int) -> Request:
        """A prompt that begins with `prefix`, then `tokens` that nobody has seen."""
        return Request(name, tuple(prefix) + self.request(name, tokens).tokens)

    def ask(self, request: Request, state: str, cached: int | None = None, what: str = "") -> Outcome:
        """Send a prompt. `state` says where its cached tokens must come from, `cached` how many they are (all that a
        hit on the whole prompt has, unless told). Raises WrongState, noted as a failure, if that is not so.
        """
        length, what = len(request.tokens), what or state
        (outcome,), _ = self.client.one_by_one([request], lambda _request: None)
        if outcome.error:
            raise RuntimeError(f"{what} {request.name}: {outcome.error}\n{self.server.log_tail()}")
        self.sent += length - outcome.cached["device"]
        self.seen[request.name] = self.sent
        wanted = self.wanted(state, full_hit(length, self.profile.page_size) if cached is None else cached)
        good = state == "any" or outcome.cached == wanted
        self.campaign.record(self.kind.name, what, outcome, good)
        found = {tier: tokens for tier, tokens in outcome.cached.items() if tokens} or ""
        self.campaign.log(
            f"{self.kind.name:14s} {what:22s} {request.name:18s} {length:6d} tokens  "
            f"TTFT {outcome.ttft * 1e3:8.1f} ms  {found}{'' if good else f'  EXPECTED {wanted}'}"
        )
        if not good:
            raise WrongState(f"{self.kind.name}, {what}, {request.name}: expected {wanted}, found {outcome.cached}")
        return outcome

    def wanted(self, state: str, cached: int) -> dict[str, int]:
        """Cached tokens by tier that a state means."""
        tier = {"device": "device", "dram": self.kind.dram_tier, "files": self.kind.files_tier}.get(state)
        return {name: cached if name == tier else 0 for name in TIERS}

    # ---- what is where ----

    def prepare_fillers(self, requests: Sequence[Request]) -> None:
        """Prompts that stay in the DRAM tier and push others out of the device pool; together they overflow it."""
        assert sum(len(request.tokens) for request in requests) > self.pools.device
        for request in requests:
            self.ask(request, "any", what="filler, first")
        self.fillers = list(requests)

    def push_out(self, name: str) -> None:
        """Ask fillers until the device pool has been filled once since that prompt was last seen."""
        often = 0
        while self.sent - self.seen[name] < self.pools.device + 16 * self.profile.page_size:
            self.ask(self.fillers[self.turn % len(self.fillers)], "any", what="filler")
            self.turn += 1
            often += 1
            if often > 4 * len(self.fillers):
                raise WrongState(f"{self.kind.name}: {often} fillers did not push {name} out of the device pool")

    def flush(self) -> None:
        """Empty the device pool and the DRAM tier, once everything that was going to be stored is stored."""
        self.settle(quiet=0.3)
        self.server.flush_cache(timeout=max(5.0, min(120.0, self.campaign.left())))
        if self.lmcache is not None:
            self.lmcache.forget_memory()
        self.sent += self.pools.device + 16 * self.profile.page_size

    def clear_store(self) -> None:
        """Delete all pages of the store, beside the server."""
        store = Store(self.campaign.store(self.kind), create=False)
        self.campaign.log(f"{self.kind.name}: {store.clear()} pages cleared")
        store.close()

    def counters(self) -> dict[str, float]:
        """Counters of tardis and of SGLang's storage that tell what moved."""
        return {
            name: value
            for name, value in self.server.metrics().items()
            if name.endswith("_total") and (name.startswith("tardis_") or "backuped" in name or "prefetched" in name)
        }

    def published(self) -> dict[str, float]:
        """Counters, when they have seen all that has happened: tardis publishes its own once a second."""
        if self.kind.door is not None:
            time.sleep(1.3)
        return self.counters()

    def grown(self, before: dict[str, float]) -> dict[str, float]:
        """Counters that grew since."""
        return {
            name: round(value - before.get(name, 0.0), 6)
            for name, value in self.published().items()
            if value != before.get(name, 0.0)
        }

    def check_source(self, state: str, counted: dict[str, float]) -> None:
        """That the direct door's pages came from memory, or from files, since then."""
        if self.kind.door != "direct":
            return
        grown = self.grown(counted)
        names = {"dram": "tardis_direct_memory_pages_total", "files": "tardis_direct_file_pages_total"}
        right = grown.get(names.pop(state), 0.0)
        wrong = sum(grown.get(name, 0.0) for name in names.values())
        if wrong > 0.1 * right:
            self.campaign.fail(
                f"{self.kind.name}, {state}: {right:.0f} pages came from there, {wrong:.0f} from elsewhere"
            )

    def settle(self, quiet: float = 0.7, most: float = 60.0) -> float:
        """Wait until nothing more is stored. Returns the seconds; the copies to a DRAM tier alone get a second."""
        begin = time.monotonic()
        if self.kind.backend is None:
            time.sleep(1.0)
            return 1.0
        if self.kind.other:  # which store a batch of pages at a time
            quiet = max(quiet, 2.0)
        last, since = None, begin
        while (now := time.monotonic()) - begin < min(most, max(self.campaign.left(), 0.0)):
            written = sum(value for name, value in self.counters().items() if "read" not in name and "load" not in name)
            if self.lmcache is not None:
                written += self.lmcache.stored_bytes()
            if written != last:
                last, since = written, now
            elif now - since > quiet:
                break
            time.sleep(0.1)
        return time.monotonic() - begin

    # ---- rows ----

    def row(self, case: str, size: Any, times: Sequence[float], limit: float | None = None, **extra: Any) -> float:
        """Add the median of `times` (seconds) in ms; returns it."""
        ms = [value * 1e3 for value in times]
        value = statistics.median(ms)
        self.campaign.report.add(
            case,
            self.kind.name,
            size,
            value,
            "ms",
            limit,
            min=round(min(ms), 3),
            max=round(max(ms), 3),
            n=len(ms),
            **extra,
        )
        return value
