# SPDX-License-Identifier: Apache-2.0
"""bench/serving.py: its workloads, its verdicts, its files; and one workload on a real server."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import serving
import serving_results as results
from serving_profile import cpu_profile, gpu_profile, reload, resize
from serving_session import too_long
from serving_tables import markdown
from serving_workloads import (
    WORKLOADS,
    HitRate,
    LvEval,
    Misses,
    MultiTurn,
    Request,
    Setting,
    Trace,
    WorkingSet,
    due_times,
    full_hit,
    read_trace,
    shared_tokens,
    synthetic_trace,
)

BENCH = Path(serving.__file__).resolve().parent
SETTING = Setting(page_size=16, vocabulary=1024, dram_tokens=7168)
SMALL = cpu_profile(quick=True)


def common_prefix(left, right):
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


# ---- workloads ----


@pytest.mark.parametrize("letter", "abcdef")
def test_workloads_follow_from_the_seed_alone(letter):
    workload = SMALL.workloads[letter]
    load = SMALL.loads[letter][0]
    plan = workload.plan(SETTING, load)
    assert plan == workload.plan(SETTING, load)
    other = workload.plan(dataclasses.replace(SETTING, seed=2), load)
    assert [r.tokens for r in plan.measure] != [r.tokens for r in other.measure]
    assert len({request.name for request in plan.measure}) == len(plan.measure)
    assert all(16 <= token < 1024 for request in plan.measure for token in request.tokens[:200])


def test_workloads_are_the_same_in_another_process():
    """Nothing may depend on Python's per-process string hashes."""
    code = (
        "import hashlib, serving_workloads as w; s = w.Setting(16, 1024, 7168);"
        "p = [workload.plan(s, 'seq') for workload in (w.MultiTurn(), w.Trace(requests=20))];"
        "print(hashlib.sha256(repr(p).encode()).hexdigest())"
    )
    environments = [{**os.environ, "PYTHONPATH": str(BENCH), "PYTHONHASHSEED": seed} for seed in ("1", "2")]
    printed = {subprocess.check_output([sys.executable, "-c", code], env=env, timeout=60) for env in environments}
    assert len(printed) == 1


def test_lveval_has_the_lengths_that_were_asked_for():
    plan = LvEval().plan(Setting(64, 128_256, 366_210), "seq")
    lengths = [len(request.tokens) for request in plan.measure]
    assert len(lengths) == 8 and min(lengths) >= 46_000 and max(lengths) <= 56_000 and len(set(lengths)) == 8
    first, *others = plan.measure
    assert all(common_prefix(first.tokens, other.tokens) == 10_428 for other in others)
    assert [request.expect for request in plan.measure] == [(length - 1) // 64 * 64 for length in lengths]
    assert plan.prepare == plan.measure and plan.reset and plan.reference


def test_multi_turn_prompts_grow_by_a_round():
    plan = MultiTurn().plan(SETTING, "waves")
    assert len(plan.measure) == 60 and {request.wave for request in plan.measure} == set(range(10))
    by_name = {request.name: request for request in plan.measure}
    for client in range(6):
        for number in range(1, 10):
            before, now = by_name[f"c{client}r{number - 1}"].tokens, by_name[f"c{client}r{number}"].tokens
            assert len(now) == len(before) + 4096 and now[: len(before)] == before
    assert all(request.new_tokens == 1 for request in plan.measure)
    assert common_prefix(by_name["c0r0"].tokens, by_name["c1r0"].tokens) < 16


@pytest.mark.parametrize("page", [16, 64])
def test_hit_rates_are_exact(page):
    length = 100 * page * 2
    plan = HitRate(documents=3, length=length).plan(Setting(page, 1024, 7168), "seq")
    documents = {request.name: request.tokens for request in plan.prepare}
    found = {}
    seen = []
    for request in plan.measure:
        percent, document = (int(part) for part in request.name[1:].split("d"))
        stored = common_prefix(documents[f"d{document}"], request.tokens) // page * page
        assert stored * 100 == percent * length and request.expect == stored and len(request.tokens) == length
        assert all(common_prefix(request.tokens, earlier) // page * page <= stored for earlier in seen)
        seen.append(request.tokens)
        found.setdefault(percent, []).append(document)
    assert list(found) == [99, 95, 90, 75, 50]  # highest first: what is needed later was used just now
    assert all(numbers == [0, 1, 2] for numbers in found.values())


def test_a_length_that_cannot_give_exact_shares_is_refused():
    with pytest.raises(ValueError, match=r"length is 1600, expected a multiple of 100 pages \(6400 tokens\)"):
        HitRate(length=1600).plan(Setting(64, 1024, 7168), "seq")


def test_the_working_set_is_four_times_the_dram():
    plan = WorkingSet(length=1280, rounds=2).plan(SETTING, "seq")
    stored = sum(len(request.tokens) for request in plan.prepare)
    assert 4 * SETTING.dram_tokens <= stored < 4 * SETTING.dram_tokens + 1280
    rounds = [[r.tokens for r in plan.measure if r.name.endswith(f"r{number}")] for number in (0, 1)]
    assert sorted(rounds[0]) == sorted(rounds[1]) == sorted(r.tokens for r in plan.prepare)
    assert rounds[0] != rounds[1] and not plan.reset


def test_misses_share_nothing():
    plan = Misses(stored=2, prompts=8, length=256).plan(SETTING, "seq")
    assert shared_tokens((*plan.prepare, *plan.measure), 16) == 0
    assert [request.expect for request in plan.measure] == [0] * 8


def test_trace_blocks_and_lengths(tmp_path):
    records = [
        {"timestamp": 0, "input_length": 1500, "output_length": 500, "hash_ids": [0, 1, 2]},
        {"timestamp": 500, "input_length": 2100, "output_length": 8, "hash_ids": [0, 1, 2, 3, 4]},
        {"timestamp": 900, "input_length": 600, "output_length": 40, "hash_ids": [0, 9]},
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, records)) + "\n\n", encoding="utf-8")
    plan = Trace(file=str(file)).plan(SETTING, "trace")
    assert [len(request.tokens) for request in plan.measure] == [93, 131, 37]
    assert [request.new_tokens for request in plan.measure] == [31, 1, 2]
    assert [request.arrival for request in plan.measure] == [0.0, 0.5, 0.9]
    first, second, third = (request.tokens for request in plan.measure)
    assert common_prefix(first, second) == 93 and common_prefix(first, third) == 32  # a block is 512 / 16 tokens
    assert len(Trace(file=str(file), requests=2).plan(SETTING, "trace").measure) == 2


@pytest.mark.parametrize(("line", "found"), [("{", "line 1"), ('{"timestamp": 1}', "input_length"), ("", "no record")])
def test_a_bad_trace_is_named(tmp_path, line, found):
    file = tmp_path / "trace.jsonl"
    file.write_text(line, encoding="utf-8")
    with pytest.raises(ValueError, match=found):
        read_trace(file, 10)


def test_the_drawn_trace_looks_like_one():
    records = synthetic_trace(300, seed=1)
    assert records == synthetic_trace(300, seed=1) != synthetic_trace(300, seed=2)
    assert all(len(r["hash_ids"]) == math.ceil(r["input_length"] / 512) for r in records)
    assert all(r["hash_ids"][0] == 0 for r in records)
    assert records == sorted(records, key=lambda record: record["timestamp"])
    assert 60 < records[-1]["timestamp"] / 1000 < 160  # 3 a second


# ---- arrivals ----


def requests_of(count, arrivals=None):
    return [Request(str(i), (16,), arrival=None if arrivals is None else arrivals[i]) for i in range(count)]


def test_rates_differ_by_a_factor_only():
    one, four = (due_times(requests_of(200), rate, seed=1) for rate in ("1", "4"))
    assert one[0] == 0 and one == sorted(one)
    assert one == pytest.approx([4 * time for time in four])
    assert one[-1] == pytest.approx(199) and due_times(requests_of(1), "1", seed=1) == [0]
    gaps = [later - sooner for sooner, later in itertools.pairwise(one)]
    assert min(gaps) < 0.05 and max(gaps) > 3  # random, not regular
    assert one == due_times(requests_of(200), "1", seed=1) != due_times(requests_of(200), "1", seed=2)
    assert due_times(requests_of(3), "inf", seed=1) == [0, 0, 0]


def test_a_recorded_pattern_is_kept_at_any_rate():
    requests = requests_of(5, [10.0, 10.0, 11.0, 14.0, 20.0])
    assert due_times(requests, "trace", 1) == [0, 0, 1, 4, 10]
    assert due_times(requests, "5", 1) == pytest.approx([0, 0, 0.1, 0.4, 1.0])
    with pytest.raises(ValueError, match="recorded arrivals"):
        due_times(requests_of(2), "trace", 1)
    with pytest.raises(ValueError, match="more than 0"):
        due_times(requests, "0", 1)


def test_shared_tokens_counts_what_an_endless_cache_hits():
    a, b = tuple(range(16, 80)), tuple(range(100, 164))
    asked = [Request("1", a), Request("2", a + b), Request("3", a + b), Request("4", b)]
    assert shared_tokens(asked, 16) == 64 + full_hit(128, 16)


# ---- settings ----


def test_every_default_load_fits_its_workload_and_pool():
    for make in (cpu_profile, gpu_profile):
        for quick in (True, False):
            chosen = make(quick)
            assert set(chosen.workloads) == set(chosen.loads) == set(chosen.pools) == set("abcdef")
            spelled = [f"{letter}:{','.join(loads)}" for letter, loads in chosen.loads.items()]
            assert reload(chosen.loads, chosen.workloads, spelled) == chosen.loads
            used = [(chosen.workloads[letter], chosen.setting(letter, 1)) for letter in "abcdef"]
            assert too_long(used, chosen) is None
            assert "raise --device-tokens" in too_long([(WorkingSet(length=65_537), used[4][1])], chosen)


def stored_tokens(requests, page):
    """Tokens of the different pages of some prompts."""
    seen = set()
    for request in requests:
        chain = 0
        for begin in range(0, len(request.tokens) - page + 1, page):
            chain = hash((chain, request.tokens[begin : begin + page]))
            seen.add(chain)
    return len(seen) * page


@pytest.mark.parametrize("make", [cpu_profile, gpu_profile])
def test_pools_hold_what_they_must_and_no_more(make):
    """a, d: all in DRAM, not on the device; b: more than DRAM holds. (e is sized by DRAM.)"""
    chosen = make(False)
    for letter in "abd":
        plan, pools = chosen.workloads[letter].plan(chosen.setting(letter, 1), "seq"), chosen.pools[letter]
        stored = stored_tokens((*plan.prepare, *plan.measure), chosen.page_size)
        if letter == "b":
            assert stored > pools.dram_tokens
            continue
        assert stored > pools.device_tokens
        if letter == "a":
            assert stored < pools.dram_tokens
            continue
        assert stored_tokens(plan.prepare, chosen.page_size) < 0.8 * pools.dram_tokens
        # Between two uses of a document the others take more room than the device has.
        assert sum(len(request.tokens) for request in plan.measure[1 : len(plan.prepare)]) > pools.device_tokens


def test_sizes_and_loads_of_the_command_line():
    workloads = resize(SMALL.workloads, ["a.prompts=3", "d.percents=[50, 99]", "e.times=2", "c.file=x"])
    assert workloads["a"].prompts == 3 and workloads["d"].percents == (50, 99) and workloads["e"].times == 2
    assert workloads["c"].file == "x" and workloads["b"] == SMALL.workloads["b"]
    for text in ("a.prompt=3", "g.prompts=3", "a.prompts", "a.prompts=many"):
        with pytest.raises(ValueError, match="--set"):
            resize(SMALL.workloads, [text])
    loads = reload(SMALL.loads, SMALL.workloads, ["a:seq,0.5,inf"])
    assert loads["a"] == ("seq", "0.5", "inf") and loads["b"] == ("waves",)
    for text in ("a:waves", "b:2", "d:1", "a:-1", "a:fast", "a:rate", "x:seq", "a"):
        with pytest.raises(ValueError, match="--loads"):
            reload(SMALL.loads, SMALL.workloads, [text])


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--attention-backend", "triton", "--l3-dir", "x"], "FlashAttention-class"),
        (["--tiers", "ssd", "--l3-dir", "x"], "not one of recompute, dram"),
        (["--l3-dir", "x", "--resume"], "need --json"),
        ([], "--l3-dir is required"),
        (["--l3-dir", "x", "--trace", "absent.jsonl"], "absent.jsonl"),
    ],
)
def test_the_command_line_is_checked(words, found, capsys):
    with pytest.raises(SystemExit):
        serving.parse(words)
    assert found in capsys.readouterr().err


# ---- results ----


def case(workload="a", load="seq", tier="tardis", requests=None, **changes):
    kind = next(kind for kind in WORKLOADS if kind.letter == workload)
    rows = requests or [
        {
            "name": f"p{i}" if workload != "d" else f"h{(50, 99)[i % 2]}d{i // 2}",
            "prompt_tokens": 1000,
            "sent_ms": i * 100.0,
            "late_ms": 0.1,
            "ttft_ms": 10.0 + i,
            "latency_ms": 12.0 + i,
            "device": 0,
            "host": 0,
            "storage": 0 if tier == "recompute" else 992,
            "expect": 0 if tier == "recompute" else 992,
            "ids": "5 6",
            "top": "aa",
            "reference": {"device": 992, "ids": [5], "top": "aa"},
        }
        for i in range(4)
    ]
    return {
        "workload": workload,
        "title": kind.title,
        "load": load,
        "tier": tier,
        "offered": None if load in ("seq", "waves", "inf") else float(load),
        "settings": {"prompts": 4},
        "setup": SMALL.setup(workload),
        "dram_holds_all": kind.dram_holds_all,
        "token_bytes": 2048,
        "note": "",
        "prepared": {"requests": 4, "seconds": 1.0},
        "spec": "s",
        "run": 0,
        "wall_s": 1.0,
        "busy_s": 0.5,
        "requests": rows,
        "counters": {"stored_tokens": 1000.0},
        "folder_bytes": 0,
        "hittable_tokens": 0,
        "done": True,
        **changes,
    }


def cases_of(*made):
    return {results.key(c["workload"], c["load"], c["tier"]): c for c in made}


def test_percentiles_are_numpys():
    values = [3.0, 1.0, 4.0, 1.5, 9.0, 2.6, 5.0]
    for percent in (0, 1, 50, 99, 100):
        assert results.percentile(values, percent) == pytest.approx(numpy.percentile(values, percent))
    assert math.isnan(results.percentile([], 50))


def test_summary_counts_tokens_and_leaves_failed_requests_out():
    measured = case()
    measured["requests"][3] |= {"error": "broke off", "ttft_ms": 1e6}
    numbers = results.summary(measured)
    assert numbers["errors"] == 1 and numbers["mean_ttft_ms"] == 11.0 and numbers["request_throughput"] == 6.0
    assert numbers["storage"] == 3 * 992 and numbers["computed"] == 3 * 8
    assert any("1 of 4 requests failed: broke off" in text for text in results.failures(cases_of(measured)))


def test_what_holds_is_no_failure():
    assert results.failures(cases_of(case(tier="recompute"), case(tier="dram"), case(), case(load="4"))) == []


@pytest.mark.parametrize(
    ("tier", "change", "found"),
    [
        ("recompute", {"device": 64}, "must not"),
        ("tardis", {"storage": 976}, "cached tokens expected"),
        ("tardis", {"ids": "7 6", "reference": {"device": 992, "ids": [5], "top": "aa"}}, "device hit"),
        ("file", {"top": "bb", "reference": None}, "HiCache-DRAM's"),
    ],
)
def test_what_does_not_hold_is_named(tier, change, found):
    measured = case(tier=tier)
    measured["requests"][1] |= change
    wrong = results.failures(cases_of(case(tier="dram"), measured))
    assert wrong and found in " ".join(wrong) and all(text.startswith(f"a/seq/{tier}") for text in wrong)


def test_an_incomplete_preparation_is_a_failure():
    prepared = {"requests": 4, "seconds": 1.0, "new_tokens": 4000, "stored_tokens": 4000.0}
    assert results.failures(cases_of(case("e", "2", prepared=prepared))) == []
    prepared = {**prepared, "stored_tokens": 3000.0}
    wrong = results.failures(cases_of(case("e", "2", prepared=prepared)))
    assert wrong == ["e/2/tardis: 3000 of 4000 tokens were stored beforehand"]


def test_answers_on_other_hits_are_not_compared():
    """A partial hit computes more rows than a device hit of the whole prompt: last bits may differ."""
    measured = case()
    for request in measured["requests"]:
        request |= {"storage": 496, "expect": 496, "top": "bb"}
    assert results.reference_equal(measured) == (0, 0)
    assert results.tiers_equal(measured, case(tier="dram")) == (0, 0)
    assert results.failures(cases_of(case(tier="dram"), measured)) == []


def test_under_load_nothing_is_required_of_hits_but_of_recompute():
    loose = case(load="4")
    loose["requests"][0] |= {"storage": 0, "ids": "1"}
    assert results.failures(cases_of(loose)) == []
    wrong = case(load="4", tier="recompute")
    wrong["requests"][0]["host"] = 16
    assert "must not" in results.failures(cases_of(wrong))[0]


def test_rows_have_the_common_form_and_the_dram_tier_as_limit():
    slow = case()
    for request in slow["requests"]:
        request["ttft_ms"] *= 2
    made = results.rows(cases_of(case(tier="dram"), slow, case("e", "2")))
    assert all({"case", "system", "size", "value", "unit", "limit", "ratio"} <= set(row) for row in made)
    found = {(row["case"], row["system"]): row for row in made}
    row = found["a LV-Eval-like, one at a time: mean_ttft_ms", "tardis"]
    assert row["value"] == 23.0 and row["limit"] == 11.5 and row["ratio"] == 0.5
    assert found["a LV-Eval-like, one at a time: mean_ttft_ms", "dram"]["limit"] is None
    hits = found["a LV-Eval-like, one at a time: hit tokens", "tardis"]
    assert hits["storage"] == 4 * 992 and hits["restored_bytes"] == 4 * 992 * 2048 and hits["state_ok"] == "4/4"
    assert hits["stored_bytes"] == 1000 * 2048 and hits["first_token_and_top20_equal_device_hit"] == "4/4"


# ---- resume, page, plots ----


def run_in(folder, *words):
    arguments, chosen = serving.parse(
        [
            *("--device", "cpu", "--quick", "--l3-dir", str(folder / "l3"), "--out", str(folder / "out")),
            *("--json", str(folder / "s.json"), *words),
        ]
    )
    return serving.Run(arguments, chosen)


def test_resume_keeps_complete_cases_of_the_same_settings(tmp_path):
    first = run_in(tmp_path, "--workloads", "a,f")
    assert first.missing("a", "tardis") == ["seq", "4"] and [letters for _, letters in first.servers()] == [["a", "f"]]
    spec = first.spec(first.profile.workloads["a"], "seq")
    first.cases |= cases_of(
        case(spec=spec), case(load="4", spec=first.spec(first.profile.workloads["a"], "4"), done=False)
    )
    first.save()

    again = run_in(tmp_path, "--workloads", "a,f", "--resume")
    assert again.missing("a", "tardis") == ["4"]  # one is done, the other had failed requests
    assert again.missing("a", "file") == ["seq", "4"]
    assert [run["command"] for run in again.runs] == [first.report.command, again.report.command]
    kept = (tmp_path / "s.json").read_bytes()
    for other in (("--seed", "2"), ("--set", "a.prompts=3"), ("--device-tokens", "3000"), ("--server-flag=--x",)):
        with pytest.raises(ValueError, match=r"2 cases in .* were made with other settings"):
            run_in(tmp_path, "--workloads", "a", "--resume", *other)
    assert (tmp_path / "s.json").read_bytes() == kept
    # Other workloads and other loads may be added.
    assert run_in(tmp_path, "--workloads", "f", "--resume", "--seed", "2").missing("f", "dram") == ["seq"]
    assert run_in(tmp_path, "--workloads", "a", "--resume", "--loads", "a:seq,8").missing("a", "tardis") == ["8"]
    assert json.loads((tmp_path / "s.json").read_text("utf-8"))["cases"].keys() == again.cases.keys()
    assert run_in(tmp_path, "--workloads", "a").missing("a", "tardis") == ["seq", "4"]  # without --resume: anew


def test_the_result_file_is_never_half_written(tmp_path, monkeypatch):
    run = run_in(tmp_path, "--workloads", "a")
    run.cases |= cases_of(case())
    run.save()
    before = (tmp_path / "s.json").read_bytes()
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("killed before the rename")))
    run.cases |= cases_of(case(tier="dram"))
    with pytest.raises(OSError, match="killed"):
        run.save()
    assert (tmp_path / "s.json").read_bytes() == before


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"cases": []}'])
def test_resume_refuses_what_is_no_result_file(tmp_path, content):
    (tmp_path / "s.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"expected a result file of serving\.py"):
        run_in(tmp_path, "--resume")
    assert (tmp_path / "s.json").read_text("utf-8") == content


def content_of(made):
    run = {
        "machine": {"gpu": None, "cores": 2, "packages": {"sglang": "0.5.23"}},
        "command": "serving.py",
        "servers": [["--x"]],
    }
    return {"cases": made, "runs": [run], "skipped": ["e: out of time"], "labels": ["Random weights."]}


def test_page(tmp_path):
    made = cases_of(
        *(case(tier=tier) for tier in results.TIERS),
        *(case(tier=tier, load="4") for tier in ("dram", "tardis")),
        *(case("d", tier=tier) for tier in ("dram", "tardis")),
    )
    made["a/4/tardis"]["requests"][0]["error"] = "timed out"
    made["d/seq/dram"]["hittable_tokens"] = 1000
    page = markdown(content_of(made), ["ttft_cdf_a.png"])
    lines = page.splitlines()
    assert "| one at a time | tardis | 4 | 11.5 | 11.5 | 13.0 | 8.000 | 0.0% | 0.0% | 99.2% | 0.8% |" in page
    assert "| 4/4 | 4/4 | 4/4 |" in next(line for line in lines if line.startswith("| one at a time | tardis"))
    assert "| 4 req/s | tardis | 4 (1 failed) |" in page
    assert "| TTFT p50, ms | 50 % | 99 % |" in page and "| tardis | 11.0 | 12.0 |" in page
    assert "An endless cache would hit 25.0% of the prompt tokens." in page
    assert "- FAILED: a/4/tardis: 1 of 4 requests failed: timed out" in page
    assert "- skipped: e: out of time" in page and "sglang 0.5.23" in page and "![ttft_cdf_a.png]" in page
    tables = [line for line in lines if line.startswith("|")]
    assert all(line.endswith("|") for line in tables)


def test_render_writes_page_and_plots(tmp_path, capsys):
    made = cases_of(*(case(tier=tier, load=load) for tier in results.TIERS for load in ("seq", "2", "4")))
    serving.render(None, content_of(made), tmp_path)
    assert (tmp_path / "serving.md").read_text("utf-8").startswith("# Serving by tier")
    printed = capsys.readouterr().out
    if importlib.util.find_spec("matplotlib") is None:
        assert "no plots: matplotlib is not installed" in printed
        assert not list(tmp_path.glob("*.png"))
        return
    for name in ("ttft_cdf_a", "throughput_a", "hits_by_tier"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (tmp_path / f"{name}.svg").read_text("utf-8")
        assert f"![{name}.png]" in (tmp_path / "serving.md").read_text("utf-8")


# ---- client: what a real server rarely does ----


# ---- the real thing ----


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_tiers_on_a_real_server(tmp_path):
    """One start of SGLang: exact hit rates from DRAM and from tardis, answers equal; then nothing is left to resume."""
    for name in ("sglang", "sglang-tardis", "tardis-cpu-support"):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"not installed: {name} (`make test` installs it)")
    command = [
        *(sys.executable, str(BENCH / "serving.py"), "--device", "cpu", "--quick", "--workloads", "d"),
        *("--tiers", "dram,tardis", "--set", "d.percents=[50, 99]", "--l3-dir", str(tmp_path / "l3")),
        *("--out", str(tmp_path / "out"), "--json", str(tmp_path / "s.json"), "--port", "31677"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=570)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    content = json.loads((tmp_path / "s.json").read_text("utf-8"))
    assert content["failures"] == [] and set(content["cases"]) == {"d/seq/dram", "d/seq/tardis"}
    measured = {tier: content["cases"][f"d/seq/{tier}"] for tier in ("dram", "tardis")}
    for percent in (50, 99):
        hits = {
            tier: [r for r in measured[tier]["requests"] if r["name"].startswith(f"h{percent}d")] for tier in measured
        }
        assert [request["host"] for request in hits["dram"]] == [16 * percent] * 3
        assert [request["storage"] for request in hits["tardis"]] == [16 * percent] * 3
    assert results.tiers_equal(measured["tardis"], measured["dram"]) == (6, 6)
    assert measured["tardis"]["counters"]["stored_tokens"] > 0
    assert "| one at a time | tardis | 6 |" in (tmp_path / "out" / "serving.md").read_text("utf-8")

    again = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=100)
    assert again.returncode == 0 and "is starting" not in again.stdout, again.stdout[-2000:]
