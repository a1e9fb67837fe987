# SPDX-License-Identifier: Apache-2.0
"""The demonstration's server (demo/server.py) with what a measurement needs: exact timing, a launcher, waiting."""

from __future__ import annotations

import contextlib
import http.client
import json
import pathlib
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "demo"))

from server import Answer, Server, ServerError, ServerSpec, cached_by_a_hit, prompt

__all__ = ["Answer", "BenchServer", "ServerError", "ServerSpec", "cached_by_a_hit", "prompt"]

TIERS = ("device", "host", "storage")


class BenchServer(Server):
    """One SGLang server under measurement.

    `launcher`: None starts the server here. Otherwise a command that is called as `LAUNCHER -b -p PORT -t SECONDS
    -l LOG -- FLAG...`, returns 0 once the server answers /health, and stops it on `LAUNCHER --stop`.
    """

    def __init__(self, spec: ServerSpec, log: pathlib.Path, launcher: str | None = None) -> None:
        super().__init__(spec, log)
        self._launcher = shlex.split(launcher) if launcher else None

    def start(self, timeout: float = 240.0, progress: Callable[[float], None] | None = None) -> float:
        """Start the server and wait until it is healthy. Returns the seconds it took."""
        if self._launcher is None:
            return super().start(timeout, progress)
        begin = time.monotonic()
        flags = self.spec.command()[3:]
        command = [
            *self._launcher,
            "-b",
            "-p",
            str(self.spec.port),
            "-t",
            str(int(timeout)),
            "-l",
            str(self.log),
            "--",
            *flags,
        ]
        if subprocess.run(command, env=self.spec.full_environment(), check=False).returncode:
            raise ServerError(f"{shlex.join(self._launcher)} could not start the server\n{self.log_tail()}")
        return time.monotonic() - begin

    def alive(self) -> bool:
        """Whether the server process runs; a launched server is asked."""
        if self._launcher is None:
            return super().alive()
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self._call("GET", "/health", timeout=10)[0] == 200
        return False

    def stop(self, *arguments: Any, **options: Any) -> None:
        """Stop all processes of the server."""
        if self._launcher is None:
            super().stop(*arguments, **options)
        else:
            subprocess.run([*self._launcher, "--stop"], check=False)

    def generate(self, ids: Sequence[int], new_tokens: int = 8, top: int = 20, timeout: float = 180.0) -> Answer:
        """Send one prompt. The request is encoded before the clock starts and nothing is decoded before it stops."""
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

    def attach(self, backend: str, extra_config: dict[str, Any]) -> float:
        """Attach a storage backend. Returns the seconds it took."""
        begin = time.monotonic()
        status, text = self.attach_storage(backend, extra_config)
        if status != 200:
            raise ServerError(f"attaching {backend} answered {status}: {text}\n{self.log_tail()}")
        return time.monotonic() - begin

    def detach(self, timeout: float = 60.0) -> None:
        """Detach the storage backend; waits until the server is idle."""
        begin = time.monotonic()
        while True:
            status, text = self.detach_storage()
            if status == 200:
                return
            if time.monotonic() - begin > timeout:
                raise ServerError(f"detaching answered {status} for {timeout:.0f} s: {text}\n{self.log_tail()}")
            time.sleep(0.1)
