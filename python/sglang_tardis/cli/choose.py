# SPDX-License-Identifier: Apache-2.0
"""What several commands share: naming namespaces and keys by their first digits, asking before something is deleted."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ..config import parse_size
from .errors import CommandError
from .render import printable

_SHORTEST_NAMESPACE = 4
_KEY_DIGITS = 64
_HEXADECIMAL = frozenset("0123456789abcdef")


def add_namespace(parser: argparse.ArgumentParser) -> None:
    """The option --namespace."""
    parser.add_argument(
        "--namespace",
        metavar="FINGERPRINT",
        help=f"only this namespace: as `tardis info` shows it, or its first digits (at least {_SHORTEST_NAMESPACE})",
    )


def namespace(namespaces: Sequence[Mapping[str, Any]], prefix: str) -> Mapping[str, Any]:
    """The one namespace whose fingerprint begins like that; CommandError if there is none or several."""
    if len(prefix) < _SHORTEST_NAMESPACE:
        raise CommandError(f"--namespace {printable(prefix)}: give at least {_SHORTEST_NAMESPACE} digits")
    found = [one for one in namespaces if one["fingerprint"].startswith(prefix.lower())]
    if len(found) != 1:
        known = ", ".join(one["fingerprint"] for one in (found or namespaces)[:8]) or "none"
        raise CommandError(
            f"--namespace {printable(prefix)}: {len(found)} namespaces begin like that; there are: {known}"
        )
    return found[0]


def fingerprint(path: str, prefix: str | None) -> bytes | None:
    """Of the namespace in the store at `path` that --namespace names; None without the option."""
    from ..store import inspect

    return None if prefix is None else bytes.fromhex(namespace(inspect(path)["namespaces"], prefix)["fingerprint"])


def key_prefix(text: str) -> str:
    """Checks the beginning of a key, 1 to 64 hexadecimal digits; CommandError otherwise."""
    digits = text.lower()
    if not 0 < len(digits) <= _KEY_DIGITS or not _HEXADECIMAL.issuperset(digits):
        raise CommandError(f"--key {printable(text)!r}: expected 1 to {_KEY_DIGITS} hexadecimal digits")
    return digits


def size(option: str, text: str) -> int:
    """Bytes of a size such as 200GiB; CommandError names the option."""
    try:
        return parse_size(int(text) if text.isdecimal() else text)
    except ValueError as error:
        raise CommandError(f"{option} {printable(text)}: {error}; expected bytes or a size such as 200GiB") from None


def confirm(question: str, unchanged: str) -> None:
    """Ask on the terminal; CommandError unless the answer is yes. `unchanged`: what is told then."""
    if not sys.stdin.isatty():
        raise CommandError("nobody can be asked here (stdin is no terminal); add --yes to go on without asking")
    sys.stderr.write(f"{question} [y/N] ")  # not to stdout, which may hold JSON
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandError(unchanged)


class closing:
    """contextlib.closing, but an error while closing must not hide the one that came before."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __enter__(self) -> Any:
        return self._store

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self._store.close()
        except Exception:
            if kind is None:
                raise
