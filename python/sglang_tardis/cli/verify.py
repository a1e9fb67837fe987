# SPDX-License-Identifier: Apache-2.0
"""`tardis verify`: read every header and every page, and compare with their digests."""

from __future__ import annotations

import argparse
import signal
import sys
from typing import Any

from .errors import EXIT_OK, EXIT_PROBLEMS
from .render import Progress, human_bytes, print_json, printable

_FAULTS = ("bad_headers", "bad_payloads", "unreadable_segments")


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "verify",
        help="read everything and check it",
        description="Read every header and every page of a store and check them against their digests. While a server "
        "uses the store nothing is locked or stopped, and what cannot be judged then (pages being written, or left by "
        "evictions) is counted apart. Exit status: 0 clean, 1 problems found, 2 the check could not be made.",
    )
    parser.add_argument("path", nargs="?", metavar="PATH", help="folder of the store")
    parser.add_argument(
        "--repair",
        action="store_true",
        help="quarantine corrupt pages and free broken headers; unless a server is running also what a crash left",
    )
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check the store and print the report."""
    from ..store import StoreBusyError, TardisError, inspect, verify, verify_live
    from .live_repair import repair

    progress = Progress("verify")
    user = inspect(args.path)["owner"]
    try:
        with _Interrupt() as interrupt:

            def step(done: int, total: int) -> bool:
                return progress(done, total) and not interrupt.asked

            try:
                if not user:
                    report, problems = verify(args.path, repair=args.repair, progress=step)
            except StoreBusyError:  # somebody has just opened it
                user = inspect(args.path)["owner"] or "another process"
            if user:
                print(f"in use by {printable(user)}: checked as it is, nobody is stopped", file=sys.stderr)
                report, problems = repair(args.path, step) if args.repair else verify_live(args.path, progress=step)
    except TardisError:
        if interrupt.asked:  # it stopped because it was told to
            raise KeyboardInterrupt from None
        raise
    finally:
        progress.end()
    clean = not problems and not any(report.get(fault) for fault in _FAULTS)
    if args.json:
        print_json(
            {"clean": clean, "repair": args.repair, "in_use_by": user or None, "report": report, "problems": problems}
        )
        return EXIT_OK if clean else EXIT_PROBLEMS
    for problem in problems:
        print(printable(problem))
    print(_in_words(report, bool(user), args.repair))
    print(_outcome(clean, args.repair))
    return EXIT_OK if clean else EXIT_PROBLEMS


def _in_words(report: dict[str, Any], live: bool, repaired: bool) -> str:
    if live and repaired:
        return (
            f"{report['objects']} pages ({human_bytes(report['bytes'])}) were read through the store: "
            f"{report['bad_payloads']} corrupt, {report['bad_headers']} broken headers; "
            f"{report['gone']} were gone by then, {report['unknown']} belong to namespaces without a description and "
            "were not read"
        )
    torn = "not to be judged now (being written, or left by an eviction)" if live else "cut short by a crash (no fault)"
    return (
        f"{report['objects']} pages ({human_bytes(report['bytes'])}) in {report['segments']} segments were checked: "
        f"{report['bad_payloads']} corrupt pages, {report['bad_headers']} bad headers, "
        f"{report['unreadable_segments']} unreadable segments; {report['torn']} {torn}, "
        f"{report['free_slots']} slots free, {report['quarantined']} quarantined before"
    )


def _outcome(clean: bool, repaired: bool) -> str:
    if clean:
        return "clean"
    if not repaired:
        return "problems found; corrupt pages are never served, `tardis verify --repair` takes them out"
    return "problems found; corrupt pages are quarantined now, broken headers are free slots"


class _Interrupt:
    """Ctrl-C as a flag: an exception cannot pass through the core, which calls back from its own loop."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> _Interrupt:
        try:
            self._before = signal.signal(signal.SIGINT, self._ask)
        except ValueError:  # not the main thread
            self._before = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _ask(self, *_: object) -> None:
        self.asked = True
