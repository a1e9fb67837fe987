# SPDX-License-Identifier: Apache-2.0
"""One server of serving_ttft.py and what is measured on it."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import time
from collections.abc import Callable
from typing import Any

import corrupt
from sglang_server import Answer, BenchServer, ServerError, ServerSpec, cached_by_a_hit, prompt
from ttft_campaign import HERE, Campaign

LAYOUTS = {
    "direct": ("page_first_direct", "direct"),
    "restart": ("page_first_direct", "direct"),
    "kernel": ("page_first", "kernel"),
}
STEPS = tuple(LAYOUTS)
# state -> the tier that must hold all cached tokens
TIER_OF = {"recompute": None, "device": "device", "host": "host", "storage": "storage"}


class Step:
    """One server and what is measured on it."""

    def __init__(self, campaign: Campaign, name: str, storage: dict[str, Any] | None = None) -> None:
        self.campaign, self.name = campaign, name
        self.arguments, self.profile = campaign.arguments, campaign.profile
        self.layout, io = LAYOUTS[name]
        self.sent = 0  # tokens that took new room in the device pool
        self.last_seen: dict[tuple[int, int], int] = {}
        self.fresh_seed = 10_000 * (1 + STEPS.index(name))
        self.medians: dict[tuple[str, int], float] = {}
        paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        spec = ServerSpec(
            model=self.profile.model,
            port=self.arguments.port,
            storage="tardis" if storage else None,
            extra_config=storage or {},
            device=self.arguments.device,
            page_size=self.profile.page_size,
            max_total_tokens=self.profile.device_tokens,
            hicache_ratio=self.profile.host_ratio,
            layout=self.layout,
            io_backend=io,
            flags=self.profile.flags,
            environment={
                "PYTHONPATH": os.pathsep.join(paths),
                "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(campaign.l3 / "file"),
            },
        )
        self.server = BenchServer(spec, campaign.out / f"server-{name}.log", self.arguments.launcher)
        repository = f"{HERE.parent}{os.sep}"
        campaign.report.note(**{f"server_{name}": [word.replace(repository, "") for word in spec.command()[3:]]})

    # ---- requests ----

    def ask(self, system: str, state: str, seed: int, tokens: int) -> tuple[Answer, bool]:
        """Send a prompt. `state` says where its KV must come from ("any": not checked). Returns whether it did."""
        ids = prompt(seed, tokens, self.profile.shape["vocab_size"])
        answer = self.server.generate(ids, new_tokens=8)
        full = cached_by_a_hit(tokens, self.profile.page_size)
        good, notes = True, ""
        if state in TIER_OF:
            tier = TIER_OF[state]
            good = answer.cached_tokens == (full if tier else 0) and (tier is None or answer.cached[tier] == full)
            if not good:
                notes += f"  NOT A {state} {'hit' if tier else ''}"
                self.campaign.fail(
                    f"{self.name}, {system}, {tokens}: expected {state}, the server says {answer.cached}"
                )
        self.sent += tokens - answer.cached["device"]
        self.last_seen[seed, tokens] = self.sent
        self.campaign.requests.write(
            json.dumps(
                {
                    "step": self.name,
                    "layout": self.layout,
                    "system": system,
                    "state": state,
                    "seed": seed,
                    "tokens": tokens,
                    "ttft_ms": answer.ttft * 1e3,
                    "cached": answer.cached,
                    "good": good,
                    "ids": answer.tokens,
                    "top": answer.logprobs,
                }
            )
            + "\n"
        )
        self.campaign.log(
            f"{self.layout} {system:20s} {tokens:6d} tokens  TTFT {answer.ttft * 1e3:8.1f} ms  {answer.cached}{notes}"
        )
        return answer, good

    def reference(self, seed: int, tokens: int) -> Answer | None:
        """The device hit of this prompt before any restart."""
        saved = self.campaign.references.get(f"{self.layout}/{seed}/{tokens}")
        if saved is None:
            return None
        logprobs = tuple((value, token) for value, token in saved["logprobs"])
        return Answer(tokens, tuple(saved["tokens"]), logprobs, {}, None, 0.0)

    def keep_reference(self, seed: int, tokens: int, answer: Answer) -> None:
        key = f"{self.layout}/{seed}/{tokens}"
        self.campaign.references[key] = {"tokens": answer.tokens, "logprobs": answer.logprobs}
        self.campaign.reference_file.write_text(json.dumps(self.campaign.references), encoding="utf-8")

    def key(self, tokens: int, number: int = 1) -> tuple[int, int]:
        """Seed and length of a measured prompt; the same in every step."""
        return tokens * 10 + number, tokens

    def fresh(self, tokens: int) -> tuple[int, int]:
        """Seed and length of a prompt that no server has seen."""
        self.fresh_seed += 1
        return self.fresh_seed, tokens

    def row(
        self,
        system: str,
        tokens: int,
        answers: list[tuple[Answer, bool]],
        limit: float | None = None,
        equal: list[bool] | None = None,
        case: str | None = None,
        **extra: Any,
    ) -> None:
        """Add the median of `answers` to the report."""
        times = [answer.ttft * 1e3 for answer, _ in answers]
        self.medians[system, tokens] = statistics.median(times)
        if equal is not None:
            extra |= {"first_token_and_top20_equal": f"{sum(equal)}/{len(equal)}"}
            if not all(equal):
                self.campaign.fail(
                    f"{self.name}, {system}, {tokens}: {len(equal) - sum(equal)} of {len(equal)} answers differ "
                    "from the device hit"
                )
        self.campaign.report.add(
            case or f"ttft {self.layout}",
            system,
            tokens,
            self.medians[system, tokens],
            "ms",
            limit,
            min=round(min(times), 3),
            max=round(max(times), 3),
            n=len(times),
            state_ok=f"{sum(good for _, good in answers)}/{len(answers)}",
            **extra,
        )

    # ---- parts of a step ----

    def start(self) -> bool:
        """Start the server; a failure is noted."""
        if not self.campaign.time_for(f"step {self.name}", self.arguments.start_seconds):
            return False
        try:
            seconds = self.server.start(timeout=max(30.0, min(300.0, self.campaign.left() - 20)))
        except ServerError as error:
            self.campaign.fail(f"{self.name}: {error}")
            return False
        self.campaign.report.add("server start", self.name, "-", seconds, "s")
        return True

    def warm_up(self) -> None:
        """Kernels of every length, cold and hit, so that no measured request is a first one."""
        for tokens in self.profile.sizes:
            key = self.fresh(tokens)
            for _ in range(2):
                self.ask("warm-up", "any", *key)
        self.server.flush_cache()

    def levels(self) -> None:
        """Recompute, device hit, DRAM hit."""
        prompts = {
            tokens: [self.key(tokens, i) for i in range(1, count + 1)]
            for tokens, count in zip(self.profile.sizes, (3, 2), strict=True)
        }
        everything = [key for keys in prompts.values() for key in keys]
        hits = 1 if self.arguments.quick else 3
        cold: dict[int, list] = {}
        device: dict[int, list] = {}
        equal: dict[int, list[bool]] = {}
        first: dict[tuple[int, int], Answer] = {}
        for key in everything:
            cold.setdefault(key[1], []).append(self.ask("recompute", "recompute", *key))
            for _ in range(hits):
                answer, good = self.ask("device", "device", *key)
                device.setdefault(key[1], []).append((answer, good))
                if key in first:
                    equal.setdefault(key[1], []).append(answer.same_first_token(first[key]))
                first.setdefault(key, answer)
            self.keep_reference(*key, first[key])
        for tokens in prompts:
            self.row("recompute", tokens, cold[tokens])
            self.row("device", tokens, device[tokens], equal=equal.get(tokens))
        time.sleep(1)  # the copies to the host pool are done by then; the state check would show it
        host: dict[int, list] = {}
        equal = {}
        for _ in range(hits):
            for key in everything:
                self.push_out_of_device(key)
                answer, good = self.ask("host", "host", *key)
                host.setdefault(key[1], []).append((answer, good))
                equal.setdefault(key[1], []).append(answer.same_first_token(first[key]))
        for tokens in prompts:
            self.row("host", tokens, host[tokens], self.limit_of("device", "host_to_gpu_gbps", tokens), equal[tokens])

    def limit_of(self, below: str, rate: str, tokens: int) -> float | None:
        """Milliseconds of the tier below plus those that the prompt's bytes take at a measured rate."""
        seconds = self.campaign.seconds_at(rate, cached_by_a_hit(tokens, self.profile.page_size))
        base = self.medians.get((below, tokens))
        return None if seconds is None or base is None else base + seconds * 1e3

    def push_out_of_device(self, key: tuple[int, int]) -> None:
        """Send other prompts until the device pool has been filled once since this prompt was last seen."""
        page = self.profile.page_size
        missing = self.profile.device_tokens + 16 * page - (self.sent - self.last_seen[key])
        while missing > 0:
            tokens = min(max(missing // page + 1, 4) * page, self.profile.sizes[-1])
            self.ask("filler", "any", *self.fresh(tokens))
            missing -= tokens

    def cold_prompts(self, system: str) -> None:
        """What a miss costs: prompts nobody has seen, each after a pause, then back to back."""
        small, large = self.profile.sizes
        often = (2, 1, 2, 1) if self.arguments.quick else (6, 3, 6, 2)
        for pause, case, counts in ((True, "cold, after a pause", often[:2]), (False, "cold, back to back", often[2:])):
            for tokens, count in zip((small, large), counts, strict=True):
                if not self.campaign.time_for(f"{self.name}: {case} {system} {tokens}", 15):
                    return
                answers = []
                for _ in range(count):
                    answers.append(self.ask(f"cold {system}", "recompute", *self.fresh(tokens)))
                    if pause:
                        time.sleep(0.3 if tokens == small else 1.0)
                self.row(f"{self.layout} {system}", tokens, answers, case=case)

    def compile_hash(self) -> None:
        """SGLang compiles its page hash at the first use of any storage; a short prompt makes it."""
        key = self.fresh(self.profile.warm_tokens)
        self.ask("warm-up", "any", *key)
        self.server.flush_cache()
        self.ask("warm-up", "any", *key)

    def storage_hits(self, plan: list[tuple[str, int]]) -> None:
        """Attach each (system, repetitions) of `plan` in turn and measure its hits; a system may come again."""
        answers: dict[tuple[str, int], list] = {}
        equal: dict[tuple[str, int], list[bool]] = {}
        warm = False
        for name, repetitions in plan:
            if not self.campaign.time_for(f"{self.name}: L3 {name}", 45 if name == "file" else 25):
                continue
            backend, extra, folder = self.campaign.backend(name)
            stored = [system for system, _ in answers]
            again = name in stored or (name == "tardis-unverified" and "tardis" in stored)
            self.server.flush_cache()
            if not again:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
            try:
                seconds = self.server.attach(backend, extra)
            except ServerError as error:
                self.campaign.fail(f"{self.name}: {error}")
                continue
            self.campaign.log(f"attached {name} in {seconds:.2f} s")
            if not warm:
                self.compile_hash()
                warm = True
            for tokens in self.profile.sizes:
                key = self.key(tokens)
                self.server.flush_cache()
                before = self.call_rates(name)
                if not again:
                    self.ask(f"{name} store", "recompute", *key)
                    seconds = self.server.flush_cache()
                    # From the reply's end; some of it was stored before.
                    self.campaign.report.add(f"until stored {self.layout}", name, tokens, seconds, "s")
                    self.add_call_rates(name, name, "set", tokens, before)
                    before = self.call_rates(name)
                for _ in range(repetitions):
                    self.server.flush_cache()
                    answer, good = self.ask(name, "storage", *key)
                    answers.setdefault((name, tokens), []).append((answer, good))
                    reference = self.reference(*key)
                    if reference is not None:
                        equal.setdefault((name, tokens), []).append(answer.same_first_token(reference))
                self.row(
                    name,
                    tokens,
                    answers[name, tokens],
                    self.limit_of("host", "file_read_gbps", tokens),
                    equal.get((name, tokens)),
                )
                self.server.flush_cache()
                self.add_call_rates(name, name, "get", tokens, before)
            self.server.detach()
        for name in {name for name, _ in plan} - {"tardis", "tardis-unverified"}:
            shutil.rmtree(self.campaign.backend(name)[2], ignore_errors=True)

    def call_rates(self, name: str) -> dict[str, tuple[int, float]]:
        """Calls so far and the sum of their rates (GB/s), by get and set; zeros if the system reports none."""
        if name == "readv":
            rates: dict[str, list[float]] = {"get": [], "set": []}
            log = self.campaign.out / "readv.jsonl"
            for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else ():
                call = json.loads(line)
                if call["op"] in rates:
                    rates[call["op"]].append(call["bytes"] / call["seconds"] / 1e9)
            return {op: (len(values), sum(values)) for op, values in rates.items()}
        metrics = self.server.metrics()
        return {
            op: (
                int(metrics.get(f"sglang:{what}_bandwidth_count", 0)),
                metrics.get(f"sglang:{what}_bandwidth_sum", 0.0),
            )
            for op, what in (("get", "prefetch"), ("set", "backup"))
        }

    def add_call_rates(
        self, system: str, name: str, op: str, tokens: int, before: dict[str, tuple[int, float]]
    ) -> None:
        """Mean rate of the `op` calls of `name` since `before`, inside the backend alone. The server must be idle."""
        calls, total = (now - then for now, then in zip(self.call_rates(name)[op], before[op], strict=True))
        if calls > 0:
            limit = self.campaign.limits.get("file_read_gbps") if op == "get" else None
            case = f"rate in {op} calls {self.layout}"
            self.campaign.report.add(case, system, tokens, total / calls, "GB/s", limit, calls=calls)

    def note_counters(self) -> None:
        """Keep what tardis published on /metrics."""
        try:
            counters = {
                k: v for k, v in self.server.metrics().items() if k.startswith("tardis_") and "_created" not in k
            }
        except OSError:  # the server is gone; the reason is noted already
            return
        self.campaign.report.note(**{f"tardis_metrics_{self.name}": counters})

    def misses_with_tardis(self) -> None:
        """Cold prompts with a store of its own attached, so that the pages of the measured prompts stay."""
        if not self.campaign.time_for(f"{self.name}: cold prompts with tardis", 40):
            return
        folder = self.campaign.l3 / "tardis-cold"
        shutil.rmtree(folder, ignore_errors=True)
        self.server.flush_cache()
        self.server.attach("tardis", self.campaign.tardis_config(folder))
        self.compile_hash()
        self.cold_prompts("+ tardis")
        self.server.flush_cache()
        self.server.detach()
        shutil.rmtree(folder, ignore_errors=True)

    def restored_hits(self) -> None:
        """In a new server: hits on what the last one stored, against a device hit here and one before the restart."""
        self.compile_hash()
        for tokens in self.profile.sizes:
            key = self.key(tokens)
            rates = self.call_rates("tardis")
            before = self.reference(*key)
            if before is None:
                self.campaign.fail(
                    f"restart: no device hit of a {tokens}-token prompt from before; run step `direct` first"
                )
                continue
            restored, device, equal_here, equal_before = [], [], [], []
            for _ in range(2 if self.arguments.quick else 5):
                self.server.flush_cache()
                restored.append(self.ask("tardis restart", "storage", *key))
                device.append(self.ask("device restart", "device", *key))
                equal_here.append(restored[-1][0].same_first_token(device[-1][0]))
                equal_before.append(restored[-1][0].same_first_token(before))
            self.row("device restart", tokens, device)
            self.row(
                "tardis restart",
                tokens,
                restored,
                None,
                equal_here,
                equal_to_device_hit_before_restart=f"{sum(equal_before)}/{len(equal_before)}",
            )
            if not all(equal_before):
                self.campaign.fail(f"restart, {tokens}: restored answers differ from the device hit before the restart")
            self.server.flush_cache()
            self.add_call_rates("tardis restart", "tardis", "get", tokens, rates)

    def negative_control(self) -> None:
        """Damaged pages: with verification off the answer must change, with it on they must be misses, counted."""
        campaign, page = self.campaign, self.profile.page_size
        tokens = self.profile.sizes[0]
        key = self.fresh(tokens)
        folder = campaign.l3 / "tardis-damaged"
        shutil.rmtree(folder, ignore_errors=True)
        self.server.flush_cache()
        self.server.detach()

        def attached(verify: bool, work: Callable[[], Any]) -> Any:
            self.server.attach("tardis", campaign.tardis_config(folder, verify_reads=verify))
            try:
                return work()
            finally:
                self.server.flush_cache()
                self.server.detach()

        def whole_hit() -> Answer:
            self.ask("control store", "recompute", *key)
            device, _ = self.ask("control device", "device", *key)
            self.server.flush_cache()
            stored, _ = self.ask("control intact", "storage", *key)
            if not stored.same_first_token(device):
                campaign.fail("negative control: the intact hit differs from the device hit")
            return device

        device = attached(True, whole_hit)
        keys = corrupt.page_keys(prompt(*key, self.profile.shape["vocab_size"]), page)
        pages = corrupt.stored_pages(folder)
        first = len(keys) // 4
        damaged = range(first, len(keys) // 2)
        absent = [i for i in damaged if keys[i] not in pages]
        if absent:
            campaign.fail(f"negative control: {len(absent)} of {len(damaged)} pages not found in {folder}")
            return
        changed = sum(corrupt.flip_signs(pages[keys[i]]) for i in damaged)
        campaign.log(f"damaged {len(damaged)} of {len(keys)} pages, {changed} bytes")

        unverified, _ = attached(False, lambda: self.ask("control unverified", "storage", *key))
        differs = not unverified.same_first_token(device)
        if not differs:
            campaign.fail("negative control: damaged pages, verification off, and the answer is the same")
        campaign.report.add(
            "negative control",
            "answer differs, verification off",
            tokens,
            float(differs),
            "bool",
            1.0,
            damaged_pages=len(damaged),
            damaged_bytes=changed,
        )

        counter = "tardis_read_pages_corrupt_total"
        before = self.server.metrics().get(counter, 0.0)
        verified, _ = attached(True, lambda: self.ask("control verified", "any", *key))
        counted = self.server.metrics().get(counter, 0.0) - before
        if counted < 1:
            campaign.fail(f"negative control: {counter} did not grow on /metrics")
        expected = first * page
        if verified.cached_tokens != expected or verified.cached["storage"] != expected:
            campaign.fail(
                f"negative control: expected {expected} cached tokens up to the damage, got {verified.cached}"
            )
        campaign.report.add(
            "negative control",
            "tokens served up to damage",
            tokens,
            verified.cached["storage"],
            "tokens",
            float(expected),
        )
        campaign.report.add("negative control", "corrupt pages counted", tokens, counted, "pages")

        def again() -> Answer:
            answer, _ = self.ask("control rewritten", "storage", *key)
            return answer

        repaired = attached(True, again)
        if not repaired.same_first_token(device):
            campaign.fail("negative control: the hit on rewritten pages differs from the device hit")
        campaign.report.add(
            "negative control",
            "rewritten, tokens served",
            tokens,
            repaired.cached["storage"],
            "tokens",
            float(cached_by_a_hit(tokens, page)),
        )
        shutil.rmtree(folder, ignore_errors=True)

    # ---- steps ----

    def run(self) -> None:
        """Everything of this step; the server is stopped whatever happens."""
        if not self.start():
            return
        try:
            self.warm_up()
            if self.name == "restart":
                self.restored_hits()
                if self.campaign.time_for("negative control", 30):
                    self.negative_control()
            else:
                self.levels()
                self.cold_prompts("")
                systems = self.arguments.systems.split(",")
                often = 2 if self.arguments.quick else 3
                rounds = [["readv", "tardis"], ["tardis", "readv"]]
                if self.arguments.quick:
                    rounds = rounds[:1]
                plan = [(name, often) for order in rounds for name in order if name in systems]
                if "tardis" in systems and not self.arguments.quick:
                    plan.append(("tardis-unverified", often))
                if "file" in systems:
                    plan.append(("file", 2))
                self.storage_hits(plan)
                if "tardis" in systems:
                    self.misses_with_tardis()
        except Exception as error:
            self.campaign.fail(f"{self.name}: {error!r}"[:3000])
        finally:
            began = time.monotonic()
            self.note_counters()
            self.server.stop()
            self.campaign.log(f"server {self.name} stopped in {time.monotonic() - began:.1f} s")
