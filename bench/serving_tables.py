# SPDX-License-Identifier: Apache-2.0
"""The Markdown page of serving.py, from the content of its result file."""

from __future__ import annotations

import math
from typing import Any

from serving_results import (
    LEVELS,
    TIER_TITLES,
    Case,
    failures,
    key,
    load_title,
    ordered,
    reference_equal,
    state,
    summary,
    tiers_equal,
)


def _number(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def _share(pair: tuple[int, int]) -> str:
    return f"{pair[0]}/{pair[1]}" if pair[1] else "-"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def workload_table(cases: list[Case], everything: dict[str, Case]) -> list[str]:
    """One workload: a row for each load and tier."""
    head = ["load", "tier", "requests", "TTFT mean, ms", "p50", "p99", "req/s"]
    head += ["hit tokens: device", "DRAM", "storage", "computed", "restored, GB", "stored, GB", "as expected"]
    head += ["= device hit", "= DRAM's answer"]
    lines = [_line(head), "|" + "---|" * len(head)]
    for case in cases:
        numbers = summary(case)
        prompts = max(numbers["prompt_tokens"], 1)
        other = everything.get(key(case["workload"], case["load"], "dram"))
        twins = tiers_equal(case, other) if other is not None and case["tier"] in ("tardis", "file") else (0, 0)
        errors = f" ({numbers['errors']} failed)" if numbers["errors"] else ""
        lines.append(
            _line(
                [
                    load_title(case["load"]),
                    TIER_TITLES[case["tier"]],
                    f"{numbers['requests']}{errors}",
                    _number(numbers["mean_ttft_ms"], 1),
                    _number(numbers["median_ttft_ms"], 1),
                    _number(numbers["p99_ttft_ms"], 1),
                    _number(numbers["request_throughput"], 3),
                    *(f"{numbers[level] / prompts:.1%}" for level in LEVELS),
                    f"{numbers['computed'] / prompts:.1%}",
                    _number(numbers["storage"] * case["token_bytes"] / 1e9, 2),
                    _number(case["counters"].get("stored_tokens", 0) * case["token_bytes"] / 1e9, 2),
                    _share(state(case)),
                    _share(reference_equal(case)),
                    _share(twins),
                ]
            )
        )
    return lines


def hit_rate_table(cases: list[Case]) -> list[str]:
    """Workload d: median TTFT of each hit rate."""
    percents = sorted({_percent(request["name"]) for case in cases for request in case["requests"]})
    lines = [_line(["TTFT p50, ms", *(f"{percent} %" for percent in percents)]), "|" + "---|" * (len(percents) + 1)]
    for case in cases:
        cells = [TIER_TITLES[case["tier"]]]
        for percent in percents:
            chosen = [request for request in case["requests"] if _percent(request["name"]) == percent]
            cells.append(_number(summary({**case, "requests": chosen})["median_ttft_ms"], 1))
        lines.append(_line(cells))
    return lines


def _percent(name: str) -> int:
    return int(name[1:].split("d")[0])


def _run(run: dict[str, Any]) -> list[str]:
    machine = run.get("machine", {})
    gpu = ", ".join(machine.get("gpu") or ["no GPU"])
    versions = ", ".join(f"{name} {version}" for name, version in machine.get("packages", {}).items())
    systems = ", ".join(f"{folder}: {kind}" for folder, kind in machine.get("file_systems", {}).items())
    return [
        f"- {machine.get('date')}: {gpu}; {machine.get('cores')} cores, {machine.get('cpu')}; memory "
        f"{machine.get('memory')}; kernel {machine.get('kernel')}; Python {machine.get('python')}; {versions}; "
        f"storage {systems}",
        f"  - `{run.get('command')}`",
        *(f"  - server: `{' '.join(flags)}`" for flags in run.get("servers", [])),
    ]


def markdown(content: dict[str, Any], plots: list[str]) -> str:
    """The whole page. `plots` are file names beside it."""
    cases: dict[str, Case] = content["cases"]
    lines = ["# Serving by tier", "", *content.get("labels", []), ""]
    for letter in sorted({case["workload"] for case in cases.values()}):
        chosen = [case for case in ordered(cases) if case["workload"] == letter]
        first = chosen[0]
        lines += [f"## ({letter}) {first['title']}", ""]
        sizes = ", ".join(f"{name} {value}" for name, value in first["settings"].items())
        pools = first["setup"]
        lines += [
            f"{sizes}. Device pool {pools['device_tokens']} tokens, DRAM {pools['dram_tokens']} tokens "
            f"({pools['dram_tokens'] * first['token_bytes'] / 1e9:.2f} GB), page {pools['page_size']}, "
            f"attention {pools['attention']}. An endless cache would hit "
            f"{first['hittable_tokens'] / max(summary(first)['prompt_tokens'], 1):.1%} of the prompt tokens.",
            *sorted({f"{case['note']}." for case in chosen if case.get("note")}),
            "",
            *workload_table(chosen, cases),
            "",
        ]
        if letter == "d":
            lines += [*hit_rate_table([case for case in chosen if case["load"] == "seq"]), ""]
    if plots:
        lines += [f"![{name}]({name})" for name in plots] + [""]
    wrong = failures(cases)
    lines += ["## Checks", ""]
    lines += [f"- FAILED: {text}" for text in wrong] or ["All cached tokens and answers as expected."]
    lines += [f"- skipped: {text}" for text in content.get("skipped", [])]
    lines += ["", "## Runs", ""]
    for run in content.get("runs", []):
        lines += _run(run)
    return "\n".join(lines) + "\n"
