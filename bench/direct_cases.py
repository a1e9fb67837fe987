# SPDX-License-Identifier: Apache-2.0
"""What direct.py measures on a server, case by case; a case that fails costs no other."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import corrupt
from direct_campaign import Campaign
from direct_disk import DiskCase
from direct_profile import DEFAULT, KINDS, Kind
from direct_server import DirectServer, WrongState
from direct_shared import SharedContext
from serving_client import Outcome, OutOfTime
from serving_results import percentile
from serving_workloads import Request, full_hit
from sglang_server import ServerError

DOCUMENT = "document"
"""The prompt that hits of a share have as their beginning; its first tokens are the longest of the sizes."""
CONTROL = "control"
LAYER_WAIT = "tardis_direct_layer_wait_seconds_total"
ORIGIN = {"restart": "direct", "host-restart": "host"}
"""The server that stored what a restarted one finds."""


class Cases:
    """The cases of one server."""

    def __init__(self, campaign: Campaign, server: DirectServer) -> None:
        self.campaign, self.server = campaign, server
        self.kind, self.profile = server.kind, campaign.profile
        self.base = ORIGIN.get(self.kind.name, self.kind.name)
        self.lengths = self.profile.lengths(self.kind)
        self.prompts = self.profile.shared_prompts(self.kind, campaign.arguments.seed)
        self.shared = SharedContext(server, self.prompts)

    def plan(self) -> list[tuple[str, float, Callable[[], None]]]:
        """(name, seconds that it may take on an H200, what to call), in order. Some need those before them."""
        if self.kind.disk:
            return [("disk", 90, DiskCase(self.server).run)]
        small, files = self.kind.small, self.kind.door is not None
        if small and files:
            return [
                ("first hits after the restart", 20, self.restored),
                ("damaged pages", 20, self.damaged),
                ("working set", 80, self.working_set),
            ]
        steps = [("levels", 45, self.levels)]
        if self.kind.other:
            return [*steps, ("files", 40, self.files)]
        if small:
            return [*steps, ("working set", 40, self.working_set)]
        if files:  # before anything that could push out what is asked for
            steps.append(("files", 25, self.files))
        steps += [
            ("shared context, closed loop", 50, self.shared.closed_loop),
            ("shared context, all at once", 20, self.shared.all_at_once),
            ("decoding", 20, self.decoding),
            ("misses", 20, self.misses),
            ("hit rates from DRAM", 45, self.rates_dram),
        ]
        if files:
            steps.append(("hit rates from files", 45, self.rates_files))
        if self.kind.fresh:
            steps.append(("what a restart finds", 10, self.leave))
        return steps

    def run(self) -> None:
        """All cases, until time or the server is gone."""
        for name, seconds, call in self.plan():
            if self.wanted(name) and self.campaign.time_for(f"{self.kind.name}: {name}", seconds):
                before, began = self.server.published(), time.monotonic()
                try:
                    call()
                except OutOfTime as error:
                    self.campaign.skipped.append(f"{self.kind.name}: {name}: out of time ({error})")
                except (WrongState, ServerError, RuntimeError, OSError) as error:
                    self.campaign.fail(f"{self.kind.name}: {name}: {error!r}")
                    if not self.server.server.alive():
                        raise
                grown = {"seconds": round(time.monotonic() - began, 1), **self.server.grown(before)}
                counters = self.campaign.report.extra.get(f"counters_{self.kind.name}", {})
                self.campaign.report.note(**{f"counters_{self.kind.name}": {**counters, name: grown}})
                self.campaign.log(f"{self.kind.name}: {name}: {grown}")
                self.campaign.save()

    def wanted(self, name: str) -> bool:
        """Whether the command line leaves it in."""
        chosen = self.campaign.arguments.cases
        return not chosen or any(word in name for word in chosen.split(","))

    # ---- levels ----

    def warm_up(self) -> None:
        """Kernels, cold and hit, so that no measured request is a first one."""
        for length in self.lengths[:2]:
            request = self.server.request(f"warm-up/{length}/{self.kind.name}", length, new_tokens=2)
            for _ in range(2):
                self.server.ask(request, "any", what="warm-up")
        if self.kind.backend is not None:  # what a first load or fetch prepares
            self.server.flush()
            self.server.ask(request, "any", what="warm-up")
        self.server.flush()

    def prompt(self, length: int) -> Request:
        """The one of this length that is asked again and again."""
        if length == self.profile.sizes[-1]:
            return self.server.request(DOCUMENT, length)
        return self.server.request(f"p{length}", length)

    def levels(self) -> None:
        """Recompute, device hit, DRAM hit, at each length."""
        server, profile = self.server, self.profile
        cold: dict[int, list[Outcome]] = {length: [] for length in self.lengths}
        for length in self.lengths[:-1]:  # first, so that the DRAM tier keeps what is needed later
            for number in range(profile.repetitions - 1):
                request = server.request(f"cold/{length}/{number}", length)
                cold[length].append(server.ask(request, "recompute"))
        if self.kind.small:
            fillers = [server.request(f"filler/{n}", profile.filler) for n in range(2)]
        else:
            fillers = list(self.prompts[: self.profile.fillers])
        server.prepare_fillers(fillers)
        if self.kind.door is not None:
            control = server.request(CONTROL, profile.sizes[0])
            self.campaign.keep(f"{self.base}/recompute/{CONTROL}", server.ask(control, "recompute"))
            self.campaign.keep(self.answer(control), server.ask(control, "device"))
        for length in self.lengths:
            request = self.prompt(length)
            cold[length].append(server.ask(request, "recompute"))
            hits = [server.ask(request, "device") for _ in range(profile.repetitions)]
            self.campaign.keep(self.answer(request), hits[0])
            where = f"{self.kind.name}, device"
            equal = [self.campaign.require_same(self.answer(request), hit, where) for hit in hits[1:]]
            other = None if self.base == DEFAULT[0] else self.campaign.same(self.answer(request, DEFAULT[0]), hits[0])
            server.row("recompute", length, [outcome.ttft for outcome in cold[length]])
            server.row(
                "device",
                length,
                [outcome.ttft for outcome in hits],
                equal=f"{sum(equal)}/{len(equal)}",
                equal_to_another_server=other,
            )
        if self.lengths[-1] == profile.sizes[-1]:  # the rest of the document
            whole = server.request(DOCUMENT, profile.prefixes[-1])
            server.ask(whole, "any", what="rest of the document")
        stored = server.settle()
        self.campaign.log(f"{self.kind.name}: stored {stored:.1f} s later")
        self.repeat("dram", lambda request: server.push_out(request.name))

    def answer(self, request: Request, server: str | None = None) -> str:
        """The name of its device hit among the answers: of this server, or of the one whose store it found."""
        return f"{server or self.base}/device/{request.name}/{len(request.tokens)}"

    def repeat(self, state: str, before: Callable[[Request], object]) -> None:
        """Hits of each length, `before` called ahead of each; the longest first, which pushes out the others."""
        found: dict[int, list[Outcome]] = {}
        equal: dict[int, list[bool]] = {}
        counted = self.server.published()
        for _ in range(self.profile.repetitions):
            for length in reversed(self.lengths):
                request = self.prompt(length)
                before(request)
                outcome = self.server.ask(request, state)
                found.setdefault(length, []).append(outcome)
                same = self.campaign.require_same(self.answer(request), outcome, f"{self.kind.name}, {state}, {length}")
                equal.setdefault(length, []).append(same)
        self.server.check_source(state, counted)
        for length in self.lengths:
            self.server.row(
                state,
                length,
                [outcome.ttft for outcome in found[length]],
                self.limit(state, length),
                equal=f"{sum(equal[length])}/{len(equal[length])}",
            )

    def limit(self, state: str, length: int) -> float | None:
        """The device hit and the bytes over the link, or from the files if those are slower; ms."""
        device = self.campaign.report.rows.get(("device", self.kind.name, str(length)))
        tokens = full_hit(length, self.profile.page_size)
        rates = ["host_to_gpu_gbps", *(["file_read_gbps"] if state == "files" else [])]
        seconds = [found for rate in rates if (found := self.campaign.seconds_at(rate, tokens)) is not None]
        return device["value"] + max(seconds) * 1e3 if device and seconds else None

    def files(self) -> None:
        """Hits from files at each length: before each, the device pool and the DRAM tier are emptied."""
        self.repeat("files", lambda _request: self.server.flush())

    def restored(self) -> None:
        """The first hit of each length in a server that has just started, and a device hit."""
        for length in reversed(self.lengths):
            request = self.prompt(length)
            equal = []
            outcome = self.server.ask(request, "files", what="first after restart")
            equal.append(self.campaign.require_same(self.answer(request), outcome, f"restart, {length}"))
            device = self.server.ask(request, "device")
            equal.append(self.campaign.require_same(self.answer(request), device, f"restart, device, {length}"))
            self.server.row("first hit after restart", length, [outcome.ttft], equal=f"{sum(equal)}/{len(equal)}")

    # ---- shares that hit ----

    def bring_back(self) -> None:
        """The document and the fillers into the DRAM tier, if prompts over the shared context have had its place."""
        if self.shared.warm:
            self.shared.warm = False
            self.server.flush()
            for request in (self.server.request(DOCUMENT, self.profile.prefixes[-1]), *self.server.fillers):
                self.server.ask(request, "any", what="brought back")
                self.server.settle(quiet=0.3)

    def rates_dram(self) -> None:
        """A share from the DRAM tier."""
        self.bring_back()
        self.hit_rates("dram", lambda: self.server.push_out(DOCUMENT))

    def rates_files(self) -> None:
        """A share from files."""
        self.bring_back()
        self.hit_rates("files", self.server.flush)

    def hit_rates(self, state: str, before: Callable[[], object]) -> None:
        """`new` tokens behind a prefix from that state, and other new ones behind the same prefix on the device: the
        difference is what the prefill waited for. Beside it the direct door's own count: how long the forward's stream
        stood still for layers.
        """
        server, new = self.server, self.profile.new
        document = server.request(DOCUMENT, self.profile.prefixes[-1]).tokens
        counted = server.published()
        for prefix in self.profile.prefixes:
            times: dict[str, list[float]] = {state: [], "device": []}
            equal, stood_still = [], []
            for number in range(max(1, self.profile.repetitions - 1)):
                for where, turn in ((state, before), ("device", None)):
                    if turn is not None:
                        turn()
                    # The DRAM tier and files answer the same prompts on every server; one on the device, others.
                    name = f"new/{state}/{prefix}/{number}/{where}"
                    request = server.behind(document[:prefix], name, new)
                    before_it = server.published() if self.kind.door == "direct" and where == state else None
                    outcome = server.ask(request, where, cached=prefix, what=f"{prefix} from {where}")
                    if before_it is not None:
                        stood_still.append(server.grown(before_it).get(LAYER_WAIT, 0.0))
                    server.seen[DOCUMENT] = server.sent
                    times[where].append(outcome.ttft)
                    if where == state:
                        kept = f"{{}}/rate/{state}/{prefix}/{number}"
                        self.campaign.keep(kept.format(self.kind.name), outcome)
                        if self.kind.name != DEFAULT[0]:
                            same = self.campaign.same(kept.format(DEFAULT[0]), outcome)
                            equal += [] if same is None else [same]
            on_device = statistics.median(times["device"])
            waited = statistics.median(times[state]) - on_device
            percent = round(100 * prefix / (prefix + new), 1)
            by_counter = {"stood_still_ms": round(statistics.median(stood_still) * 1e3, 3)} if stood_still else {}
            server.row(f"hit rate, {state}", percent, times[state], on_device * 1e3, prefix=prefix, new=new)
            self.campaign.report.add(
                f"bubble, {state}",
                self.kind.name,
                percent,
                100 * waited / on_device,
                "%",
                prefix=prefix,
                waited_ms=round(waited * 1e3, 3),
                on_device_ms=round(on_device * 1e3, 3),
                equal_to_another_server=f"{sum(equal)}/{len(equal)}",
                **by_counter,
            )
        self.server.check_source(state, counted)

    # ---- throughput ----

    def working_set(self) -> None:
        """Four times as many prompts as the DRAM tier holds, asked in turn, then once more in another order."""
        server, setting = self.server, self.profile.setting(self.kind, self.campaign.arguments.seed)
        plan = self.profile.working_set.plan(setting, "seq")
        server.flush()
        if self.kind.door is not None:
            server.clear_store()  # pages of earlier cases, which were used again, would keep their places
        for number, request in enumerate(plan.prepare):
            server.ask(request, "any", what="working set, first")
            if self.kind.door is not None and number % 2:  # at a rate at which they can be stored
                server.settle(quiet=1.2)
        server.settle(quiet=1.2)
        outcomes = [server.ask(request, "any", what="working set") for request in plan.measure]
        tokens = {tier: sum(outcome.cached[tier] for outcome in outcomes) for tier in outcomes[0].cached}
        self.campaign.report.add(
            "working set: mean ttft",
            self.kind.name,
            len(outcomes),
            statistics.fmean(outcome.ttft for outcome in outcomes) * 1e3,
            "ms",
            median=round(statistics.median(outcome.ttft for outcome in outcomes) * 1e3, 3),
            prompt_tokens=sum(outcome.prompt_tokens for outcome in outcomes),
            dram_tokens=server.pools.dram,
            **tokens,
        )

    def misses(self) -> None:
        """Prompts that nobody has seen, each after a pause."""
        for length, count in self.profile.misses:
            times = []
            for number in range(count):
                time.sleep(0.3 if self.profile.device == "cuda" else 0.0)
                request = self.server.request(f"miss/{self.kind.name}/{length}/{number}", length)
                times.append(self.server.ask(request, "recompute", what="miss").ttft)
            self.server.row("miss", length, times)

    def decoding(self) -> None:
        """Times between tokens of a few streams, right behind a prompt whose pages are then stored, and without."""
        server, (streams, tokens, length) = self.server, self.profile.decode
        gaps: dict[str, list[float]] = {"quiet": [], "storing": []}
        grown: dict[str, float] = {}
        for number in range(self.profile.repetitions):
            for state in gaps:
                name = f"decode/{self.kind.name}/{state}/{number}"
                requests = [
                    server.request(f"{name}/{stream}", 4 * self.profile.page_size, tokens) for stream in range(streams)
                ]
                server.settle()
                if state == "storing":
                    server.ask(server.request(f"{name}/stored", length), "recompute", what="stored meanwhile")
                before = server.counters()  # at once, or nothing would be left to be stored
                outcomes, _ = server.client.together(requests, [0.0] * streams, lambda _request: None)
                if any(outcome.error for outcome in outcomes):
                    raise RuntimeError(f"decoding: {[outcome.error for outcome in outcomes]}")
                if state == "storing":
                    for counter, value in server.grown(before).items():
                        grown[counter] = grown.get(counter, 0.0) + value
                server.sent += sum(4 * self.profile.page_size + tokens for _ in requests)
                # The first steps wait for the other streams' prompts.
                for outcome in outcomes:
                    stamps = outcome.stamps[streams + 1 :]
                    gaps[state] += [after - earlier for earlier, after in itertools.pairwise(stamps)]
        for state, found in gaps.items():
            for percent in (50, 99):
                extra: dict[str, Any] = {"stored_meanwhile": grown} if state == "storing" else {}
                self.campaign.report.add(
                    f"between tokens, {state}",
                    self.kind.name,
                    f"p{percent}",
                    percentile([gap * 1e3 for gap in found], percent),
                    "ms",
                    gaps=len(found),
                    **extra,
                )

    def leave(self) -> None:
        """Ask once more what the next server looks for, lest prompts since then have pushed it out of the store."""
        requests = [self.prompt(length) for length in self.profile.lengths(KINDS["restart"])]
        for request in (*requests, self.server.request(CONTROL, self.profile.sizes[0])):
            self.server.ask(request, "any", what="for the restart")
        self.server.settle()

    # ---- damage ----

    def damaged(self) -> None:
        """Pages that were damaged while no server ran: their bytes must not be served. The answer is that of a
        recompute (or, up to the damage, of a shorter hit); afterwards the pages are stored anew.
        """
        server, profile, campaign = self.server, self.profile, self.campaign
        request = server.request(CONTROL, profile.sizes[0])
        keys = f"{self.base}/recompute/{CONTROL}", self.answer(request)
        if any(key not in campaign.answers for key in keys) or not campaign.damaged_pages:
            raise RuntimeError("nothing was damaged: the server before this one did not store the control prompt")
        recomputed, hit = (campaign.answers[key] for key in keys)
        if recomputed == hit and profile.device == "cuda":  # on a CPU they may be equal
            campaign.fail("damaged pages: recompute and hit have the same answer, so the comparison shows nothing")
        outcome = server.ask(request, "any", what="damaged")
        cached, up_to = sum(outcome.cached.values()), campaign.damaged_from * profile.page_size
        if cached not in (0, up_to):
            campaign.fail(f"damaged pages: expected 0 or {up_to} cached tokens, found {outcome.cached}")
        if cached == 0 and not campaign.same(keys[0], outcome):
            campaign.fail("damaged pages: the answer is not that of a recompute")
        first = server.ask(request, "device")
        server.flush()
        again = server.ask(request, "files", what="stored anew")
        if (again.ids[:1], again.top) != (first.ids[:1], first.top):
            campaign.fail("damaged pages: what was stored anew gives another answer than the device hit")
        if cached == 0:
            campaign.require_same(keys[1], again, "damaged pages, stored anew")
        campaign.report.add(
            "damaged pages",
            self.kind.name,
            profile.sizes[0],
            cached,
            "tokens",
            pages=campaign.damaged_pages,
            ttft_ms=round(outcome.ttft * 1e3, 3),
            recompute_differs_from_hit=recomputed != hit,
        )


def damage(campaign: Campaign, kind: Kind) -> None:
    """Flip the sign of every value in a quarter of the control prompt's pages. No server may have the store open."""
    server = DirectServer(campaign, kind)
    keys = corrupt.page_keys(
        list(server.request(CONTROL, campaign.profile.sizes[0]).tokens), campaign.profile.page_size
    )
    pages = corrupt.stored_pages(campaign.store(kind))
    chosen = range(len(keys) // 4, len(keys) // 2)
    absent = [index for index in chosen if keys[index] not in pages]
    if absent:
        campaign.fail(f"damage: {len(absent)} of {len(chosen)} pages of the control prompt are not in the store")
        return
    changed = sum(corrupt.flip_signs(pages[keys[index]]) for index in chosen)
    campaign.damaged_pages, campaign.damaged_from = len(chosen), chosen[0]
    campaign.log(f"damaged {len(chosen)} of {len(keys)} pages, {changed} bytes")
