# SPDX-License-Identifier: Apache-2.0
"""`tardis rm`: delete the pages whose keys begin with given digits, durably."""

from __future__ import annotations

import argparse

from . import choose
from .errors import EXIT_OK, CommandError
from .ls import selected
from .render import human_bytes, print_json, printable


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "rm",
        help="delete pages by key or namespace",
        description="Delete the pages whose key begins with given digits, the pages of one namespace, or those that "
        "are both. When the command returns they cannot come back. A server may be using the store.",
    )
    parser.add_argument("path", nargs="?", metavar="PATH", help="folder of the store")
    parser.add_argument("--key", metavar="PREFIX", help="the key's first hexadecimal digits, or all 64 of them")
    choose.add_namespace(parser)
    parser.add_argument("--dry-run", action="store_true", help="count only")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Delete what was named, after asking."""
    from ..store import Store

    if args.key is None and args.namespace is None:
        raise CommandError("say what to delete: --key PREFIX, --namespace FINGERPRINT or both (`tardis clear`: all)")
    prefix = None if args.key is None else choose.key_prefix(args.key)
    fingerprint = choose.fingerprint(args.path, args.namespace)
    found = count = 0
    for page in selected(args.path, prefix, fingerprint):
        count += 1
        found += page.payload_bytes
    what = " ".join(
        part
        for part in (
            prefix and f"with keys {prefix}{'...' if len(prefix) < 64 else ''}",
            fingerprint and f"of namespace {fingerprint.hex()}",
            f"in {printable(args.path)}",
        )
        if part
    )
    result = {
        "path": args.path,
        "key": prefix,
        "namespace": fingerprint and fingerprint.hex(),
        "found": count,
        "found_bytes": found,
        "dry_run": args.dry_run,
        "deleted": 0,
    }
    if not args.dry_run:
        if not args.yes:
            choose.confirm(f"Delete {count} pages ({human_bytes(found)}) {what}?", "nothing deleted")
        with choose.closing(Store(args.path, create=False)) as store:
            # Also if none was found: one may have been stored in the meantime.
            result["deleted"] = store.remove(prefix or "", fingerprint)
    if args.json:
        print_json(result)
    elif args.dry_run:
        print(f"would delete {count} pages ({human_bytes(found)}) {what}")
    else:
        print(f"deleted {result['deleted']} pages {what}")
    return EXIT_OK
