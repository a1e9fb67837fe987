# SPDX-License-Identifier: Apache-2.0
"""`tardis prune`: evict the pages that would be evicted next, down to a size."""

from __future__ import annotations

import argparse
from typing import Any

from . import choose
from .errors import EXIT_OK, CommandError
from .ls import selected
from .render import human_bytes, print_json, printable


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "prune",
        help="evict the coldest pages",
        description="Evict the pages that would be evicted next, until the rest fits a size. The files keep their "
        "size: the freed slots are used again. As after every eviction, a crash may bring a page back; `tardis rm` "
        "deletes for good. A server may be using the store.",
    )
    parser.add_argument("path", nargs="?", metavar="PATH", help="folder of the store")
    goal = parser.add_mutually_exclusive_group(required=True)
    goal.add_argument("--to", metavar="SIZE", help="bytes of pages that may stay, such as 200GiB")
    goal.add_argument("--percent", type=float, metavar="P", help="evict P percent of the bytes stored now")
    choose.add_namespace(parser)
    parser.add_argument("--dry-run", action="store_true", help="say what would be done")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Evict, after asking."""
    from ..store import Store

    if args.percent is not None and not 0 <= args.percent <= 100:
        raise CommandError(f"--percent {args.percent:g}: expected 0 to 100")
    limit = None if args.to is None else choose.size("--to", args.to)
    fingerprint = choose.fingerprint(args.path, args.namespace)
    with choose.closing(Store(args.path, create=False)) as store:
        stored = _stored_bytes(store, fingerprint)
        target = limit if limit is not None else int(stored * (100 - args.percent) / 100)
        what = f"namespace {fingerprint.hex()} of {printable(args.path)}" if fingerprint else printable(args.path)
        result: dict[str, Any] = {
            "path": args.path,
            "namespace": fingerprint and fingerprint.hex(),
            "stored_bytes": stored,
            "target_bytes": target,
            "dry_run": args.dry_run,
            "evicted": 0,
        }
        plan = f"from {human_bytes(stored)} to at most {human_bytes(target)}"
        if not args.dry_run and target < stored:
            if not args.yes:
                choose.confirm(f"Evict pages of {what}, {plan}?", "nothing evicted")
            result["evicted"] = store.prune(target, fingerprint)
            result["stored_bytes"] = _stored_bytes(store, fingerprint)
    if args.json:
        print_json(result)
    elif args.dry_run:
        print(f"would evict pages of {what}, {plan}" if target < stored else f"nothing to evict: {plan}")
    else:
        left = human_bytes(result["stored_bytes"])
        print(f"evicted {result['evicted']} pages of {what}; {left} are left")
    return EXIT_OK


def _stored_bytes(store: Any, fingerprint: bytes | None) -> int:
    """Bytes of pages that can be read; of one namespace by listing, which may count evicted pages as well."""
    if fingerprint is None:
        return store.stats()["payload_bytes"]
    return sum(page.payload_bytes for page in selected(store.path, None, fingerprint) if not page.quarantined)
