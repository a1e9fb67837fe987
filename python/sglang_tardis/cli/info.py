# SPDX-License-Identifier: Apache-2.0
"""`tardis info`: what is in a store, read without taking its lock."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import EXIT_OK
from .render import human_bytes, print_json, printable, table


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "info",
        help="show what is in a store",
        description="Show what is in a store. Takes no lock: it may be used while a server runs, and then shows a "
        "moment that has passed.",
    )
    parser.add_argument("path", nargs="?", metavar="PATH", help="folder of the store")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the store's description."""
    from ..store import inspect

    facts = inspect(args.path)
    print_json(facts) if args.json else print(describe(facts))
    return EXIT_OK


def namespace_fields(namespace: Mapping[str, Any]) -> Mapping[str, Any]:
    """The readable identity of a namespace; empty if its text is missing or damaged."""
    try:
        fields = json.loads(namespace.get("description") or "{}")
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _paths(paths: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each folder of a store that has several."""
    if len(paths) < 2:
        return []
    labels = ["paths", *[""] * (len(paths) - 1)]
    return [
        f"{label:12} {printable(path['path'])} ({path['state']}, {path['segments']} segments)"
        for label, path in zip(labels, paths, strict=True)
    ]


def describe(facts: Mapping[str, Any]) -> str:
    """The human form of `store.inspect`'s answer."""
    owner = facts.get("owner")
    lines = [
        f"store        {printable(facts['path'])}",
        f"format       {facts['format_version']}, uuid {printable(facts['uuid'])}",
        f"in use by    {printable(owner) if owner else 'nobody'}",
        f"capacity     {human_bytes(facts['capacity_bytes'])}, of which {human_bytes(facts['allocated_bytes'])} "
        "allocated on disk",
        f"segments     {facts['segments']} of {human_bytes(facts['segment_bytes'])} "
        f"({facts['segments_dirty']} dirty, {facts['segments_unreadable']} unreadable)",
        f"pages        {facts['objects']} in {facts['slots']} slots, {human_bytes(facts['payload_bytes'])} "
        f"({facts['slots_free']} slots free, {facts['slots_quarantined']} quarantined, {facts['slots_bad']} bad)",
    ]
    lines += _paths(facts["paths"])
    namespaces = facts["namespaces"]
    if not namespaces:
        return "\n".join([*lines, "namespaces   none"])
    rows = []
    for namespace in namespaces:
        fields = namespace_fields(namespace)
        rank = fields.get("tp_rank")
        rows.append(
            (
                namespace["fingerprint"],
                fields.get("model_name", "(no description)"),
                fields.get("kv_dtype", ""),
                fields.get("layers", ""),
                fields.get("page_size", ""),
                f"{'all' if rank is None else rank}/{fields['tp_size']}" if "tp_size" in fields else "",
                fields.get("layout", ""),
                str(fields.get("weights", ""))[:24],
                namespace["objects"],
                human_bytes(namespace["payload_bytes"]),
            )
        )
    header = ("namespace", "model", "kv dtype", "layers", "page", "tp", "layout", "weights", "pages", "bytes")
    return "\n".join([*lines, "", table(header, rows, right=(3, 4, 8, 9))])
