# SPDX-License-Identifier: Apache-2.0
"""What the servers of direct.py share: the clock, the result table, device hits to compare with, what went wrong."""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import time
from typing import Any

from common import Report, file_system_facts, is_memory, machine_facts, machine_limits
from direct_profile import Kind, Profile, profile
from serving_client import Outcome


class Campaign:
    """One start of the program."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.began = time.monotonic()
        self.profile: Profile = profile(arguments)
        self.out: pathlib.Path = arguments.out.resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.folder: pathlib.Path = arguments.l3_dir.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.requests = open(self.out / "requests.jsonl", "a", buffering=1, encoding="utf-8")
        earlier: dict[str, Any] = {}
        if arguments.append and arguments.json and arguments.json.exists():
            earlier = json.loads(arguments.json.read_text(encoding="utf-8"))
        self.failures: list[str] = list(earlier.get("failures", []))
        self.skipped: list[str] = list(earlier.get("skipped", []))
        self.limits: dict[str, float] = dict(earlier.get("limits", {}))
        self.answers: dict[str, Any] = dict(earlier.get("answers", {}))
        """By "what/prompt": first token and digest of its log probabilities. Of device hits and recomputes."""
        self.damaged_pages, self.damaged_from = earlier.get("damaged", (0, 0))  # of the control prompt; the first
        self.report = Report(arguments.json, machine_facts(self.folder), files_in_memory=is_memory(self.folder))
        if arguments.disk_dir:
            self.report.machine["file_systems"][str(arguments.disk_dir)] = file_system_facts(arguments.disk_dir)
        for row in earlier.get("rows", []):
            self.report.rows[row["case"], row["system"], str(row["size"])] = row
        kept = {name: earlier[name] for name in earlier if name.startswith(("server_", "counters_"))}
        self.report.note(
            labels=self.labels(),
            token_bytes=self.profile.token_bytes,
            commands=[*earlier.get("commands", []), self.report.command],
            **kept,
        )
        self.save()

    def labels(self) -> list[str]:
        """What a reader must know before any number."""
        said = [
            "Random weights, random token ids.",
            "No NVMe drive: what comes from files is copied by threads of the host (the software controller).",
        ]
        if self.profile.device == "cpu":
            said.append("A tiny model on a CPU: this checks the program, its times mean nothing.")
        if is_memory(self.folder):
            other = ", but for the server `disk`" if self.arguments.disk_dir else ": no disk was measured"
            said.append(f"The store lies in memory (tmpfs){other}.")
        return said

    def save(self) -> None:
        """Everything so far."""
        self.report.note(
            failures=self.failures,
            skipped=self.skipped,
            limits=self.limits,
            answers=self.answers,
            damaged=(self.damaged_pages, self.damaged_from),
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

    def store(self, kind: Kind) -> pathlib.Path:
        """The folder of a door's store; both doors have one of their own, and so has the disk."""
        if kind.disk:
            return self.arguments.disk_dir.resolve() / "tardis-store-disk"
        return self.folder / f"store-{kind.door or kind.other}"

    def new_store(self, kind: Kind) -> None:
        """Empty the folder."""
        shutil.rmtree(self.store(kind), ignore_errors=True)
        self.store(kind).mkdir(parents=True)

    def record(self, kind: str, what: str, outcome: Outcome, good: bool) -> None:
        """Keep one request."""
        self.requests.write(json.dumps({"server": kind, "what": what, "good": good, **outcome.to_json()}) + "\n")

    # ---- answers ----

    def keep(self, name: str, outcome: Outcome) -> None:
        """An answer to compare with."""
        self.answers[name] = {"first": outcome.ids[:1], "top": outcome.top}

    def same(self, name: str, outcome: Outcome) -> bool | None:
        """Whether first token and its log probabilities are those kept under `name`, bit for bit; None: none is."""
        kept = self.answers.get(name)
        if kept is None:
            return None
        return list(kept["first"]) == list(outcome.ids[:1]) and kept["top"] == outcome.top

    def require_same(self, name: str, outcome: Outcome, where: str) -> bool:
        """The same as a device hit; noted if not."""
        same = self.same(name, outcome)
        if same is None:
            self.fail(f"{where}: there is no answer {name} to compare with")
        elif not same:
            self.fail(f"{where}: the answer differs from {name}")
        return bool(same)

    # ---- limits ----

    def measure_limits(self) -> None:
        """Rates of this machine that bound a restore."""
        try:
            self.limits = machine_limits(self.folder, self.profile.device == "cuda")
        except RuntimeError as error:
            self.fail(str(error))
            return
        self.log(f"limits of this machine: {self.limits}")
        self.save()

    def seconds_at(self, limit: str, tokens: int) -> float | None:
        """Seconds that the KV of `tokens` tokens takes at one of the measured rates."""
        rate = self.limits.get(limit)
        return tokens * self.profile.token_bytes / 1e9 / rate if rate else None
