# SPDX-License-Identifier: Apache-2.0
"""The demonstration's verdicts, and the harness that it shares with the server tests; no server is started here."""

from __future__ import annotations

import importlib.util
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from server import MODELS, Answer, Server, ServerError, ServerSpec, cached_by_a_hit, processes_of_session, prompt

DEMO = Path(__file__).resolve().parents[1] / "demo"
DEVICE = Answer(
    prompt_tokens=1536,
    tokens=(7, 8),
    logprobs=((-1.0, 7), (-1.5, 3)),
    cached={"device": 1472, "host": 0, "storage": 0},
    storage_backend=None,
    ttft=0.2,
)
RESTORED = replace(DEVICE, cached={"device": 0, "host": 0, "storage": 1472}, storage_backend="TardisStorage")


@pytest.fixture(scope="module")
def demo():
    specification = importlib.util.spec_from_file_location("demo_run", DEMO / "run.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules["demo_run"] = module
    specification.loader.exec_module(module)
    yield module
    del sys.modules["demo_run"]


@pytest.mark.parametrize(
    ("restored", "problem"),
    [
        (RESTORED, None),
        (None, "nothing came from storage"),
        (DEVICE, "nothing came from storage"),
        (replace(RESTORED, cached={"device": 0, "host": 0, "storage": 64}), "64 tokens were cached"),
        (replace(RESTORED, tokens=(9, 8)), "first token 9"),
        (replace(RESTORED, logprobs=((-1.0, 7), (-1.5000001, 3))), "log probabilities differ"),
        (replace(RESTORED, tokens=(7, 9)), None),  # later tokens are not compared
    ],
)
def test_verdict(demo, restored, problem):
    outcome = demo.Outcome("1", cold=DEVICE, device=DEVICE, restored=restored)
    assert outcome.problem == problem or (problem and problem in outcome.problem)


def test_prompts_are_reproducible_and_in_the_vocabulary():
    assert prompt(1, 100, 1024) == prompt(1, 100, 1024) != prompt(2, 100, 1024)
    assert all(16 <= token < 1024 for token in prompt(3, 1000, 1024))


@pytest.mark.parametrize(("tokens", "cached"), [(1536, 1472), (1537, 1536), (1599, 1536), (64, 0), (65, 64)])
def test_a_hit_never_covers_the_last_token(tokens, cached):
    assert cached_by_a_hit(tokens, 64) == cached


class Script(ServerSpec):
    """A server that is any Python program."""

    def command(self):
        return [sys.executable, "-c", str(self.model)]


def test_stop_ends_grandchildren_too(tmp_path):
    program = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    server = Server(Script(model=program + "; print('up', flush=True); time.sleep(600)", port=32199), tmp_path / "log")
    server.launch()
    session = server._process.pid
    while "up" not in server.log_text():
        assert server.alive()
    assert len(processes_of_session(session)) == 2
    server.stop(signal.SIGKILL)
    assert processes_of_session(session) == []
    assert server.exit_status == -signal.SIGKILL


def test_a_server_that_ends_while_starting_is_reported_with_its_log(tmp_path):
    server = Server(Script(model="print('no such model'); raise SystemExit(3)", port=32199), tmp_path / "log")
    with pytest.raises(ServerError, match=r"status 3 while starting\n  \| no such model"):
        server.start(timeout=30)
    server.stop()


def test_every_model_has_a_configuration():
    assert {folder.name for folder in MODELS.iterdir()} == {"tiny-llama", "small-llama", "gpu-llama"}
