# SPDX-License-Identifier: Apache-2.0
"""`tardis clear`: delete the pages of a store, or of one namespace in it, durably."""

from __future__ import annotations

import argparse

from . import choose
from .errors import EXIT_OK
from .render import human_bytes, print_json, printable


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "clear",
        help="delete all pages",
        description="Delete the pages of a store, or of one namespace. When the command returns they cannot come back. "
        "A server may be using the store.",
    )
    parser.add_argument("path", nargs="?", metavar="PATH", help="folder of the store")
    choose.add_namespace(parser)
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Delete what was named, after asking."""
    from ..store import Store, inspect

    facts = inspect(args.path)
    chosen = None if args.namespace is None else choose.namespace(facts["namespaces"], args.namespace)
    counted = facts if chosen is None else chosen
    what = f"namespace {chosen['fingerprint']} of " if chosen else ""
    if not args.yes:
        choose.confirm(
            f"Delete {counted['objects']} pages ({human_bytes(counted['payload_bytes'])}) of "
            f"{what}{printable(args.path)}?",
            "nothing deleted",
        )
    with choose.closing(Store(args.path, create=False)) as store:
        pages = store.clear(None if chosen is None else bytes.fromhex(chosen["fingerprint"]))
    if args.json:
        print_json({"path": args.path, "namespace": chosen and chosen["fingerprint"], "deleted": pages})
    else:
        print(f"deleted {pages} pages of {what}{printable(args.path)}")
    return EXIT_OK
