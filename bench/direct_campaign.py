# SPDX-License-Identifier: Apache-2.0
"""What the servers of direct.py share beyond any campaign: stores, device hits to compare with."""

from __future__ import annotations

import argparse
import pathlib
import shutil

from campaign import BaseCampaign
from common import file_system_facts, is_memory
from direct_profile import Kind, Profile, profile
from serving_client import Outcome


class Campaign(BaseCampaign):
    """One start of the program. `answers`, by "what/prompt": first token and digest of its log probabilities, of device
    hits and recomputes.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.profile: Profile = profile(arguments)
        super().__init__(arguments, arguments.l3_dir)
        self.damaged_pages, self.damaged_from = self.earlier.get("damaged", (0, 0))  # of the control prompt; the first
        if arguments.disk_dir:
            self.report.machine["file_systems"][str(arguments.disk_dir)] = file_system_facts(arguments.disk_dir)
        self.report.note(labels=self.labels(), token_bytes=self.profile.token_bytes)
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
        self.report.note(damaged=(self.damaged_pages, self.damaged_from))
        super().save()

    def store(self, kind: Kind) -> pathlib.Path:
        """The folder of a door's store; both doors have one of their own, and so has the disk."""
        if kind.disk:
            return self.arguments.disk_dir.resolve() / "tardis-store-disk"
        return self.folder / f"store-{kind.door or kind.other}"

    def new_store(self, kind: Kind) -> None:
        """Empty the folder."""
        shutil.rmtree(self.store(kind), ignore_errors=True)
        self.store(kind).mkdir(parents=True)

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

    def seconds_at(self, limit: str, tokens: int) -> float | None:
        """Seconds that the KV of `tokens` tokens takes at one of the measured rates."""
        rate = self.limits.get(limit)
        return tokens * self.profile.token_bytes / 1e9 / rate if rate else None
