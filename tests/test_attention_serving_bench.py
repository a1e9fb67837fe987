# SPDX-License-Identifier: Apache-2.0
"""bench/attention_serving.py: how answers are compared, what it asks, what follows. No server is started."""

from __future__ import annotations

import json
import time

import attention_serving
import pytest
from attention_serving import Campaign, Run
from attention_serving_answers import Equality, Told, all_of
from attention_serving_cases import CASES, Cases, together_gaps
from attention_serving_checks import checks
from attention_serving_equality import LEAST_BOUND, Comparison, bound_of, decode, difference, encode, places, verdict
from attention_serving_profile import KINDS, REFERENCE, cpu_profile, gpu_profile
from attention_serving_server import AttentionServer, Scored, WrongAnswer
from serving_client import Outcome, OutOfTime

PROFILES = {
    f"{device}{' quick' if quick else ''}": make(quick)
    for device, make in (("gpu", gpu_profile), ("cpu", cpu_profile))
    for quick in (False, True)
}
BEST = ((-1.0, 7), (-1.5, 8), (-2.0, 9), (-2.5, 10))
BOUND = 0.25


def parse(tmp_path, *words: str):
    return attention_serving.parse(
        ["--device", "cpu", "--quick", "--out", str(tmp_path), "--json", str(tmp_path / "r.json"), *words]
    )


def answer(*steps, cached=0) -> Scored:
    return Scored(tuple(ranks[0][1] for ranks in steps), tuple(steps), (), cached)


def moved(by: float, ranks=BEST):
    return tuple((log + by, token) for log, token in ranks)


# ---- the rule ----


@pytest.mark.parametrize(
    ("chosen", "found", "expected"),
    [
        (7, BEST, "equal"),
        (7, moved(0.2), "equal"),
        (7, moved(0.3), "differs"),
        (8, ((-1.24, 8), (-1.25, 7), (-2.0, 9), (-2.5, 10)), "differs"),
        (7, (*BEST[:3], (-2.6, 11)), "equal"),
        (7, (*BEST[:3], (-2.0, 11)), "differs"),
        (7, ((-1.0, 7), (-2.4, 20), (-2.45, 21), (-2.5, 22)), "differs"),
        (70, moved(0.0, tuple((log, token * 10) for log, token in BEST)), "differs"),
    ],
    ids=[
        "itself",
        "within the bound",
        "beyond it",
        "another token, which is not as likely",
        "another last candidate",
        "a candidate that the other should have",
        "less than half in common",
        "other tokens",
    ],
)
def test_first_tokens_and_candidates(chosen, found, expected):
    assert verdict(difference(chosen, found, BEST), BOUND) == expected


def test_a_tie_is_a_token_that_is_as_likely():
    reference = ((-1.0, 7), (-1.2, 8), (-2.0, 9), (-2.5, 10))
    found = ((-1.1, 8), (-1.15, 7), (-2.0, 9), (-2.5, 10))
    assert verdict(difference(8, found, reference), BOUND) == "tie"
    assert verdict(difference(8, found, reference), 0.19) == "differs", "0.2 behind the best"


def test_the_bound_follows_from_the_reference_itself():
    own = [difference(7, moved(by), BEST) for by in (0.01, 0.1, 0.05)]
    assert bound_of(own) == pytest.approx(0.2)
    assert bound_of([difference(7, BEST, BEST)]) == LEAST_BOUND == bound_of([])


def test_decoded_tokens_are_compared_step_by_step():
    found, reference = answer(BEST, BEST, BEST), [BEST, moved(0.3), moved(0.1)]
    comparison = Comparison(places("c1", found, reference), BOUND)
    assert comparison.differing == ["c1/2"]
    summary = comparison.summary()
    assert (summary["compared"], summary["equal"], summary["differs"]) == (3, 2, 1)
    assert (summary["largest"], summary["median"]) == (0.3, 0.1)
    with pytest.raises(ValueError):
        places("c1", found, reference[:2])


def test_kept_answers_are_read_back():
    kept = json.loads(json.dumps(encode(answer(BEST, moved(0.25), cached=64))))
    assert decode(kept) == answer(BEST, moved(0.25), cached=64)


# ---- the case ----


def told(ranks, other=None, score=None) -> Told:
    one = answer(ranks, ranks)
    context = answer(other if other is not None else moved(1.0, ranks))
    return Told(
        one, answer(ranks, cached=64), answer(ranks), context, {REFERENCE: (ranks,) * 2, "host": score or (ranks,) * 2}
    )


def ranks_of(number: int):
    return tuple((log, 100 * number + token) for log, token in BEST)


@pytest.fixture
def campaign(tmp_path):
    return Campaign(parse(tmp_path))


@pytest.fixture
def equality(campaign):
    return Equality(AttentionServer(campaign, campaign.profile, KINDS[REFERENCE], 1))


def said_by_host(reference):
    return {name: (one.first, one.hit) for name, one in reference.items()}


def test_equal_answers_pass(campaign, equality):
    reference = {f"c{number}": told(ranks_of(number)) for number in range(12)}
    equality.compare(reference, {"host": said_by_host(reference)})
    assert not campaign.failures
    row = campaign.report.rows["equality, decoded", "host", "24"]
    assert (row["equal"], row["tie"], row["differs"], row["bound"]) == (24, 0, 0, LEAST_BOUND)
    assert campaign.report.rows["control, another prompt", REFERENCE, "12"]["value"] == 12


@pytest.mark.parametrize("where", ["first token", "prefix hit", "decoded"])
def test_one_wrong_answer_is_a_failure(campaign, equality, where):
    reference = {f"c{number}": told(ranks_of(number)) for number in range(12)}
    host = said_by_host(reference)
    own, hit = host["c3"]
    wrong = moved(0.2, ranks_of(3))
    if where == "first token":
        reference["c3"].scores["host"] = (wrong, ranks_of(3))
        host["c3"] = answer(wrong, ranks_of(3)), hit
    elif where == "prefix hit":
        host["c3"] = own, answer(wrong, cached=64)
    else:
        host["c3"] = answer(ranks_of(3), wrong), hit
    equality.compare(reference, {"host": host})
    (failure,) = campaign.failures
    assert failure.startswith(f"equality, {where}, host: 1 differ: ") and "}: c3" in failure and "tokens)" in failure
    assert json.loads(campaign.report.file.read_text())["failures"] == campaign.failures


def test_a_comparison_that_tells_nothing_apart_is_a_failure(campaign, equality):
    reference = {f"c{number}": told(BEST, other=BEST) for number in range(12)}
    equality.compare(reference, {})
    assert [text.split(":")[0] for text in campaign.failures] == ["control, another prompt", "control, another context"]


def test_answers_to_other_prompts_are_not_compared(campaign, equality):
    campaign.answers["host"] = {"prompts": "of another seed", "answers": {}}
    with pytest.raises(WrongAnswer, match="the same prompts"):
        equality.run()


def test_prefixes_must_be_hits(equality):
    with pytest.raises(WrongAnswer, match="prefixes in the pool"):
        equality.check_hits({request.name: answer(BEST) for request in equality.asked})


def test_the_first_error_ends_requests_in_flight(equality):
    begun = []

    def work(request):
        begun.append(request.name)
        if len(begun) == 2:
            raise OutOfTime("now")
        time.sleep(0.02)

    with pytest.raises(OutOfTime):
        all_of(work, equality.asked, 2)
    assert len(begun) < len(equality.asked)


# ---- what is asked ----


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_compared_prompts(profile):
    asked = profile.compared(1)
    lengths = sorted(len(request.tokens) for request in asked)
    page = profile.page_size
    assert len(asked) == len({request.name for request in asked}) == profile.prompts
    assert {1, page - 1, page, page + 1, profile.chunk, profile.chunk + 1, profile.longest} <= set(lengths)
    assert asked == profile.compared(1) != profile.compared(2)
    begun: dict[tuple[int, ...], int] = {}
    for request in asked:
        if len(request.tokens) >= page:
            begun[request.tokens[:page]] = begun.get(request.tokens[:page], 0) + 1
    sharing = sum(count - 1 for count in begun.values())
    assert profile.prompts // 3 <= sharing <= profile.prompts // 3 + 1


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_pools_hold_what_is_asked(profile):
    host = profile.host_tokens or (24 << 30) // profile.token_bytes
    context = profile.shape["max_position_embeddings"]
    assert profile.resident_tokens < profile.beyond < host and profile.beyond < context
    assert all(profile.fits(1, tokens + profile.new, host) for tokens in profile.contexts)
    assert max(profile.contexts) + profile.new < context
    assert all(profile.fits(count, profile.batch_context + profile.new, host) for count in profile.batches)
    assert profile.fits(4, profile.batch_context + profile.new, profile.resident_tokens)
    # What clients have in flight, while a prompt's first answer is to be a hit.
    longest = max(profile.chunk + 1, profile.longest) + profile.decoded
    assert longest * min(2, profile.clients) <= profile.resident_tokens


def test_the_size_of_weights():
    assert gpu_profile(True).weight_bytes == 2 * 8_030_261_248, "as the model's card says"


def test_flags_of_servers(campaign, tmp_path):
    arguments = parse(
        tmp_path, "--server-flag", "host=--log-level debug", "--tardis-config", '{"attention_host": "1GiB"}'
    )
    own = Campaign(arguments)
    servers = {name: AttentionServer(own, own.profile, KINDS[name], 1) for name in KINDS}
    flags = {name: " ".join(server.flags) for name, server in servers.items()}
    assert flags["host"].endswith("--attention-backend tardis --chunked-prefill-size 512 --log-level debug")
    assert "--max-total-tokens 7168" in flags["host"] and "--max-total-tokens 3072" in flags[REFERENCE]
    assert "tardis" not in flags[REFERENCE] and "debug" not in flags[REFERENCE]
    assert flags["hicache"] == f"{flags[REFERENCE]} --enable-hierarchical-cache"
    assert servers["host"].server.spec.environment["TARDIS_CONFIG"] == '{"attention_host": "1GiB"}'


def test_attention_host_decides_on_a_gpu(tmp_path):
    words = ["--out", str(tmp_path), "--tardis-config", '{"attention_host_check": false}']
    campaign = Campaign(attention_serving.parse(words))
    host, resident = (
        AttentionServer(campaign, campaign.profile, KINDS[name], 1).server.spec for name in ("host", REFERENCE)
    )
    assert json.loads(host.environment["TARDIS_CONFIG"]) == {"attention_host": "24GiB", "attention_host_check": False}
    assert "--max-total-tokens" not in host.command()
    command = resident.command()
    assert command[command.index("--max-total-tokens") + 1] == "65536" and "fa3" in command


# ---- the command line ----


def test_servers_run_in_one_order(tmp_path):
    assert parse(tmp_path).servers == ["host", REFERENCE]
    assert parse(tmp_path, "--servers", "resident,hicache,host").servers == ["host", "hicache", REFERENCE]
    assert parse(tmp_path, "--cases", "rate,equal").cases == ["equality", "rate"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--servers", "host,other"], "'other' is not one of host, hicache, resident"),
        (["--cases", "batches"], "'batches' is part of none of memory"),
        (["--server-flag", "log-level=debug"], "expected SERVER=FLAGS"),
    ],
)
def test_wrong_words(tmp_path, capsys, words, said):
    with pytest.raises(SystemExit):
        parse(tmp_path, *words)
    assert said in capsys.readouterr().err


# ---- time ----


def running(tmp_path, monkeypatch, deadline: float):
    campaign = Campaign(parse(tmp_path, "--deadline", str(deadline)))
    server = AttentionServer(campaign, campaign.profile, KINDS["host"], 1)
    server.pool = 7168
    monkeypatch.setattr(server.server, "alive", lambda: True)
    return campaign, server, Cases(server), Run(campaign)


def test_a_case_that_may_not_end_is_skipped(tmp_path, monkeypatch):
    campaign, server, cases, run = running(tmp_path, monkeypatch, attention_serving.STOPPING + 5)
    called = []
    monkeypatch.setattr(
        cases,
        "plan",
        lambda: {"rate": (60.0, lambda: called.append("rate")), "memory": (1.0, lambda: called.append("memory"))},
    )
    run.case("rate", server, cases)
    run.case("memory", server, cases)
    assert called == ["memory"] and not campaign.failures
    (skipped,) = json.loads(campaign.report.file.read_text())["skipped"]
    assert skipped.startswith("host: rate: ") and "of the 60 it may take" in skipped
    assert list(campaign.report.extra["case_seconds"]) == ["host: memory"]


def test_a_deadline_within_a_case_keeps_its_rows(tmp_path, monkeypatch):
    campaign, server, cases, run = running(tmp_path, monkeypatch, attention_serving.STOPPING + 30)

    def call():
        cases.add("context: recompute, TTFT", 256, 1.0, "ms")
        raise OutOfTime("recompute")

    monkeypatch.setattr(cases, "plan", lambda: {"context": (1.0, call)})
    run.case("context", server, cases)
    kept = json.loads(campaign.report.file.read_text())
    assert kept["rows"] and kept["skipped"] == ["host: context: out of time: recompute"] and not kept["failures"]


def test_all_cases_are_planned_in_their_order(tmp_path, monkeypatch):
    campaign, _, cases, _ = running(tmp_path, monkeypatch, 100)
    assert list(cases.plan()) == campaign.arguments.cases == list(CASES)


def test_no_request_is_sent_when_servers_should_stop(tmp_path, monkeypatch):
    _, server, _, _ = running(tmp_path, monkeypatch, attention_serving.STOPPING - 1)
    with pytest.raises(OutOfTime):
        server.ask([1, 2], 1)
    with pytest.raises(OutOfTime):
        server.time(server.profile.request(1, "x", 8), 0, "x")


# ---- what follows ----


def row(rows, case, system, size, value, **extra):
    rows[case, system, str(size)] = {"value": value, **extra}


GIB = 2**30


def test_hbm_of_a_pool_in_host_memory():
    rows: dict = {}
    row(rows, "KV in HBM", "host", "GiB", 0, bytes=0)
    row(rows, "HBM", "host", "serving", 18, bytes=18 * GIB, weights=15 * GIB)
    row(rows, "HBM", REFERENCE, "serving", 26, bytes=26 * GIB, weights=15 * GIB)
    assert [check.held for check in checks(rows, 8 * GIB, 24 * GIB)] == [True, True]
    row(rows, "HBM", "host", "serving", 42, bytes=42 * GIB, weights=15 * GIB)
    row(rows, "KV in HBM", "host", "GiB", 1, bytes=GIB)
    assert [check.held for check in checks(rows, 8 * GIB, 24 * GIB)] == [False, False]


@pytest.mark.parametrize(("used", "held"), [(44, True), (68, False)])
def test_hbm_of_all_servers(used, held):
    rows: dict = {}
    row(rows, "HBM", "all servers", "serving", used, bytes=used * GIB, weights=15 * GIB, servers=["host", REFERENCE])
    (check,) = checks(rows, 8 * GIB, 24 * GIB)
    assert check.held is held


def test_what_was_answered_and_read():
    rows: dict = {}
    row(rows, "beyond", "host", 4608, 0)
    row(rows, "beyond", REFERENCE, 4608, 0)
    row(rows, "equality, decoded", "host", 192, 0.3, differs=2)
    row(rows, "equality, decoded", REFERENCE, 192, 0.3, differs=0)
    for size, ratio in ((32_768, 0.9), (1024, 0.2), (8192, 0.6)):
        row(rows, "context: KV", "host", size, 1, ratio=ratio)
    found = {check.name: check.held for check in checks(rows, 1, 1)}
    assert found == {
        "must: 4608 tokens, host": False,
        f"must: 4608 tokens, {REFERENCE}": True,
        "equality, decoded, host: differing of 192": False,
        "KV of a step over 32768 tokens, of the link": True,
    }


def test_a_broken_rule_is_a_failure(campaign):
    campaign.report.add("beyond", "host", 4608, 0, "ok")
    attention_serving.conclude(campaign)
    assert campaign.failures == ["MISS must: 4608 tokens, host: 0.000 >= 1.000 answered"]


def test_times_while_all_are_decoded():
    early = Outcome("a", 1, sent=0.0, ttft=1.0, latency=5.0, stamps=(1.0, 2.0, 3.0, 4.0, 5.0))
    late = Outcome("b", 1, sent=0.5, ttft=2.0, latency=4.0, stamps=(2.0, 3.5, 4.0))
    assert together_gaps([early, late]) == [1.0, 1.5, 0.5]
