# SPDX-License-Identifier: Apache-2.0
"""`tardis ls`: the pages of a store, read from its header tables without its lock."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from . import choose
from .errors import EXIT_OK, CommandError
from .info import namespace_fields
from .render import human_bytes, print_json, printable, table

if TYPE_CHECKING:
    from ..store import ObjectInfo

_KEY_DIGITS = 24  # in the table; JSON has all of them
_ROW = "{:<24}  {:<32}  {:>10}  {:>10}  {:>13}  {:<16}  {:<11}"


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "ls",
        help="list stored pages",
        description="List the pages of a store. Takes no lock: it may be used while a server runs, and then shows a "
        "moment that has passed, and evicted pages until their slot is used again.",
    )
    parser.add_argument("path", nargs="?", metavar="PATH", help="folder of the store")
    choose.add_namespace(parser)
    parser.add_argument("--key", metavar="PREFIX", help="only pages whose key begins with these hexadecimal digits")
    parser.add_argument("--limit", type=int, metavar="N", help="at most N pages")
    parser.add_argument("--summary", action="store_true", help="one line for each namespace instead of each page")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the pages, or their sums."""
    from ..store import inspect

    if args.limit is not None and args.limit < 0:
        raise CommandError(f"--limit {args.limit}: expected 0 or more")
    namespaces = inspect(args.path)["namespaces"] if args.summary else []
    fingerprint = choose.fingerprint(args.path, args.namespace)
    pages = selected(args.path, None if args.key is None else choose.key_prefix(args.key), fingerprint)
    # One more than asked for tells whether something was left out.
    limited = pages if args.limit is None else itertools.islice(pages, args.limit + 1)
    limited = itertools.chain(list(itertools.islice(limited, 1)), limited)  # a store that is none: before any output
    if args.summary:
        _print_summary(limited, args, namespaces)
    elif args.json:
        _print_json(limited, args)
    else:
        _print_rows(limited, args)
    return EXIT_OK


def selected(path: str, prefix: str | None, fingerprint: bytes | None) -> Iterator[ObjectInfo]:
    """The pages whose key begins with `prefix` (hexadecimal), of one namespace or of all."""
    from ..store import list_objects

    for page in list_objects(path):
        if fingerprint is not None and page.fingerprint != fingerprint:
            continue
        if prefix is not None and not page.key.hex().startswith(prefix):
            continue
        yield page


def fields(page: ObjectInfo) -> dict[str, Any]:
    """One page for JSON. `parent`: the first 16 digits of its parent's key, null if it has none."""
    return {
        "key": page.key.hex(),
        "namespace": page.fingerprint.hex(),
        "bytes": page.payload_bytes,
        "generation": page.generation,
        "segment": page.segment,
        "slot": page.slot,
        "state": "quarantined" if page.quarantined else "stored",
        "parent": page.parent.to_bytes(8, "little").hex() if page.parent else None,
        "parts": page.parts,
        "root_digest": f"{page.root_digest:016x}",
        "flush_group": page.flush_group,
    }


def _print_rows(pages: Iterable[ObjectInfo], args: argparse.Namespace) -> None:
    print(_ROW.format("key", "namespace", "bytes", "generation", "segment/slot", "parent", "state").rstrip())
    count = total = 0
    for page in pages:
        if count == args.limit:
            print(f"... and more; --limit {args.limit} was reached", file=sys.stderr)
            break
        count += 1
        total += page.payload_bytes
        one = fields(page)
        place = f"{page.segment}/{page.slot}"
        cells = (one["key"][:_KEY_DIGITS], one["namespace"], human_bytes(page.payload_bytes), page.generation, place)
        print(_ROW.format(*cells, one["parent"] or "-", one["state"]).rstrip())
    print(f"{count} pages, {human_bytes(total)}")


def _print_json(pages: Iterable[ObjectInfo], args: argparse.Namespace) -> None:
    """Written page by page: a store may hold millions."""
    write = sys.stdout.write
    write(f'{{"path": {json.dumps(args.path)}, "pages": [')
    count, more = 0, False
    for page in pages:
        if more := count == args.limit:
            break
        write((",\n" if count else "\n") + json.dumps(fields(page)))
        count += 1
    write(f'\n], "count": {count}, "more": {json.dumps(more)}}}\n')


def _print_summary(pages: Iterable[ObjectInfo], args: argparse.Namespace, known: Iterable[Mapping[str, Any]]) -> None:
    sums: dict[str, dict[str, int]] = {}
    more = False
    for count, page in enumerate(pages):
        if more := count == args.limit:
            break
        own = sums.setdefault(page.fingerprint.hex(), {"pages": 0, "bytes": 0, "quarantined": 0})
        if page.quarantined:
            own["quarantined"] += 1
        else:
            own["pages"] += 1
            own["bytes"] += page.payload_bytes
    described = {one["fingerprint"]: namespace_fields(one) for one in known}
    rows = [
        {"namespace": fingerprint, "model": described.get(fingerprint, {}).get("model_name"), **own}
        for fingerprint, own in sorted(sums.items())
    ]
    if args.json:
        print_json({"path": args.path, "namespaces": rows, "more": more})
        return
    header = ("namespace", "model", "pages", "bytes", "quarantined")
    cells = [
        (one["namespace"], one["model"] or "(no description)", one["pages"], human_bytes(one["bytes"]),
         one["quarantined"])
        for one in rows
    ]  # fmt: skip
    print(table(header, cells, right=(2, 3, 4)) if rows else f"no pages in {printable(args.path)}")
    if more:
        print(f"... and more; --limit {args.limit} was reached", file=sys.stderr)
