# SPDX-License-Identifier: Apache-2.0
"""The demonstration's server (demo/server.py) with what a measurement needs: a launcher, waiting."""

from __future__ import annotations

import contextlib
import http.client
import pathlib
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "demo"))

from server import Answer, Server, ServerError, ServerSpec, cached_by_a_hit, prompt

__all__ = ["Answer", "BenchServer", "ServerError", "ServerSpec", "cached_by_a_hit", "prompt"]


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

    def call(self, method: str, path: str, body: object = None, timeout: float = 60.0) -> tuple[int, str]:
        """Send a request with JSON. Returns status and text."""
        return self._call(method, path, body, timeout)

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
