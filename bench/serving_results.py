# SPDX-License-Identifier: Apache-2.0
"""The cases of serving.py: what is kept of each, what follows from them, and what must hold. No server is needed.

A case is one workload under one load on one tier. The result file is the one of common.py with two more keys: `cases`,
by "workload/load/tier" with every request, and `runs`, one entry a start of the program (machine, versions, command,
server flags); a case names its run.
"""

from __future__ import annotations

import hashlib
import json
import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

TIERS = ("recompute", "dram", "tardis", "file")
"""In the order in which they run: the slowest last, so that a deadline costs no other."""
TIER_TITLES = {"recompute": "recompute", "dram": "HiCache-DRAM", "tardis": "tardis", "file": "file"}
LEVELS = ("device", "host", "storage")
LOAD_TITLES = {
    "seq": "one at a time",
    "waves": "rounds of all clients",
    "trace": "as recorded",
    "inf": "all at once",
}

Case = dict[str, Any]
Cases = Mapping[str, Case]


def load_title(load: str) -> str:
    """A load in words."""
    return LOAD_TITLES.get(load, f"{load} req/s")


def key(workload: str, load: str, tier: str) -> str:
    """A case's name."""
    return f"{workload}/{load}/{tier}"


def digest(content: Any) -> str:
    """Of everything that makes a case what it is, so that `--resume` never mixes two set-ups."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def is_done(cases: Cases, name: str, spec: str) -> bool:
    """Whether the file holds this case, complete, made with the same settings."""
    case = cases.get(name)
    return case is not None and bool(case.get("done")) and case.get("spec") == spec


def read(file: pathlib.Path) -> dict[str, Any]:
    """A result file. Errors say what is wrong with it."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content["cases"], dict):
            raise TypeError("`cases` is not an object")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--json {file}: expected a result file of serving.py, found {error!r}; give another file, or drop --resume"
        ) from error
    return content


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks, as numpy's default; nan for no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summary(case: Case) -> dict[str, Any]:
    """Numbers of one case: TTFT in ms, requests a second, tokens by where they came from."""
    good = [request for request in case["requests"] if "error" not in request]
    times = [request["ttft_ms"] for request in good]
    prompts = sum(request["prompt_tokens"] for request in good)
    hits = {level: sum(request[level] for request in good) for level in LEVELS}
    busy = case["busy_s"]
    return {
        "requests": len(case["requests"]),
        "errors": len(case["requests"]) - len(good),
        "mean_ttft_ms": statistics.fmean(times) if times else math.nan,
        "median_ttft_ms": percentile(times, 50),
        "p99_ttft_ms": percentile(times, 99),
        "request_throughput": len(good) / busy if busy > 0 else math.nan,
        "prompt_tokens": prompts,
        **hits,
        "computed": prompts - sum(hits.values()),
        "late_ms": max((request["late_ms"] for request in good), default=0.0),
    }


def state(case: Case) -> tuple[int, int]:
    """Requests whose cached tokens are those the case expects, and requests for which it expects any number."""
    asked = [request for request in case["requests"] if "expect" in request and "error" not in request]
    return sum(sum(r[level] for level in LEVELS) == r["expect"] for r in asked), len(asked)


def reference_equal(case: Case) -> tuple[int, int]:
    """Requests whose first token and top log probabilities are those of a device hit on as many tokens; and how many
    could be compared.
    """
    equal = compared = 0
    for request in case["requests"]:
        reference = request.get("reference")
        cached = sum(request[level] for level in LEVELS)
        if reference is None or cached == 0 or reference["device"] != cached:
            continue
        compared += 1
        same_token = request["ids"].split()[:1] == [str(token) for token in reference["ids"]]
        equal += same_token and request.get("top") == reference["top"]
    return equal, compared


def tiers_equal(case: Case, other: Case) -> tuple[int, int]:
    """The same against another tier's answers: requests with as many cached tokens there must agree bit for bit."""
    theirs = {request["name"]: request for request in other["requests"]}
    equal = compared = 0
    for request in case["requests"]:
        twin = theirs.get(request["name"])
        cached = sum(request[level] for level in LEVELS)
        if twin is None or not request.get("top") or not twin.get("top") or cached == 0:
            continue
        if cached != sum(twin[level] for level in LEVELS):
            continue
        compared += 1
        equal += request["ids"].split()[:1] == twin["ids"].split()[:1] and request["top"] == twin["top"]
    return equal, compared


def failures(cases: Cases) -> list[str]:
    """What does not hold.

    Cached tokens and answers are required one request at a time only: under load, pools may be too small for everything
    at once, and batches change the last bits.
    """
    found = []
    for name, case in cases.items():
        errors = [request for request in case["requests"] if "error" in request]
        if errors:
            found.append(f"{name}: {len(errors)} of {len(case['requests'])} requests failed: {errors[0]['error']}")
        prepared = case["prepared"]
        if prepared.get("stored_tokens", 0) < prepared.get("new_tokens", 0):
            found.append(
                f"{name}: {prepared['stored_tokens']:.0f} of {prepared['new_tokens']} tokens were stored beforehand"
            )
        if case["tier"] == "recompute":
            cached = sum(sum(request[level] for level in LEVELS) > 0 for request in case["requests"])
            if cached:
                found.append(f"{name}: {cached} requests hit a cache; a recompute must not")
        if case["load"] != "seq":
            continue
        good, asked = state(case)
        if good < asked:
            found.append(f"{name}: {asked - good} of {asked} requests did not report the cached tokens expected")
        equal, compared = reference_equal(case)
        if equal < compared:
            found.append(f"{name}: {compared - equal} of {compared} first tokens differ from the device hit")
        other = cases.get(key(case["workload"], case["load"], "dram"))
        if other is not None and other is not case:
            equal, compared = tiers_equal(case, other)
            if equal < compared:
                found.append(f"{name}: {compared - equal} of {compared} first tokens differ from HiCache-DRAM's")
    return found


def sort_key(case: Case) -> tuple[Any, ...]:
    """Workload, then loads (unloaded first, rates ascending), then tiers."""
    try:
        rate = float(case["load"])
    except ValueError:
        rate = -1.0
    return case["workload"], rate, TIERS.index(case["tier"])


def ordered(cases: Cases) -> list[Case]:
    """All cases in the order of tables and plots."""
    return sorted(cases.values(), key=sort_key)


def rows(cases: Cases) -> list[dict[str, Any]]:
    """Rows in the form of common.py. Where the DRAM tier holds everything it is the limit of the other tiers."""
    made = []
    for case in ordered(cases):
        numbers = summary(case)
        bound = cases.get(key(case["workload"], case["load"], "dram")) if case["dram_holds_all"] else None
        limits = summary(bound) if bound is not None and case["tier"] != "dram" else None
        where = f"{case['workload']} {case['title']}, {load_title(case['load'])}"
        for what, unit in (
            ("mean_ttft_ms", "ms"),
            ("median_ttft_ms", "ms"),
            ("p99_ttft_ms", "ms"),
            ("request_throughput", "req/s"),
        ):
            value, limit = numbers[what], limits[what] if limits else None
            ratio = None
            if limit and value and not math.isnan(limit + value):
                ratio = round(limit / value if unit == "ms" else value / limit, 3)
            made.append(
                {
                    "case": f"{where}: {what}",
                    "system": case["tier"],
                    "size": numbers["prompt_tokens"],
                    "value": None if math.isnan(value) else round(value, 3),
                    "unit": unit,
                    "limit": None if limit is None or math.isnan(limit) else round(limit, 3),
                    "ratio": ratio,
                }
            )
        good, asked = state(case)
        equal, compared = reference_equal(case)
        made.append(
            {
                "case": f"{where}: hit tokens",
                "system": case["tier"],
                "size": numbers["prompt_tokens"],
                "value": numbers["prompt_tokens"] - numbers["computed"],
                "unit": "tokens",
                "limit": None,
                "ratio": None,
                **{level: numbers[level] for level in LEVELS},
                "errors": numbers["errors"],
                "state_ok": f"{good}/{asked}",
                "first_token_and_top20_equal_device_hit": f"{equal}/{compared}",
                "restored_bytes": numbers["storage"] * case["token_bytes"],
                "stored_bytes": case["counters"].get("stored_tokens", 0) * case["token_bytes"],
            }
        )
    return made
