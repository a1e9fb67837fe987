# SPDX-License-Identifier: Apache-2.0
"""One server of serving.py and the four tiers on it: storage is attached and detached while it runs."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import time
from typing import Any

from serving_client import Client, OutOfTime
from serving_profile import Pools, Profile
from serving_results import Case
from serving_workloads import Plan, Request, Setting, Workload, full_hit, shared_tokens, token_ids
from sglang_server import BenchServer, ServerSpec
from ttft_campaign import HERE

STORAGE_TIERS = ("tardis", "file")
IO_BACKENDS = {"page_first_direct": "direct", "page_first": "kernel"}


def folder_bytes(folder: pathlib.Path) -> int:
    """Bytes that the files of a folder occupy."""
    total = 0
    for place, _folders, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(place, name)).st_blocks * 512
    return total


class Session:
    """A running server, the tier that it is set to, and what the clients may spend."""

    def __init__(
        self,
        profile: Profile,
        pools: Pools,
        layout: str,
        l3: pathlib.Path,
        log: pathlib.Path,
        port: int,
        launcher: str | None,
        left: Any,
        seed: int,
    ) -> None:
        self.profile, self.l3, self.left, self.seed = profile, l3, left, seed
        spec = ServerSpec(
            model=profile.model,
            port=port,
            storage=None,
            device=profile.device,
            page_size=profile.page_size,
            max_total_tokens=pools.device_tokens,
            hicache_ratio=pools.dram_tokens / pools.device_tokens,
            layout=layout,
            io_backend=IO_BACKENDS[layout],
            flags=profile.flags,
            environment={
                "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
                "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(l3 / "file"),
                # Small tensors: more threads only wait for each other, above all on a busy machine.
                **({"OMP_NUM_THREADS": "1"} if profile.device == "cpu" else {}),
            },
        )
        self.server = BenchServer(spec, log, launcher)
        self.client = Client(port, left)
        self.attached: str | None = None
        self.flags = [word.replace(f"{HERE.parent}{os.sep}", "") for word in spec.command()[3:]]

    # ---- tiers ----

    def note(self, tier: str) -> str:
        """What is not obvious about a tier on this server."""
        if tier == "recompute":
            return "recompute: a cache salt for each prompt, storage detached; new pages are still copied to DRAM"
        if tier == "file" and self.profile.device == "cpu":
            return "file: SGLang's file backend through `dynamic`, its memory not pinned (no GPU)"
        return ""

    def backend(self, tier: str) -> tuple[str, dict[str, Any]]:
        """SGLang's name of the storage backend and its extra config."""
        if tier == "tardis":
            return "tardis", {"path": str(self.l3 / "tardis"), "capacity": self.profile.capacity, **self.profile.attach}
        if self.profile.device == "cpu":
            dynamic = {
                "backend_name": "file-unpinned",
                "module_path": "serving_file_cpu",
                "class_name": "FileBackend",
            }
            return "dynamic", {**dynamic, **self.profile.attach}
        return "file", dict(self.profile.attach)

    def flush(self) -> None:
        """Empty device and DRAM pools, not the storage, once everything that was going to be stored is stored."""
        self.server.flush_cache(timeout=max(5.0, min(180.0, self.left())))

    def leave(self) -> None:
        """Detach the storage, empty all pools and delete what was stored."""
        self.flush()
        if self.attached is not None:
            self.server.detach()
        self.attached = None
        for name in STORAGE_TIERS:
            shutil.rmtree(self.l3 / name, ignore_errors=True)

    def enter(self, tier: str) -> None:
        """Nothing cached anywhere, and the tier's storage, if it has one, attached and empty."""
        self.leave()
        if tier in STORAGE_TIERS:
            (self.l3 / tier).mkdir(parents=True)
            name, extra = self.backend(tier)
            self.server.attach(name, extra)
            self.attached = tier

    def start(self, timeout: float) -> float:
        """Start the server. Returns the seconds it took."""
        return self.server.start(timeout)

    def stop(self) -> None:
        """Stop the server and delete what was stored."""
        self.server.stop()
        for name in STORAGE_TIERS:
            shutil.rmtree(self.l3 / name, ignore_errors=True)

    def warm_up(self, lengths: list[int], tiers: list[str]) -> None:
        """Kernels of every length, cold and hit; then SGLang's page hash, compiled at the first use of storage."""
        vocabulary = self.profile.shape["vocab_size"]

        def ask(length: int, times: int) -> None:
            request = Request("warm-up", token_ids(f"{self.seed}/warm-up/{length}", length, vocabulary), new_tokens=2)
            outcomes, _ = self.client.one_by_one([request] * times, lambda _request: None)
            for outcome in outcomes:
                if outcome.error:
                    raise RuntimeError(f"warm-up: {outcome.error}\n{self.server.log_tail()}")

        for length in lengths:
            ask(length, 2)
        for tier in tiers:
            if tier in STORAGE_TIERS:
                self.enter(tier)
                short = 16 * self.profile.page_size
                ask(short, 1)
                self.flush()
                ask(short, 1)
        self.leave()

    # ---- cases ----

    def counters(self) -> dict[str, float]:
        """Counters of SGLang and tardis whose growth belongs to a case."""
        metrics = self.server.metrics()
        found = {
            "stored_tokens": metrics.get("sglang:backuped_tokens_total", 0.0),
            "prefetched_tokens": metrics.get("sglang:prefetched_tokens_total", 0.0),
        }
        for name, value in metrics.items():
            if name.startswith("tardis_") and name.endswith("_total"):
                found[name] = value
        return found

    def settle(self, tier: str, stored: float = 0.0) -> None:
        """Wait, emptying no pool, until nothing more is stored: not before `stored` tokens are, at most a minute.

        SGLang counts a prompt's pages when all of them are stored, so a counter that rests says little by itself.
        """
        if tier not in STORAGE_TIERS:
            time.sleep(0.5)  # the copies to DRAM are done by then; a hit that is short would show it
            return
        self.wait_for_stored(stored)
        end = time.monotonic() + min(30.0, max(self.left(), 0.0))
        last, since = -1.0, time.monotonic()
        while (now := time.monotonic()) < end and now - since <= 1.0:
            count = self.counters()["stored_tokens"]
            if count != last:
                last, since = count, now
            time.sleep(0.2)

    def prepare(self, plan: Plan, tier: str, setting: Setting) -> dict[str, Any]:
        """Enter the tier and store what the plan wants stored. A recompute needs nothing stored.

        SGLang drops what it cannot copy to DRAM, which pages that wait for a slow storage may fill: no more than a
        quarter of it may wait when the next prompt is sent.
        """
        self.enter(tier)
        begin, before = time.monotonic(), self.counters()["stored_tokens"]
        asked = () if tier == "recompute" else plan.prepare
        page, new, all_stored = setting.page_size, 0, True
        for number, request in enumerate(asked):
            (outcome,), _ = self.client.one_by_one([request], lambda _request: None, top=False)
            if outcome.error:
                raise RuntimeError(f"preparing {tier}: {outcome.error}\n{self.server.log_tail()}")
            if tier in STORAGE_TIERS and all_stored:
                sent = asked[: number + 1]
                new = sum(len(one.tokens) // page * page for one in sent) - shared_tokens(sent, page)
                all_stored = self.wait_for_stored(before + new - setting.dram_tokens // 4)
        new = sum(len(one.tokens) // page * page for one in asked) - shared_tokens(asked, page)
        self.settle(tier, before + new if all_stored else 0)
        found = {"requests": len(asked), "seconds": round(time.monotonic() - begin, 3)}
        if tier in STORAGE_TIERS:
            found |= {"new_tokens": new, "stored_tokens": self.counters()["stored_tokens"] - before}
        return found

    def wait_for_stored(self, tokens: float) -> bool:
        """Wait until SGLang has stored as many tokens since it started, at most a minute. Returns whether it has."""
        end = time.monotonic() + min(60.0, max(self.left(), 0.0))
        while self.counters()["stored_tokens"] < tokens:
            if time.monotonic() > end:
                return False
            time.sleep(0.1)
        return True

    def run(self, workload: Workload, plan: Plan, load: str, tier: str, setting: Setting) -> Case:
        """Measure one load on the tier that was prepared. Raises OutOfTime when the deadline comes first."""
        storage = tier in STORAGE_TIERS
        if plan.reset and storage:
            self.flush()
        name = f"{self.seed}/{workload.letter}/{load}"

        def salt(request: Request) -> str | None:
            return f"{name}/{request.name}" if tier == "recompute" else None

        before, began = self.counters(), time.monotonic()
        if load == "seq":
            flush = None
            if plan.flush_each and storage:
                flush = self.flush
            outcomes, busy = self.client.one_by_one(
                plan.measure, salt, flush, reference=plan.reference and tier != "recompute"
            )
        elif load == "waves":
            outcomes, busy = self.client.waves(plan.measure, salt)
        else:
            outcomes, busy = self.client.offered(plan.measure, load, setting.seed, salt)
        if self.left() <= 0:
            raise OutOfTime(f"{workload.letter}, {load}, {tier}")
        wall = time.monotonic() - began
        self.settle(tier)
        after = self.counters()
        requests = []
        for request, outcome in zip(plan.measure, outcomes, strict=True):
            row = outcome.to_json()
            if tier == "recompute":
                row["expect"] = 0
            elif request.expect is not None:
                row["expect"] = request.expect
            requests.append(row)
        return {
            "wall_s": round(wall, 3),
            "busy_s": round(busy, 4),
            "requests": requests,
            # A counter starts anew with each attachment, never within a case.
            "counters": {key: round(value - before.get(key, 0.0), 3) for key, value in after.items()},
            "folder_bytes": folder_bytes(self.l3 / tier) if storage else 0,
            "hittable_tokens": shared_tokens((*plan.prepare, *plan.measure), setting.page_size)
            - shared_tokens(plan.prepare, setting.page_size),
        }


def lengths_of(workloads: list[tuple[Workload, Setting]]) -> list[int]:
    """Prompt lengths to warm up: short, and each workload's longest."""
    found = {16 * workloads[0][1].page_size}
    for workload, setting in workloads:
        found.add(workload.longest_prompt(setting))
    return sorted(found)


def too_long(workloads: list[tuple[Workload, Setting]], profile: Profile) -> str | None:
    """Why a workload cannot run with its device pool; None if all can."""
    for workload, setting in workloads:
        longest = workload.longest_prompt(setting)
        device_tokens = profile.pools[workload.letter].device_tokens
        if full_hit(longest, setting.page_size) + 2 * setting.page_size > device_tokens:
            return (
                f"workload {workload.letter} has a prompt of {longest} tokens, the device pool holds {device_tokens}: "
                "raise --device-tokens or shorten the prompts with --set"
            )
    return None
