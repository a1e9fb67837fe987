# SPDX-License-Identifier: Apache-2.0
"""What the steps of serving_ttft.py share: sizes, clock, result table, limits, and what went wrong."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import time
from typing import Any

from common import Report, ServedModel, is_memory, machine_facts, machine_limits

HERE = pathlib.Path(__file__).resolve().parent
GPU_FLAGS = [
    *("--sampling-backend", "pytorch", "--grammar-backend", "none", "--max-running-requests", "16"),
    *("--cuda-graph-max-bs-decode", "8", "--mem-fraction-static", "0.7"),
]


@dataclasses.dataclass(frozen=True)
class Profile(ServedModel):
    """Sizes that go together: prompt lengths, and pools in which the longest prompt can be evicted and restored."""

    model: pathlib.Path
    sizes: tuple[int, int]
    device_tokens: int
    host_ratio: float
    page_size: int
    warm_tokens: int
    capacity: str
    flags: tuple[str, ...] = ()


def profile(arguments: argparse.Namespace) -> Profile:
    """The profile of `--device`, with what the command line overrides."""
    if arguments.device == "cpu":
        chosen = Profile(HERE.parent / "demo" / "models" / "tiny-llama", (1024, 2048), 4096, 2.0, 64, 512, "512MiB")
    else:
        chosen = Profile(
            HERE / "models" / "llama-3.1-8b-shape",
            (8192, 32768),
            65536,
            2.0,
            64,
            1024,
            "40GiB",
            ("--attention-backend", arguments.attention_backend, *GPU_FLAGS),
        )
    if arguments.model_path:
        chosen = dataclasses.replace(chosen, model=arguments.model_path)
    if arguments.capacity:
        chosen = dataclasses.replace(chosen, capacity=arguments.capacity)
    return dataclasses.replace(chosen, flags=(*chosen.flags, *arguments.server_flag))


class Campaign:
    """What all steps share: the clock, the result table, the device hits to compare with, and what went wrong."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.began = time.monotonic()
        self.profile = profile(arguments)
        self.out: pathlib.Path = arguments.out.resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.l3: pathlib.Path = arguments.l3_dir.resolve()
        self.l3.mkdir(parents=True, exist_ok=True)
        self.failures: list[str] = []
        self.skipped: list[str] = []
        self.requests = open(self.out / "requests.jsonl", "a", buffering=1, encoding="utf-8")
        earlier: dict[str, Any] = {}
        if arguments.append and arguments.json and arguments.json.exists():
            earlier = json.loads(arguments.json.read_text(encoding="utf-8"))
        self.report = Report(arguments.json, machine_facts(self.l3), l3_in_memory=is_memory(self.l3))
        for row in earlier.pop("rows", []):
            self.report.rows[row["case"], row["system"], str(row["size"])] = row
        if earlier:
            self.report.note(earlier=earlier)
        self.reference_file = self.l3 / "device_hits.json"
        self.references: dict[str, Any] = {}
        if self.reference_file.exists():
            self.references = json.loads(self.reference_file.read_text(encoding="utf-8"))
        self.limits: dict[str, float] = {}

    def left(self) -> float:
        return self.arguments.deadline - (time.monotonic() - self.began)

    def log(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:6.1f}] {text}", flush=True)

    def fail(self, text: str) -> None:
        self.failures.append(text)
        self.log(f"FAILED: {text}")
        self.report.note(failures=self.failures)

    def time_for(self, what: str, seconds: float) -> bool:
        """False, noted, if fewer than `seconds` are left before the deadline."""
        if self.left() >= seconds:
            return True
        self.skipped.append(what)
        self.report.note(skipped=self.skipped)
        self.log(f"skipped, {self.left():.0f} s are left of the {seconds:.0f} it may take: {what}")
        return False

    def measure_limits(self) -> None:
        """Rates of this machine that bound a restore."""
        try:
            self.limits = machine_limits(self.l3, self.arguments.device == "cuda")
        except RuntimeError as error:
            self.fail(str(error))
            return
        self.report.note(limits=self.limits)
        self.log(f"limits of this machine: {self.limits}")

    def seconds_at(self, limit: str, tokens: int) -> float | None:
        """Seconds that the KV of `tokens` tokens takes at one of the measured rates."""
        rate = self.limits.get(limit)
        return tokens * self.profile.token_bytes / 1e9 / rate if rate else None

    def tardis_config(self, folder: pathlib.Path, **more: Any) -> dict[str, Any]:
        return {"path": str(folder), "capacity": self.profile.capacity, **self.arguments.tardis_config, **more}

    def backend(self, name: str) -> tuple[str, dict[str, Any], pathlib.Path]:
        """SGLang's backend name, the extra config and the folder of one storage system."""
        folder = self.l3 / name
        if name == "file":
            return "file", {}, folder
        if name == "readv":
            extra = {
                "backend_name": "readv",
                "module_path": "readv_backend",
                "class_name": "ReadvBackend",
                "interface_v1": 1,
                "folder": str(folder),
                "threads": 8,
                "log": str(self.out / "readv.jsonl"),
            }
            return "dynamic", extra, folder
        if name == "tardis-unverified":  # the same store; shows what verification costs
            return "tardis", self.tardis_config(self.l3 / "tardis", verify_reads=False), self.l3 / "tardis"
        return "tardis", self.tardis_config(folder), folder
