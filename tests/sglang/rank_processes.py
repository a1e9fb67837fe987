# SPDX-License-Identifier: Apache-2.0
"""The ranks of a server as processes of their own, each with SGLang's host pool and a real backend on one store.

All processes come from one that has imported SGLang already (multiprocessing's fork server): a rank starts in
milliseconds, and nothing is shared between ranks but the store's files. What a rank is told to do is the name of a
function in ``rank_programs.py`` and its arguments.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_FOLDERS = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "demo" / "cpu_support")]
TIMEOUT = 60.0
"""Seconds that a rank may take for one call; one that hangs fails the test instead of stopping it."""


def _main(connection: Connection) -> None:
    sys.path[:0] = [folder for folder in _FOLDERS if folder not in sys.path]
    import rank_programs

    while True:
        try:
            name, arguments = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            answer = (True, getattr(rank_programs, name)(**arguments))
        except BaseException as error:
            answer = (False, (type(error).__name__, str(error), traceback.format_exc()))
        connection.send(answer)


class RankError(AssertionError):
    """A rank's call failed.

    Attributes:
        kind: name of the exception's class.
    """

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(f"{kind}: {message}\n{trace}")
        self.kind = kind
        self.message = message


class RankProcess:
    """One rank."""

    def __init__(self, context: Any) -> None:
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=_main, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def start(self, name: str, **arguments: Any) -> None:
        """Begin a call; `finish` returns its result."""
        self._connection.send((name, arguments))

    def finish(self, timeout: float = TIMEOUT) -> Any:
        """Result of the call that was begun; RankError with the rank's traceback if it raised."""
        if not wait([self._connection], timeout):
            raise RankError("TimeoutError", f"no answer within {timeout} s", "")
        good, answer = self._connection.recv()
        if not good:
            raise RankError(*answer)
        return answer

    def call(self, name: str, **arguments: Any) -> Any:
        """One call from beginning to end."""
        self.start(name, **arguments)
        return self.finish()

    def kill(self) -> None:
        """End the process as the kernel's out-of-memory killer would."""
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        """End the process; it closes nothing in an orderly way."""
        self._connection.close()
        self.process.join(10)
        if self.process.is_alive():
            self.kill()


class RankProcesses:
    """Makes ranks, and ends what is left of them."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["rank_programs"])
        self._alive: list[RankProcess] = []
        with _python_path(_FOLDERS):
            self._context.Process(target=os.getpid).start()  # starts the fork server, which imports meanwhile

    def make(self, count: int) -> list[RankProcess]:
        """So many fresh processes."""
        made = [RankProcess(self._context) for _ in range(count)]
        self._alive += made
        return made

    def close(self) -> None:
        """End all ranks."""
        for rank in self._alive:
            rank.close()
        self._alive.clear()


def each(
    ranks: list[RankProcess], name: str, arguments: list[dict[str, Any]] | None = None, **common: Any
) -> list[Any]:
    """The same call on every rank at once, with arguments of its own and common ones; the results in order."""
    for rank, own in zip(ranks, arguments or [{}] * len(ranks), strict=True):
        rank.start(name, **common, **own)
    return [rank.finish() for rank in ranks]


@contextmanager
def _python_path(folders: list[str]):
    """The fork server takes its import path from the environment only."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *sys.path])
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
