# SPDX-License-Identifier: Apache-2.0
"""`tardis clear`: delete the pages of a store, or of one namespace in it, durably."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import EXIT_OK, CommandError
from .render import human_bytes, printable

_SHORTEST_PREFIX = 4


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "clear",
        help="delete stored pages",
        description="Delete the pages of a store, or of one namespace. When the command returns they cannot come back. "
        "No server may be using the store (POST /hicache/storage-backend/clear empties one in use).",
    )
    parser.add_argument("path", nargs="?", metavar="PATH", help="folder of the store")
    parser.add_argument(
        "--namespace",
        metavar="FINGERPRINT",
        help=f"only this namespace: as `tardis info` shows it, or its first digits (at least {_SHORTEST_PREFIX})",
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Delete what was named, after asking."""
    from ..store import Store, inspect

    facts = inspect(args.path)
    chosen = None if args.namespace is None else _choose(facts["namespaces"], args.namespace)
    counted = facts if chosen is None else chosen
    what = f"namespace {chosen['fingerprint']} of " if chosen else ""
    if not args.yes:
        _ask(
            f"Delete {counted['objects']} pages ({human_bytes(counted['payload_bytes'])}) of "
            f"{what}{printable(args.path)}? [y/N] "
        )
    with _closing(Store(args.path, create=False)) as store:
        pages = store.clear(None if chosen is None else bytes.fromhex(chosen["fingerprint"]))
    print(f"deleted {pages} pages of {what}{printable(args.path)}")
    return EXIT_OK


class _closing:
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


def _choose(namespaces: Sequence[Mapping[str, Any]], prefix: str) -> Mapping[str, Any]:
    if len(prefix) < _SHORTEST_PREFIX:
        raise CommandError(f"--namespace {printable(prefix)}: give at least {_SHORTEST_PREFIX} digits")
    found = [one for one in namespaces if one["fingerprint"].startswith(prefix.lower())]
    if len(found) != 1:
        known = ", ".join(one["fingerprint"] for one in (found or namespaces)[:8]) or "none"
        raise CommandError(
            f"--namespace {printable(prefix)}: {len(found)} namespaces begin like that; there are: {known}"
        )
    return found[0]


def _ask(question: str) -> None:
    if not sys.stdin.isatty():
        raise CommandError("nobody can be asked here (stdin is no terminal); add --yes to delete without asking")
    try:
        answer = input(question)
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        raise CommandError("nothing deleted")
