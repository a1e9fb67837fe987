# SPDX-License-Identifier: Apache-2.0
"""What programs that measure servers share: the clock, the result table, requests, limits, what went wrong."""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from typing import Any

from common import Report, is_memory, machine_facts, machine_limits
from serving_client import Outcome


class BaseCampaign:
    """One start of a program, with what `--append` keeps of earlier ones.

    Args:
        arguments: with `out`, `json`, `append`, `deadline` and `device`.
        folder: whose reads are limits of this machine.
    """

    def __init__(self, arguments: argparse.Namespace, folder: pathlib.Path) -> None:
        self.arguments = arguments
        self.began = time.monotonic()
        self.out: pathlib.Path = arguments.out.resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.folder: pathlib.Path = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.requests = open(self.out / "requests.jsonl", "a", buffering=1, encoding="utf-8")
        self.earlier: dict[str, Any] = {}
        if arguments.append and arguments.json and arguments.json.exists():
            self.earlier = json.loads(arguments.json.read_text(encoding="utf-8"))
        self.failures: list[str] = list(self.earlier.get("failures", []))
        self.skipped: list[str] = list(self.earlier.get("skipped", []))
        self.limits: dict[str, float] = dict(self.earlier.get("limits", {}))
        self.answers: dict[str, Any] = dict(self.earlier.get("answers", {}))
        """To compare with, by name."""
        self.report = Report(arguments.json, machine_facts(self.folder), files_in_memory=is_memory(self.folder))
        for row in self.earlier.get("rows", []):
            self.report.rows[row["case"], row["system"], str(row["size"])] = row
        kept = {name: self.earlier[name] for name in self.earlier if name.startswith(("server_", "counters_"))}
        self.report.note(commands=[*self.earlier.get("commands", []), self.report.command], **kept)

    def save(self) -> None:
        """Everything so far."""
        self.report.note(
            failures=self.failures,
            skipped=self.skipped,
            limits=self.limits,
            answers=self.answers,
            seconds=round(time.monotonic() - self.began, 1),
        )

    def left(self) -> float:
        return self.arguments.deadline - (time.monotonic() - self.began)

    def log(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:6.1f}] {text}", flush=True)

    def fail(self, text: str) -> None:
        """Note something that must not be."""
        self.failures.append(text[:3000])
        self.log(f"FAILED: {text}")
        self.save()

    def time_for(self, what: str, seconds: float) -> bool:
        """False, noted, if fewer than `seconds` are left before the deadline."""
        if self.left() >= seconds:
            return True
        self.skip(f"{what}: {self.left():.0f} s are left of the {seconds:.0f} it may take")
        return False

    def skip(self, what: str) -> None:
        """Note something that was not measured, and why."""
        self.skipped.append(what)
        self.log(f"skipped: {what}")
        self.save()

    def record(self, kind: str, what: str, outcome: Outcome, good: bool) -> None:
        """Keep one request."""
        self.requests.write(json.dumps({"server": kind, "what": what, "good": good, **outcome.to_json()}) + "\n")

    def measure_limits(self) -> None:
        """Rates of this machine that bound what is measured."""
        try:
            self.limits = machine_limits(self.folder, self.arguments.device == "cuda")
        except RuntimeError as error:
            self.fail(str(error))
            return
        self.log(f"limits of this machine: {self.limits}")
        self.save()
