# SPDX-License-Identifier: Apache-2.0
"""One server of attention_serving.py: how it is started, what it is asked, how much HBM it has."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import re
from collections.abc import Sequence
from typing import Any

from attention_serving_profile import Kind, Profile
from campaign import BaseCampaign
from common import gpu_query
from serving_client import TOP, Client, Outcome, OutOfTime
from serving_workloads import Request
from sglang_server import BenchServer, ServerSpec

Candidates = tuple[tuple[float, int], ...]
"""(log probability, token) of a position, the most probable first."""
MIB = 1 << 20


class WrongAnswer(RuntimeError):
    """A server answered something else than the case wants."""


@dataclasses.dataclass(frozen=True)
class Scored:
    """An answer with log probabilities."""

    ids: tuple[int, ...]
    steps: tuple[Candidates, ...]
    """Of each generated token."""
    prompt: tuple[Candidates, ...]
    """Of the prompt's last tokens, as far as asked for."""
    cached: int


def candidates(ranks: Sequence[Sequence[Any]]) -> Candidates:
    """As SGLang gives them."""
    return tuple((entry[0], entry[1]) for entry in ranks)


def gpu_used() -> int | None:
    """Bytes in use on all visible GPUs, whoever has them."""
    lines = gpu_query("gpu", "memory.used")
    return sum(int(line[0]) for line in lines) * MIB if lines else None


class AttentionServer:
    """A server, from its flags to its end."""

    def __init__(self, campaign: BaseCampaign, profile: Profile, kind: Kind, port: int) -> None:
        self.campaign, self.profile, self.kind = campaign, profile, kind
        arguments = campaign.arguments
        backend = "tardis" if kind.in_host else profile.reference_backend
        environment = {}
        if kind.in_host:
            environment["TARDIS_CONFIG"] = json.dumps(profile.host_config)
        if profile.device == "cpu":
            environment["OMP_NUM_THREADS"] = "1"
        spec = ServerSpec(
            model=profile.model,
            port=port,
            hierarchical=False,
            storage=None,
            device=profile.device,
            page_size=profile.page_size,
            max_total_tokens=profile.max_total_tokens(kind),
            flags=(
                *("--attention-backend", backend, "--chunked-prefill-size", str(profile.chunk)),
                *profile.flags,
                *kind.flags,
                *arguments.server_flag.get(kind.name, ()),
            ),
            environment=environment,
        )
        self.server = BenchServer(spec, campaign.out / f"server-{kind.name}.log")
        self.client = Client(port, campaign.left)
        self.flags = [word.replace(f"{profile.model.parent}{os.sep}", "") for word in spec.command()[3:]]
        self.pool = 0
        self.used_before: int | None = None
        """HBM in use before it was started."""
        self.beside: Sequence[str] = ()
        """Servers that were started at once, with itself."""

    @property
    def name(self) -> str:
        return self.kind.name

    def learn(self) -> None:
        """What the server says of itself."""
        status, text = self.server.call("GET", "/get_server_info", timeout=30)
        if status != 200:
            raise WrongAnswer(f"GET /get_server_info answered {status}: {text[:300]}")
        self.pool = int(json.loads(text)["max_total_num_tokens"])

    def hbm(self) -> int | None:
        """Bytes of HBM that its processes have: as nvidia-smi says, or, where that does not name them (a container
        hides them), what is used since before the server was started. None if others were started with it.
        """
        own = set(map(str, self.server.processes()))
        used = [line[1] for line in gpu_query("compute-apps", "pid,used_memory") if line[0] in own]
        if used and all(word.isdigit() for word in used):  # else "[N/A]"
            return sum(map(int, used)) * MIB
        everything = gpu_used()
        if len(self.beside) > 1 or everything is None or self.used_before is None:
            return None
        return everything - self.used_before

    def kv_in_hbm(self) -> int | None:
        """Bytes of KV in HBM that its log tells of; None if it does not."""
        log = self.server.log_text()
        if self.kind.in_host:
            said = re.findall(r"tardis: KV of running requests: .*in HBM: (\d+)", log)
            return int(said[-1]) if said else None
        said = re.findall(r"KV Cache is allocated.*K size: ([\d.]+) GB, V size: ([\d.]+) GB", log)
        return round(sum(map(float, said[-1])) * 2**30) if said else None

    # ---- requests ----

    def ask(self, tokens: Sequence[int], new_tokens: int, start: int = -1, salt: str | None = None) -> Scored:
        """Send a prompt, greedy; with log probabilities of its tokens behind place `start`, and of the answer's.

        Raises:
            WrongAnswer: refused, or without what was asked for; the message has the server's words.
        """
        left = self.campaign.left()
        if left <= 0:
            raise OutOfTime(f"{self.name}: a prompt of {len(tokens)} tokens")
        body: dict[str, Any] = {
            "input_ids": list(tokens),
            "return_logprob": True,
            "top_logprobs_num": TOP,
            "logprob_start_len": start,
            "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
        }
        if salt is not None:
            body["cache_salt"] = salt
        try:
            status, text = self.server.call("POST", "/generate", body, timeout=max(1.0, min(300.0, left)))
        except (OSError, http.client.HTTPException) as error:
            if self.campaign.left() <= 0:
                raise OutOfTime(f"{self.name}: a prompt of {len(tokens)} tokens") from error
            raise WrongAnswer(f"{self.name}: the request broke off: {error!r}\n{self.server.log_tail()}") from error
        try:
            meta = json.loads(text)["meta_info"]
            answer = Scored(
                tuple(entry[1] for entry in meta["output_token_logprobs"]),
                tuple(map(candidates, meta["output_top_logprobs"])),
                tuple(candidates(ranks) for ranks in meta["input_top_logprobs"] if ranks),
                int(meta["cached_tokens"]),
            )
        except (ValueError, KeyError, TypeError):
            raise WrongAnswer(f"{self.name}: POST /generate answered {status}: {text[:400]}") from None
        scored = 0 if start < 0 else len(tokens) - 1 - start
        if (len(answer.ids), len(answer.steps), len(answer.prompt)) != (new_tokens, new_tokens, scored):
            raise WrongAnswer(
                f"{self.name}: expected log probabilities of {new_tokens} new and {scored} old tokens, found "
                f"{len(answer.steps)} and {len(answer.prompt)}"
            )
        return answer

    def time(self, request: Request, cached: int, what: str) -> Outcome:
        """Send one prompt, streamed; `cached` tokens of it must be in the pool."""
        (outcome,), _ = self.client.one_by_one([request], lambda _request: None, top=False)
        self.require([outcome], cached, what)
        return outcome

    def require(self, outcomes: Sequence[Outcome], cached: int, what: str) -> None:
        """Keep the outcomes; all must be answers with so many cached tokens."""
        for outcome in outcomes:
            if outcome.error and self.campaign.left() <= 0:
                raise OutOfTime(f"{self.name}: {what}")
            good = outcome.error is None and sum(outcome.cached.values()) == cached
            self.campaign.record(self.name, what, outcome, good)
            if not good:
                found = outcome.error or f"{sum(outcome.cached.values())} cached"
                raise WrongAnswer(
                    f"{self.name}, {what}, {outcome.name}: expected {cached} cached tokens, found {found}"
                )
