# SPDX-License-Identifier: Apache-2.0
"""bench/direct.py: what it asks fits its servers, and what follows from its rows. No server is started."""

from __future__ import annotations

import dataclasses
import json
import shutil
from types import SimpleNamespace

import direct
import pytest
from direct_campaign import Campaign
from direct_cases import CONTROL, DOCUMENT, Cases
from direct_checks import checks, crossover
from direct_disk import DiskCase
from direct_profile import KINDS, cpu_profile, gpu_profile
from direct_server import DirectServer, WrongState
from direct_shared import order
from serving_client import Outcome
from sglang_tardis.config import load_config, parse_size

PROFILES = [gpu_profile(False), gpu_profile(True), cpu_profile(False), cpu_profile(True)]


@pytest.fixture
def campaign(tmp_path):
    words = ["--device", "cpu", "--l3-dir", str(tmp_path / "l3"), "--out", str(tmp_path), "--disk-dir", str(tmp_path)]
    return Campaign(direct.parse([*words, "--json", str(tmp_path / "direct.json")]))


@pytest.mark.parametrize("profile", PROFILES, ids=["gpu", "gpu quick", "cpu", "cpu quick"])
def test_pools_hold_what_is_asked(profile):
    page, large, small = profile.page_size, profile.large, profile.small
    longest, new = profile.prefixes[-1], profile.new
    assert all(length % page == 0 for length in (*profile.sizes, *profile.prefixes, new, profile.filler))
    assert profile.sizes[-1] < longest, "the longest prompt is the beginning of the document"
    assert longest + 2 * new + 2 * page <= large.device, "a share on the device, asked with other new tokens"
    assert profile.lengths(KINDS["direct"]) == profile.sizes
    assert profile.lengths(KINDS["restart"]) == profile.sizes[:-1]

    shared = profile.shared_prompts(KINDS["direct"], 1)
    lengths = [len(request.tokens) for request in shared[: profile.fillers]]
    context = sum(lengths) - (len(lengths) - 1) * profile.shared.shared
    assert context - max(lengths) > large.device - longest, "others push out what was asked"
    prompts = sum(profile.sizes[:-1]) + longest + profile.sizes[0]
    assert context + prompts <= large.dram, "the DRAM tier keeps all that is asked again"
    assert 2 * profile.filler > small.device
    assert 2 * profile.filler + sum(profile.sizes[:-1]) <= small.dram

    asked = profile.working_set.plan(profile.setting(KINDS["restart"], 1), "seq")
    tokens = sum(len(request.tokens) for request in asked.prepare)
    assert tokens >= 4 * small.dram
    assert tokens * profile.token_bytes * 1.05 <= parse_size(profile.capacity), "the store keeps the working set"


@pytest.mark.parametrize("profile", PROFILES, ids=["gpu", "gpu quick", "cpu", "cpu quick"])
def test_as_many_prompts_over_one_context_as_fit(profile):
    shared = profile.shared_prompts(KINDS["direct"], 1)
    assert len(shared) >= 6 and shared == profile.shared_prompts(KINDS["hicache-direct"], 1)
    context = shared[0].tokens[: profile.shared.shared]
    assert all(request.tokens[: len(context)] == context for request in shared)
    tokens = sum(len(request.tokens) - len(context) for request in shared) + len(context)
    assert tokens < profile.large.dram
    kept = sum(profile.lengths(KINDS["restart"])) + profile.sizes[0]
    assert (tokens + kept) * profile.token_bytes * 1.05 <= parse_size(profile.capacity)
    half = dataclasses.replace(profile, capacity=str((tokens // 2 + kept) * profile.token_bytes))
    assert 0 < len(half.shared_prompts(KINDS["direct"], 1)) < len(shared), "of a smaller store, fewer"


def test_a_prompt_is_not_asked_again_soon():
    asked = order(6, 100, 4, seed=1)
    assert set(asked) == set(range(6)) and asked == order(6, 100, 4, seed=1) != order(6, 100, 4, seed=2)
    assert all(len(set(asked[begin : begin + 5])) == 5 for begin in range(96))
    with pytest.raises(ValueError, match="more than as many prompts, found 4"):
        order(4, 100, 4, seed=1)


def test_a_prompt_is_the_same_everywhere_and_grows_at_its_end(campaign):
    one, other = (DirectServer(campaign, KINDS[name]) for name in ("direct", "hicache"))
    assert one.request(DOCUMENT, 2304).tokens[:2048] == other.request(DOCUMENT, 2048).tokens
    assert one.request(CONTROL, 512).tokens != one.request(DOCUMENT, 512).tokens
    behind = one.behind(one.request(DOCUMENT, 2304).tokens[:256], "new/1", 256).tokens
    assert len(behind) == 512 and behind[:256] == other.request(DOCUMENT, 256).tokens


@pytest.mark.parametrize("name", KINDS)
def test_the_flags_of_a_server(campaign, name):
    kind, server = KINDS[name], DirectServer(campaign, KINDS[name])
    flags = server.flags
    assert ("--hicache-storage-backend" in flags) == (kind.storage is not None)
    assert ("--enable-hierarchical-cache" in flags) != ("--enable-lmcache" in flags)
    fresh = {k.name for k in KINDS.values() if k.fresh}
    if kind.backend is not None:
        assert kind.fresh or campaign.store(kind) in {campaign.store(KINDS[n]) for n in fresh}
    if kind.door is not None:
        extra = json.loads(flags[flags.index("--hicache-storage-backend-extra-config") + 1])
        assert extra.pop("mode", "host") == kind.door
        assert load_config(extra).folder == str(campaign.store(kind))
        assert (extra.get("direct_io") == "on") == kind.disk
    if kind.other != "lmcache":
        ratio = float(flags[flags.index("--hicache-ratio") + 1])
        assert round(ratio * server.pools.device) == server.pools.dram
    assert Cases(campaign, server).plan()


def test_another_backend_is_measured_only_where_it_fits(campaign, monkeypatch):
    gpu = gpu_profile(True).other_bytes(KINDS["nixl"])
    assert 10e9 < gpu < 30e9 and gpu <= gpu_profile(False).other_bytes(KINDS["nixl"])
    backend = DirectServer(campaign, KINDS["nixl"])
    extra = json.loads(backend.flags[backend.flags.index("--hicache-storage-backend-extra-config") + 1])
    assert extra["plugin"]["posix"]["active"] and backend.wanted("files", 448)["storage"] == 448
    monkeypatch.setattr(direct, "DirectServer", lambda *_: pytest.fail("a server was made"))
    package = campaign.out / "packages" / "nixl"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('there is no backend')", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    direct.measure(campaign, KINDS["nixl"])
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "_api.py").write_text("", encoding="utf-8")
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: SimpleNamespace(free=1000))
    direct.measure(campaign, KINDS["nixl"])
    assert "there is no backend" in campaign.skipped[0] and "0.0 are free" in campaign.skipped[1]


def test_a_hit_of_another_tier_ends_the_case_and_is_kept(campaign):
    server = DirectServer(campaign, KINDS["direct"])
    assert server.wanted("files", 448) == {"device": 0, "host": 448, "storage": 0}
    assert DirectServer(campaign, KINDS["host"]).wanted("files", 448)["storage"] == 448
    server.client.one_by_one = lambda *_arguments, **_more: (
        [Outcome("p512", 512, ttft=0.1, cached={"device": 64, "host": 384, "storage": 0}, ids=(5,), top="x")],
        0.1,
    )
    request = server.request("p512", 512)
    with pytest.raises(WrongState, match=r"expected .*'host': 448.*found .*'device': 64"):
        server.ask(request, "dram")
    assert server.sent == 448 and server.ask(request, "any").ttft == 0.1
    kept = (campaign.out / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["good"] for line in kept] == [False, True]


def test_answers_outlive_a_start_of_the_program(campaign):
    outcome = Outcome("p512", 512, ids=(7, 8), top="abc")
    campaign.keep("direct/device/p512/512", outcome)
    campaign.fail("something")
    words = ["--device", "cpu", "--append", "--l3-dir", str(campaign.folder), "--out", str(campaign.out)]
    again = Campaign(direct.parse([*words, "--json", str(campaign.arguments.json)]))
    assert again.same("direct/device/p512/512", outcome) is True
    assert again.same("direct/device/p512/512", Outcome("p512", 512, ids=(7,), top="abd")) is False
    assert again.same("direct/device/other", outcome) is None
    assert again.failures == ["something"]
    assert not again.require_same("direct/device/other", outcome, "a test") and len(again.failures) == 2


def rows(**values):
    """Rows by "case|system|size"."""
    return {tuple(name.split("|")): {"value": value} for name, value in values.items()}


def test_a_disk_is_one_that_takes_direct_io(tmp_path, capsys):
    words = ["--l3-dir", str(tmp_path), "--servers", "disk"]
    for more, found in (([], "found None"), (["--disk-dir", "/proc"], "found proc")):
        with pytest.raises(SystemExit):
            direct.parse([*words, *more])
        assert found in capsys.readouterr().err


def test_the_disk_is_read_without_fio_too(campaign, monkeypatch):
    case = DiskCase(DirectServer(campaign, KINDS["disk"]))
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    tool, rate = case.read_rate()
    assert "fio is not installed" in tool and rate > 0
    assert not list(case.folder.glob("*.bin"))


def test_what_was_aimed_at():
    found = rows(
        **{
            "dram|direct|32768": 94.0,
            "dram|hicache|32768": 105.0,
            "dram|hicache-direct|32768": 92.0,
            "files|direct|32768": 130.0,
            "recompute|direct|32768": 1250.0,
            "bubble, dram|direct|50.0": 1.0,
            "bubble, dram|direct|90.0": 9.0,
            "miss|direct|8192": 225.0,
            "miss|hicache-direct|8192": 218.0,
            "shared context, all at once: throughput|direct|100": 9.9,
            "shared context, all at once: throughput|hicache-direct|100": 10.0,
            "working set: mean ttft|restart|20": 100.0,
            "working set: mean ttft|hicache|20": 500.0,
            "between tokens, storing|direct|p99": 8.4,
            "between tokens, quiet|direct|p99": 8.0,
        }
    )
    made = checks(found, {"file_read_gbps": 40.0, "host_to_gpu_gbps": 55.0}, 131_072, 64)
    by_name = {check.name: check for check in made}
    held = {name: check.held for name, check in by_name.items()}
    assert held == {
        "32768 tokens from DRAM, of HiCache-DRAM by default": True,
        "32768 tokens from DRAM, of HiCache-DRAM at its fastest": True,
        "32768 tokens from files": False,
        "32768 tokens: recompute over dram": True,
        "32768 tokens: recompute over files": True,
        "bubble with 50.0 % from dram": True,
        "bubble with 90.0 % from dram": False,
        "shared context, all at once: throughput, of HiCache-DRAM": True,
        "miss of 8192 tokens, of one without files": False,
        "working set, mean TTFT of HiCache-DRAM's": True,
        "between tokens while pages are stored, p99": False,
    }
    # 4.29 GB take 107 ms at 40 GB/s and 78 at 55.
    assert by_name["32768 tokens from files"].limit == pytest.approx(92 + 29.2 + 5, abs=0.3)
    assert by_name["working set, mean TTFT of HiCache-DRAM's"].found == pytest.approx(0.2)
    assert checks({}, {}, 131_072, 64) == []


def test_the_share_from_which_reading_is_not_hidden():
    assert crossover([(50.0, 1.0), (75.0, 3.0), (90.0, 7.0)]) == pytest.approx(82.5)
    assert crossover([(90.0, 7.0), (50.0, 6.0)]) == 50.0
    assert crossover([(50.0, 1.0), (90.0, 5.0)]) is None
