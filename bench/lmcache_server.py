# SPDX-License-Identifier: Apache-2.0
"""LMCache's own server, which SGLang's `--enable-lmcache` talks to: a DRAM tier (L1) and files below it (L2)."""

from __future__ import annotations

import contextlib
import http.client
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from serving_session import folder_bytes
from sglang_server import ServerError

WATERMARK = 0.95
"""Of its memory, what LMCache may fill before it evicts."""


class LmcacheServer:
    """One server, started and stopped here.

    Args:
        folder: of its files, through its adapter `fs_native`.
        dram: bytes that its DRAM tier is to hold.
        page: tokens of SGLang's pages. Chunks are as long (its default is 256), so that a hit has as many tokens as a
            hit on the device, and the same answer.
        port: of requests; the next one is that of its HTTP interface.
        more: further flags.
    """

    def __init__(
        self, folder: pathlib.Path, dram: int, page: int, port: int, out: pathlib.Path, more: Sequence[str] = ()
    ) -> None:
        self.folder, self.port, self.log = folder, port, out / "lmcache-server.log"
        self.config = out / "lmcache.yaml"
        """SGLang's `--lmcache-config-file`."""
        adapter = {"type": "fs_native", "base_path": str(folder), "num_workers": 16}
        self.command = [
            *(sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1", "--port", str(port)),
            *("--http-host", "127.0.0.1", "--http-port", str(port + 1), "--chunk-size", str(page)),
            *("--l1-size-gb", f"{dram / WATERMARK / 2**30:.3f}", "--eviction-trigger-watermark", str(WATERMARK)),
            *("--eviction-policy", "LRU", "--l2-adapter", json.dumps(adapter)),
            *("--supported-transfer-mode", "auto", "--disable-metrics", *more),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, environment: Mapping[str, str], timeout: float) -> None:
        """Start it and wait until it answers."""
        self.config.write_text(f"mp_host: 127.0.0.1\nmp_port: {self.port}\n", encoding="utf-8")
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                self.command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        end = time.monotonic() + timeout
        while time.monotonic() < end and self._process.poll() is None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self._call("GET", "/healthcheck")[0] == 200:
                    return
            time.sleep(0.2)
        state = self._process.poll()
        self.stop()
        said = self.log.read_text(encoding="utf-8", errors="replace")[-1500:]
        raise ServerError(
            f"LMCache's server {'did not answer' if state is None else f'ended with status {state}'}\n{said}"
        )

    def stop(self) -> None:
        """End it."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def forget_memory(self) -> None:
        """Empty its DRAM tier, not the files."""
        status, text = self._call("POST", "/cache/clear")
        if status != 200:
            raise ServerError(f"POST /cache/clear answered {status}: {text[:300]}")

    def stored_bytes(self) -> int:
        """Bytes of its files."""
        return folder_bytes(self.folder)

    def _call(self, method: str, path: str) -> tuple[int, str]:
        connection: Any = http.client.HTTPConnection("127.0.0.1", self.port + 1, timeout=30)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace")
        finally:
            connection.close()
