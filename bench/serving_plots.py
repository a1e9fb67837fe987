# SPDX-License-Identifier: Apache-2.0
"""The plots of serving.py, from the cases of its result file. Needs matplotlib; without it nothing is drawn."""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Callable
from typing import Any

from serving_results import LEVELS, TIER_TITLES, TIERS, Cases, load_title, ordered, summary

COLOURS = {"recompute": "#888888", "dram": "#1f77b4", "tardis": "#d62728", "file": "#2ca02c"}
LEVEL_COLOURS = {"device": "#4c72b0", "host": "#8fb3dd", "storage": "#dd8452", "computed": "#cccccc"}
LEVEL_TITLES = {"device": "device", "host": "DRAM", "storage": "storage", "computed": "computed"}
FORMATS = ("png", "svg")


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(cases: Cases, folder: pathlib.Path) -> list[str]:
    """Draw every plot that the cases allow, each as PNG and SVG, into `folder`. Returns the names of the PNG files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    names = []

    def save(name: str, size: tuple[float, float], paint: Callable[[Any], None]) -> None:
        figure, axes = pyplot.subplots(figsize=size, layout="constrained")
        paint(axes)
        for kind in FORMATS:
            figure.savefig(folder / f"{name}.{kind}", dpi=150)
        pyplot.close(figure)
        names.append(f"{name}.png")

    for letter in sorted({case["workload"] for case in cases.values()}):
        chosen = [case for case in ordered(cases) if case["workload"] == letter]
        title = f"({letter}) {chosen[0]['title']}"
        load = chosen[0]["load"]
        first = [case for case in chosen if case["load"] == load]
        save(
            f"ttft_cdf_{letter}", (6, 4), lambda axes, f=first, t=title, n=load: _cdf(axes, f, f"{t}, {load_title(n)}")
        )
        rated = [case for case in chosen if case["offered"] is not None]
        if rated:
            save(f"throughput_{letter}", (6, 4), lambda axes, r=rated, t=title: _throughput(axes, r, t))
    if cases:
        groups = len({(case["workload"], case["load"]) for case in cases.values()})
        save("hits_by_tier", (max(6.0, 1.6 * groups), 4.5), lambda axes: _hits(axes, ordered(cases)))
    return names


def _cdf(axes: Any, cases: list[dict[str, Any]], title: str) -> None:
    for case in cases:
        times = sorted(request["ttft_ms"] for request in case["requests"] if "error" not in request)
        if not times:
            continue
        shares = [index / len(times) for index in range(len(times) + 1)]
        times = [times[0], *times]
        axes.step(times, shares, where="post", label=TIER_TITLES[case["tier"]], color=COLOURS[case["tier"]])
    axes.set(xscale="log", xlabel="time to first token, ms", ylabel="share of requests", title=title, ylim=(0, 1.02))
    axes.grid(alpha=0.3, which="both")
    axes.legend()


def _throughput(axes: Any, cases: list[dict[str, Any]], title: str) -> None:
    finite = [case["offered"] for case in cases]
    for tier in TIERS:
        points = sorted((c["offered"], summary(c)["request_throughput"]) for c in cases if c["tier"] == tier)
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=TIER_TITLES[tier], color=COLOURS[tier])
    axes.plot([0, max(finite)], [0, max(finite)], color="black", lw=0.6, ls=":", label="offered")
    axes.set(xlabel="offered, requests/s", ylabel="answered, requests/s", title=title, xlim=(0, None), ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()


def _hits(axes: Any, cases: list[dict[str, Any]]) -> None:
    labels = []
    for position, case in enumerate(cases):
        numbers = summary(case)
        total, bottom = max(numbers["prompt_tokens"], 1), 0.0
        for level in (*LEVELS, "computed"):
            share = numbers[level] / total
            label = LEVEL_TITLES[level] if position == 0 else None
            axes.bar(position, share, bottom=bottom, color=LEVEL_COLOURS[level], label=label, width=0.8)
            bottom += share
        labels.append(f"{case['workload']} {case['load']} {case['tier']}")
    axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=7)
    axes.set(ylabel="share of prompt tokens", title="where prompt tokens came from", ylim=(0, 1.1))
    axes.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.0), fontsize=7, framealpha=0.9)
