# SPDX-License-Identifier: Apache-2.0
"""Starts, drives and stops one real SGLang server; used by the demonstration and by the server tests.

    spec = ServerSpec(model=MODELS / "tiny-llama", port=32100, storage="tardis", extra_config={"path": "/tmp/kv"})
    with Server(spec, log=Path("server.log")) as server:
        answer = server.generate(prompt(seed=1, tokens=1536, vocabulary=1024))
        print(answer.first_token, answer.cached)

Only the standard library is used. Prompts are token ids (``--skip-tokenizer-init``), so no tokenizer is needed.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

DEMO = Path(__file__).resolve().parent
MODELS = DEMO / "models"
ADMIN_KEY = "local-admin"
TIERS = ("device", "host", "storage")


class ServerError(RuntimeError):
    """The server did not start, stopped by itself, or refused a request. The message ends with the log's last lines."""


@dataclass(frozen=True)
class ServerSpec:
    """How to start a server. Everything else is SGLang's default."""

    model: Path
    port: int
    hierarchical: bool = True
    """SGLang's HiCache; without it there is neither its DRAM tier nor storage."""
    storage: str | None = "tardis"
    extra_config: Mapping[str, object] = field(default_factory=dict)
    device: str = "cpu"
    page_size: int = 64
    max_total_tokens: int | None = 8192
    """None: the server decides."""
    hicache_ratio: float = 3.0
    layout: str | None = None
    io_backend: str | None = None
    flags: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self) -> list[str]:
        """The complete command line."""
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(self.model)]
        command += ["--load-format", "dummy", "--skip-tokenizer-init", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--page-size", str(self.page_size)]
        if self.max_total_tokens is not None:
            command += ["--max-total-tokens", str(self.max_total_tokens)]
        command += ["--enable-cache-report", "--enable-metrics", "--skip-server-warmup", "--admin-api-key", ADMIN_KEY]
        if self.hierarchical:
            command += self._hierarchical()
        if self.device == "cpu":
            command += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
            command += ["--disable-cuda-graph"]
        return command + list(self.flags)

    def _hierarchical(self) -> list[str]:
        """Flags of HiCache and its storage."""
        flags = ["--enable-hierarchical-cache", "--hicache-ratio", str(self.hicache_ratio)]
        flags += ["--hicache-write-policy", "write_through"]
        if self.layout is not None:
            flags += ["--hicache-mem-layout", self.layout]
        if self.io_backend is not None:
            flags += ["--hicache-io-backend", self.io_backend]
        if self.storage is not None:
            flags += ["--hicache-storage-backend", self.storage]
            flags += ["--hicache-storage-backend-extra-config", json.dumps(dict(self.extra_config))]
            flags += ["--hicache-storage-prefetch-policy", "wait_complete"]
        return flags

    def full_environment(self) -> dict[str, str]:
        """The environment of the server's processes."""
        environment = dict(os.environ)
        environment["TARDIS_SEEDED_WEIGHTS"] = "1"
        environment.setdefault("HF_HUB_OFFLINE", "1")
        if self.device == "cpu":
            environment["TARDIS_CPU_SUPPORT"] = "1"
            environment["SGLANG_USE_CPU_ENGINE"] = "0"
            # A visible GPU would change SGLang's choices for --device cpu.
            environment["CUDA_VISIBLE_DEVICES"] = ""
        environment.update(self.environment)
        return environment


@dataclass(frozen=True)
class Answer:
    """What the server said to one prompt."""

    prompt_tokens: int
    tokens: tuple[int, ...]
    """Generated token ids."""
    logprobs: tuple[tuple[float, int], ...]
    """The first generated token's most probable candidates: (log probability, token id), best first."""
    cached: dict[str, int]
    """Cached prompt tokens by tier: device, host, storage."""
    storage_backend: str | None
    """Name of the storage backend's class, as the server reports it; None when nothing came from storage."""
    ttft: float
    """Seconds from sending the request to the first streamed token, on the client's side."""

    @property
    def first_token(self) -> int:
        return self.tokens[0]

    @property
    def cached_tokens(self) -> int:
        return sum(self.cached.values())

    def same_first_token(self, other: Answer) -> bool:
        """Whether first token and its log probabilities are equal, bit for bit."""
        return self.first_token == other.first_token and self.logprobs == other.logprobs


def prompt(seed: int, tokens: int, vocabulary: int) -> list[int]:
    """Random token ids. The first few ids of a vocabulary are special, so they are left out."""
    generator = random.Random(seed)
    return [generator.randrange(16, vocabulary) for _ in range(tokens)]


def cached_by_a_hit(tokens: int, page_size: int) -> int:
    """Tokens that a hit on a complete prompt reports: SGLang always computes the last token, so not its page."""
    return (tokens - 1) // page_size * page_size


def processes_of_session(session: int) -> list[int]:
    """Process ids of a session that are still alive (zombies are not)."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return found


class Server:
    """One SGLang server in its own session (process group), so that nothing of it outlives :meth:`stop`."""

    def __init__(self, spec: ServerSpec, log: Path) -> None:
        self.spec = spec
        self.log = log
        self.exit_status: int | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.stop()

    # ---- life ----

    def launch(self) -> None:
        """Start the process; returns at once. See :meth:`wait_until_healthy`."""
        if self._process is not None:
            raise ServerError(f"the server on port {self.spec.port} runs already")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                self.spec.command(),
                env=self.spec.full_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def start(self, timeout: float = 240.0, progress: Callable[[float], None] | None = None) -> float:
        """Start the server and wait until it is healthy. Returns the seconds it took."""
        self.launch()
        try:
            return self.wait_until_healthy(timeout, progress)
        except BaseException:
            self.stop(signal.SIGKILL)
            raise

    def wait_until_healthy(self, timeout: float = 240.0, progress: Callable[[float], None] | None = None) -> float:
        """Wait for `/health` to answer 200. `progress` gets the seconds waited, about five times a second."""
        begin = time.monotonic()
        while (waited := time.monotonic() - begin) < timeout:
            if not self.alive():
                raise ServerError(f"the server exited with status {self.exit_status} while starting\n{self.log_tail()}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self._call("GET", "/health", timeout=2)[0] == 200:
                    return waited
            if progress is not None:
                progress(waited)
            time.sleep(0.2)
        raise ServerError(f"the server was not healthy after {timeout:.0f} s\n{self.log_tail()}")

    def wait_for_exit(self, timeout: float) -> int:
        """Wait until the server ends on its own, and return its exit status."""
        assert self._process is not None
        try:
            self.exit_status = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise ServerError(f"the server still runs after {timeout:.0f} s\n{self.log_tail()}") from None
        return self.exit_status

    def alive(self) -> bool:
        if self._process is None:
            return False
        self.exit_status = self._process.poll()
        return self.exit_status is None

    def processes(self) -> list[int]:
        """Ids of its processes that are alive."""
        return [] if self._process is None else processes_of_session(self._process.pid)

    def stop(self, how: signal.Signals = signal.SIGTERM, timeout: float = 30.0) -> None:
        """Stop all processes of the server: SIGTERM asks the main process, SIGKILL ends them all at once."""
        if self._process is None:
            return
        session = self._process.pid
        if how == signal.SIGKILL:
            self._signal_session(session, signal.SIGKILL)
        else:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(how)
        deadline = time.monotonic() + timeout
        while self._process.poll() is None or processes_of_session(session):
            if time.monotonic() > deadline:
                self._signal_session(session, signal.SIGKILL)
                deadline = time.monotonic() + 10
            time.sleep(0.05)
        self.exit_status = self._process.returncode
        self._process = None

    def close(self) -> None:
        """The same as `stop()`, for `contextlib.closing`."""
        self.stop()

    @staticmethod
    def _signal_session(session: int, how: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(session, how)
        for process in processes_of_session(session):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, how)

    # ---- requests ----

    def generate(self, ids: Sequence[int], new_tokens: int = 4, top: int = 20, timeout: float = 180.0) -> Answer:
        """Send one prompt of token ids, greedy, streamed.

        The request is encoded before the clock starts and nothing is decoded before it stops.
        """
        body = json.dumps(
            {
                "input_ids": list(ids),
                "stream": True,
                "return_logprob": True,
                "top_logprobs_num": top,
                "logprob_start_len": -1,
                "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
            }
        )
        connection = http.client.HTTPConnection("127.0.0.1", self.spec.port, timeout=timeout)
        ttft, last = None, b""
        try:
            connection.connect()
            sent = time.perf_counter()
            connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            for line in iter(response.readline, b""):
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    if ttft is None:
                        ttft = time.perf_counter() - sent
                    last = line
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"the request broke off: {error!r}\n{self.log_tail()}") from error
        finally:
            connection.close()
        meta = json.loads(last[6:]).get("meta_info") if last else None
        if response.status != 200 or ttft is None or meta is None:
            raise ServerError(f"POST /generate answered {response.status}: {last[:400]!r}\n{self.log_tail()}")
        ranks = (meta.get("output_top_logprobs") or [[]])[0]
        if len(ranks) != top:
            raise ServerError(f"expected {top} logprobs of the first token, the server sent {len(ranks)}")
        details = meta.get("cached_tokens_details") or {}
        return Answer(
            prompt_tokens=len(ids),
            tokens=tuple(entry[1] for entry in meta["output_token_logprobs"]),
            logprobs=tuple((entry[0], entry[1]) for entry in ranks),
            cached={tier: int(details.get(tier) or 0) for tier in TIERS},
            storage_backend=details.get("storage_backend"),
            ttft=ttft,
        )

    def flush_cache(self, timeout: float = 90.0) -> float:
        """Empty device and host pools, not the storage. Returns the seconds until the server did it.

        The server refuses while pages are on their way to the host pool or to storage, so after this returns everything
        that was going to be stored is stored.
        """
        begin = time.monotonic()
        while True:
            status, text = self._call("POST", "/flush_cache")
            if status == 200:
                return time.monotonic() - begin
            if time.monotonic() - begin > timeout:
                raise ServerError(f"POST /flush_cache answered {status} for {timeout:.0f} s: {text}\n{self.log_tail()}")
            time.sleep(0.02)

    def metrics(self) -> dict[str, float]:
        """Prometheus metrics by name, summed over labels."""
        values: dict[str, float] = {}
        for name, _labels, value in self.samples():
            values[name] = values.get(name, 0.0) + value
        return values

    def samples(self) -> Iterator[tuple[str, str, float]]:
        """Prometheus samples: name, labels as text, value."""
        _status, text = self._call("GET", "/metrics")
        for line in text.splitlines():
            match = re.match(r"([A-Za-z_:][\w:]*)(\{.*\})? (\S+)", line)
            if match:
                yield match[1], match[2] or "", float(match[3])

    def stored_tokens(self) -> int:
        """Tokens that this server has written to its storage since it started."""
        return int(self.metrics().get("sglang:backuped_tokens_total", 0))

    def wait_until_stored(
        self, tokens: int, timeout: float = 60.0, progress: Callable[[int], None] | None = None
    ) -> None:
        """Wait until :meth:`stored_tokens` reaches `tokens`."""
        deadline = time.monotonic() + timeout
        while (stored := self.stored_tokens()) < tokens:
            if progress is not None:
                progress(stored)
            if time.monotonic() > deadline:
                raise ServerError(f"stored {stored} of {tokens} tokens after {timeout:.0f} s\n{self.log_tail()}")
            time.sleep(0.1)
        if progress is not None:
            progress(stored)

    def wait_until(self, condition: Callable[[dict[str, float]], bool], what: str, timeout: float = 60.0) -> None:
        """Wait until the metrics meet a condition; `what` says in the error message what was waited for."""
        deadline = time.monotonic() + timeout
        while not condition(self.metrics()):
            if time.monotonic() > deadline:
                raise ServerError(f"waited {timeout:.0f} s for {what}\n{self.log_tail()}")
            time.sleep(0.1)

    # ---- storage at run time ----

    def attach_storage(self, backend: str, extra_config: Mapping[str, object]) -> tuple[int, str]:
        """Attach a storage backend. Returns HTTP status and answer."""
        return self._call(
            "PUT",
            "/hicache/storage-backend",
            {
                "hicache_storage_backend": backend,
                "hicache_storage_backend_extra_config_json": json.dumps(dict(extra_config)),
                "hicache_storage_prefetch_policy": "wait_complete",
                "hicache_write_policy": "write_through",
            },
        )

    def detach_storage(self) -> tuple[int, str]:
        """Detach the storage backend. Returns HTTP status and answer."""
        return self._call("DELETE", "/hicache/storage-backend")

    def clear_storage(self) -> tuple[int, str]:
        """Delete what the storage holds for this server. Returns HTTP status and answer."""
        return self._call("POST", "/hicache/storage-backend/clear")

    def _call(self, method: str, path: str, body: object = None, timeout: float = 60.0) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.spec.port, timeout=timeout)
        try:
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN_KEY}"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        finally:
            connection.close()

    # ---- log ----

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def log_tail(self, lines: int = 30) -> str:
        return "".join(f"  | {line}\n" for line in self.log_text().splitlines()[-lines:])
