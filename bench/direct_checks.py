# SPDX-License-Identifier: Apache-2.0
"""What the rows of direct.py say about what was aimed at. No server is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from checks import Check, Rows


def crossover(shares: Sequence[tuple[float, float]], most: float = 5.0) -> float | None:
    """The share of hits (%) beyond which more than `most` % of the prefill is waited for, between the two measured
    shares around it; None: none of those measured is beyond it. `shares`: (share of hits, bubble), both in %.
    """
    ordered = sorted(shares)
    for number, (share, bubble) in enumerate(ordered):
        if bubble <= most:
            continue
        if number == 0:
            return share
        before, lower = ordered[number - 1]
        return before + (share - before) * (most - lower) / (bubble - lower)
    return None


def shares(rows: Rows, state: str, system: str) -> list[tuple[float, float]]:
    """(share of hits, bubble) as they were measured."""
    return sorted(
        (float(size), row["value"])
        for (case, where, size), row in rows.items()
        if case == f"bubble, {state}" and where == system
    )


def checks(rows: Rows, limits: Mapping[str, float], token_bytes: int, page: int) -> list[Check]:
    """The aims of which both sides were measured."""
    found: list[Check] = []

    def value(case: str, system: str, size: Any) -> float | None:
        row = rows.get((case, system, str(size)))
        return None if row is None else row["value"]

    def add(name: str, over: float | None, under: float | None, limit: float, least: bool = False) -> None:
        if over is not None and under:
            found.append(Check(name, over / under, limit, "x", least))

    sizes = sorted({int(size) for case, _system, size in rows if case in ("recompute", "dram", "files")})
    for size in sizes:
        direct = value("dram", "direct", size)
        default, fast = (value("dram", system, size) for system in ("hicache", "hicache-direct"))
        add(f"{size} tokens from DRAM, of HiCache-DRAM by default", direct, default, 0.95)
        fastest = min([time for time in (default, fast) if time is not None], default=None)
        add(f"{size} tokens from DRAM, of HiCache-DRAM at its fastest", direct, fastest, 1.08)
        files, rates = value("files", "direct", size), [limits.get(n) for n in ("file_read_gbps", "host_to_gpu_gbps")]
        if files is not None and fastest is not None and all(rates):
            moved = (size - page) * token_bytes / 1e9
            extra = max(0.0, moved / rates[0] - moved / rates[1]) * 1e3  # type: ignore[operator]
            found.append(Check(f"{size} tokens from files", files, fastest + extra + 5, "ms"))
        for state in ("dram", "files"):
            add(
                f"{size} tokens: recompute over {state}",
                value("recompute", "direct", size),
                value(state, "direct", size),
                8,
                True,
            )
    for state in ("dram", "files"):
        for share, bubble in shares(rows, state, "direct"):
            found.append(Check(f"bubble with {share} % from {state}", bubble, 5, "%"))
    for load in ("one at a time", "closed loop", "all at once"):
        case = f"shared context, {load}: throughput"
        for row_case, system, size in rows:
            if row_case == case and system == "direct":
                rate = value(case, "direct", size)
                add(f"{case}, of HiCache-DRAM", rate, value(case, "hicache-direct", size), 0.98, True)
    for case, system, size in rows:
        if case == "working set: mean ttft" and system == "restart":
            add(
                "working set, mean TTFT of HiCache-DRAM's", value(case, system, size), value(case, "hicache", size), 0.5
            )
        if case == "miss" and system == "direct":
            add(
                f"miss of {size} tokens, of one without files",
                value(case, system, size),
                value(case, "hicache-direct", size),
                1.02,
            )
        if (case, system, size) == ("between tokens, storing", "direct", "p99"):
            add(
                f"between tokens while pages are stored, {size}",
                value(case, system, size),
                value("between tokens, quiet", system, size),
                1.03,
            )
    return found
