# SPDX-License-Identifier: Apache-2.0
"""`tardis sglang-patch`: make tardis a storage backend of the installed SGLang itself, and undo it."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..patching import PatchError, ReleasePatch, Tree, change, examine, find_package, load_patches
from ..patching.change import refusal
from .errors import EXIT_OK, EXIT_PROBLEMS, CommandError
from .render import printable

_IN_WORDS = {
    "original": "as released",
    "patched": "patched",
    "partial": "half patched: a change was interrupted; apply and revert both go on from here",
    "unknown": "not recognised",
}


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "sglang-patch",
        help="patch the installed SGLang where its plugins do not reach",
        description="Change the source files of the installed SGLang so that tardis is one of its own storage "
        "backends: needed for Ray schedulers and for programs that read the command line before they load plugins. "
        "Stop its servers first. Files are recognised by their SHA-256; a tree that is not recognised is never "
        "changed. Exit status: 0 done, or nothing to do; 1 (status) half patched or not recognised; 2 refused.",
    )
    parser.add_argument("action", choices=("status", "apply", "revert"), help="what to do")
    parser.add_argument(
        "--site", metavar="DIR", help="folder that holds the package sglang; by default the one this Python imports"
    )
    parser.add_argument("--json", action="store_true", help="print the outcome as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Look, or change; print the state afterwards."""
    try:
        patches = load_patches()
        package = find_package(args.site)
        if args.action == "status":
            tree, changed = examine(package, patches), []
        else:
            tree, changed = change(package, patches, args.action)
    except PatchError as error:
        raise CommandError(printable(error)) from error
    if args.json:
        print(json.dumps(_facts(args.action, tree, changed, patches), indent=2))
    else:
        _print(args.action, tree, changed, patches)
    return EXIT_OK if tree.state in ("original", "patched") else EXIT_PROBLEMS


def _facts(action: str, tree: Tree, changed: list[str], patches: list[ReleasePatch]) -> dict[str, Any]:
    return {
        "action": action,
        "package": str(tree.package),
        "version": tree.version,
        "release": tree.release,
        "state": tree.state,
        "changed": changed,
        "files": [file._asdict() for file in tree.files],
        "patches": [patch.release for patch in patches],
    }


def _print(action: str, tree: Tree, changed: list[str], patches: list[ReleasePatch]) -> None:
    if action != "status" and not changed:
        print("nothing to do")
    for path in changed:
        print(f"{'patched' if action == 'apply' else 'restored'}  {path}")
    print(f"SGLang {tree.release or tree.version or '?'} in {printable(tree.package)}: {_IN_WORDS[tree.state]}")
    if action == "status":
        for file in tree.files:
            print(f"  {file.state:8}  {file.path}")
        if tree.state == "unknown":
            print(printable(refusal(tree, patches)))
