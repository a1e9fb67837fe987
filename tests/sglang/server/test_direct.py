# SPDX-License-Identifier: Apache-2.0
"""Mode direct on a real server: pages from DRAM and from files, damaged ones are computed, aborts leave nothing."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import corrupt
import pytest
from real_server import HIT, NOTHING, ON_DEVICE, PAGE, START_TIMEOUT, TOKENS, make_spec, text
from server import Answer, Server

CHUNK = 512
LONG = 900
"""Tokens behind a prompt that make its rest two chunks."""
LOADED = {"device": 0, "host": HIT, "storage": 0}
"""SGLang reports what an external linker loads as coming from the host."""
DAMAGED_PAGE = 10
FAILED = "tardis_direct_failed_loads_total"
FROM_DRAM, FROM_FILES = "tardis_direct_memory_pages_total", "tardis_direct_file_pages_total"
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}


def _spec(store: Path, *flags: str, **changes):
    extra = {"mode": "direct", **changes.pop("extra_config", {})}
    environment = {**STRICT, **changes.pop("environment", {})}
    flags = ("--chunked-prefill-size", str(CHUNK), *flags)
    return make_spec(store, extra_config=extra, flags=flags, environment=environment, **changes)


@dataclass
class Direct:
    """A server in mode direct, and what it answered at first."""

    server: Server
    store: Path
    prompts: list[list[int]]
    cold: list[Answer] = field(default_factory=list)
    device: list[Answer] = field(default_factory=list)

    def again(self, ids: list[int], **how) -> Answer:
        """Ask after the KV pool and the DRAM tier were emptied, so that only files can help."""
        self.server.flush_cache()
        return self.server.generate(ids, **how)

    def counted(self, ask: Callable[[], Answer], name: str) -> tuple[Answer, float]:
        """An answer, and by how much a counter grew meanwhile."""
        before = self.server.metrics()[name]
        answer = ask()
        self.server.wait_until(lambda now: now[name] > before, name, timeout=10)
        return answer, self.server.metrics()[name] - before

    def damage(self, ids: list[int], page: int = DAMAGED_PAGE, how=corrupt.flip_signs) -> None:
        """Change the stored bytes of one page of a prompt."""
        how(corrupt.stored_pages(self.store)[corrupt.page_keys(ids, PAGE)[page]])


def make_nans(page: corrupt.StoredPage) -> None:
    """Every value is not a number: what forwards and samplers of failed requests meet as well."""
    with open(page.file, "r+b", buffering=0) as file:
        for part in range(page.parts):
            file.seek(page.offset + part * page.part_stride)
            file.write(b"\xff" * page.part_bytes)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [text(seed) for seed in (61, 62, 63, 64)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("direct")


@pytest.fixture(scope="module")
def direct(folder, prompts) -> Iterator[Direct]:
    """The shared server: overlapping schedule, prefill in chunks."""
    with contextlib.closing(Server(_spec(folder / "store", layout="page_first"), folder / "server.log")) as server:
        server.start(START_TIMEOUT)
        this = Direct(server, folder / "store", prompts)
        for ids in prompts:
            this.cold.append(server.generate(ids))
            this.device.append(server.generate(ids))
        yield this
        server.stop(signal.SIGKILL)


def test_one_line_says_what_the_switch_did(direct):
    said = [line for line in direct.server.log_text().splitlines() if "tardis: mode direct" in line]
    assert len(said) == 1 and "TardisLinker" in said[0] and "--hicache-storage-prefetch-policy wait_complete" in said[0]
    assert "--hicache-mem-layout" not in said[0], "page_first is SGLang's default: nobody asked for another one"


def test_pages_come_back_from_files_with_the_answer_of_a_device_hit(direct):
    assert [answer.cached for answer in direct.cold] == [NOTHING] * len(direct.prompts)
    assert [answer.cached for answer in direct.device] == [ON_DEVICE] * len(direct.prompts)
    for ids, device in zip(direct.prompts, direct.device, strict=True):
        answer, pages = direct.counted(lambda ids=ids: direct.again(ids), FROM_FILES)
        assert answer.cached == LOADED and pages == HIT // PAGE
        assert answer.same_first_token(device) and answer.tokens == device.tokens


def test_pages_come_back_from_dram(direct):
    direct.again(direct.prompts[0])
    for seed in range(70, 76):  # more than the KV pool holds, less than the tier does
        direct.server.generate(text(seed), new_tokens=1)
    answer, pages = direct.counted(lambda: direct.server.generate(direct.prompts[0]), FROM_DRAM)
    assert answer.cached["device"] == 0 and answer.cached == LOADED and pages == HIT // PAGE
    assert answer.same_first_token(direct.device[0]) and answer.tokens == direct.device[0].tokens


def test_a_load_before_chunks(direct):
    """What is loaded stays out of the tree until it is confirmed, while the next chunk is on its way already."""
    ids = direct.prompts[1] + text(81)[:LONG]
    loaded = direct.again(ids)
    assert loaded.cached == {"device": 0, "host": TOKENS, "storage": 0}
    # The same with the prompt on the device. The rest is stored by now; with one of its pages damaged it is computed.
    direct.again(direct.prompts[1])
    direct.damage(ids, TOKENS // PAGE + 1)
    device, failed = direct.counted(lambda: direct.server.generate(ids), FAILED)
    assert failed == 1 and device.cached == {"device": TOKENS, "host": 0, "storage": 0}
    assert loaded.same_first_token(device) and loaded.tokens == device.tokens


@pytest.mark.parametrize("rest", [0, LONG], ids=["whole", "chunks"])
def test_damaged_page_is_computed_and_nothing_of_it_stays(direct, rest):
    ids = text(90 + bool(rest)) + text(95)[:rest]
    hit = (len(ids) - 1) // PAGE * PAGE
    cold = direct.again(ids)
    direct.server.flush_cache()
    assert direct.server.generate(ids).cached["host"] == hit
    device = direct.server.generate(ids)
    assert device.cached["device"] == hit
    direct.server.flush_cache()
    direct.damage(ids)
    answer, failed = direct.counted(lambda: direct.server.generate(ids), FAILED)
    assert failed == 1 and answer.cached == NOTHING
    assert answer.same_first_token(cold) and answer.tokens == cold.tokens
    # What is in the tree now was computed, and is stored anew.
    again = direct.server.generate(ids)
    assert again.cached == {"device": hit, "host": 0, "storage": 0} and again.same_first_token(device)
    healed = direct.again(ids)
    assert healed.cached == {"device": 0, "host": hit, "storage": 0} and healed.same_first_token(device)


def test_nans_end_nothing(direct):
    """A sampler that meets NaN would end the scheduler."""
    ids = text(97)
    cold = direct.again(ids)
    direct.server.flush_cache()
    direct.damage(ids, how=make_nans)
    body = {"input_ids": ids, "sampling_params": {"temperature": 1.0, "max_new_tokens": 3, "ignore_eos": True}}
    status, said = direct.server._call("POST", "/generate", body)
    assert status == 200 and len(json.loads(said)["output_ids"]) == 3
    assert json.loads(said)["meta_info"]["num_retractions"] == 1
    direct.server.flush_cache()
    direct.damage(ids, how=make_nans)
    assert direct.server.generate(ids).same_first_token(cold)


def test_damage_beside_requests_that_run(direct):
    """Some of the requests of a step fail: each gets all its tokens, and those that a computed one gives."""
    prompts = [text(seed) for seed in range(120, 124)]
    cold = [direct.server.generate(ids, new_tokens=8) for ids in prompts]
    direct.server.flush_cache()
    for ids in prompts[:2]:
        direct.damage(ids)
    before = direct.server.metrics()[FAILED]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda ids: direct.server.generate(ids, new_tokens=8), prompts))
    direct.server.wait_until(lambda now: now[FAILED] > before, FAILED)
    for answer, alone in zip(answers, cold, strict=True):
        assert len(answer.tokens) == 8
        assert answer.first_token == alone.first_token
        # Batches of another shape round otherwise, by 0.02; a page with its signs flipped makes 0.3 and more.
        apart = max(abs(one[0] - other[0]) for one, other in zip(answer.logprobs, alone.logprobs, strict=True))
        assert apart < 0.1


def _abandoned(server: Server, ids: list[int], rid: str, seconds: float) -> None:
    """A request whose client goes away, or that is aborted by name, after a while."""
    body = {"input_ids": ids, "stream": True, "rid": rid, "sampling_params": {"max_new_tokens": 64, "ignore_eos": True}}
    connection = http.client.HTTPConnection("127.0.0.1", server.spec.port, timeout=60)
    try:
        connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        connection.sock.settimeout(seconds)
        with contextlib.suppress(TimeoutError):
            connection.getresponse().read()
    finally:
        connection.close()
        server._call("POST", "/abort_request", {"rid": rid})


def test_aborts_while_loads_are_under_way(direct):
    generator = random.Random(7)
    rests = [text(100 + seed)[:LONG] for seed in range(3)]
    direct.server.flush_cache()
    jobs = [
        (direct.prompts[i % 4] + (rests[i % 3] if i % 2 else []), f"abandoned-{i}-", generator.random() * 0.4)
        for i in range(40)
    ]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda job: _abandoned(direct.server, *job), jobs))
    direct.server.flush_cache()  # it would be refused as long as anything is held
    direct.server.wait_until(
        lambda now: now["tardis_direct_loads_under_way"] == 0 and now["tardis_direct_dram_pinned_pages"] == 0, "no pins"
    )
    answer = direct.server.generate(direct.prompts[3])
    assert answer.cached == LOADED and answer.same_first_token(direct.device[3])


def test_restart_without_overlap(direct, folder, prompts):
    """Killed and started again, with the other event loop: pages are there, and a damaged one is computed."""
    direct.again(prompts[0])
    direct.server.flush_cache()
    direct.server.stop(signal.SIGKILL)
    spec = _spec(folder / "store", "--disable-overlap-schedule")
    with contextlib.closing(Server(spec, folder / "server-2.log")) as server:
        server.start(START_TIMEOUT)
        this = Direct(server, folder / "store", prompts, direct.cold, direct.device)
        for i in (0, 3):
            answer = server.generate(prompts[i])
            assert answer.cached == LOADED and answer.same_first_token(direct.device[i])
        server.flush_cache()
        this.damage(prompts[0])
        answer, failed = this.counted(lambda: server.generate(prompts[0]), FAILED)
        assert failed == 1 and answer.cached == NOTHING
        assert answer.same_first_token(direct.cold[0]) and answer.tokens == direct.cold[0].tokens
        long = prompts[3] + text(80)[:LONG]
        cold = this.again(text(96) + text(80)[:LONG])
        server.flush_cache()
        this.damage(prompts[3])
        answer, failed = this.counted(lambda: server.generate(long), FAILED)
        assert failed == 1 and answer.cached == NOTHING and len(answer.tokens) == len(cold.tokens)
        healed = this.again(prompts[3])
        assert healed.cached == LOADED and healed.same_first_token(direct.device[3])


def test_two_ranks(folder):
    """One of two ranks finds a page damaged: both compute. With the attention backend of this package."""
    ids = text(110)
    spec = _spec(
        folder / "ranks",
        "--tp-size",
        "2",
        "--disable-custom-all-reduce",
        "--attention-backend",
        "tardis",
        environment={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    )
    with contextlib.closing(Server(spec, folder / "ranks.log")) as server:
        server.start(START_TIMEOUT)
        this = Direct(server, folder / "ranks", [ids])
        cold, device = server.generate(ids), server.generate(ids)
        loaded = this.again(ids)
        assert loaded.cached == LOADED and loaded.same_first_token(device)
        server.flush_cache()
        this.damage(ids)  # the page of one rank: both have it under the same key, each in its namespace
        answer = server.generate(ids)
        assert answer.cached == NOTHING and answer.same_first_token(cold) and answer.tokens == cold.tokens
        assert server.log_text().count("did not land; they are computed") == 2
        healed = this.again(ids)
        assert healed.cached == LOADED and healed.same_first_token(device)
