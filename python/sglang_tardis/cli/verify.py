# SPDX-License-Identifier: Apache-2.0
"""`tardis verify`: read every header and every page, and compare with their digests."""

from __future__ import annotations

import argparse
import json
import signal

from .errors import EXIT_OK, EXIT_PROBLEMS
from .render import Progress, human_bytes, printable


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "verify",
        help="read everything and check it",
        description="Read every header and every page of a store and check them against their digests. No server may "
        "be using it. Exit status: 0 clean, 1 problems found, 2 the check could not be made.",
    )
    parser.add_argument("path", nargs="?", metavar="PATH", help="folder of the store")
    parser.add_argument(
        "--repair", action="store_true", help="quarantine corrupt pages; free broken headers and what a crash cut short"
    )
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check the store and print the report."""
    from ..store import TardisError, verify

    progress = Progress("verify")
    try:
        with _Interrupt() as interrupt:
            report, problems = verify(
                args.path,
                repair=args.repair,
                progress=lambda done, total: progress(done, total) and not interrupt.asked,
            )
    except TardisError:
        if interrupt.asked:  # it stopped because it was told to
            raise KeyboardInterrupt from None
        raise
    finally:
        progress.end()
    faults = report["bad_headers"] + report["bad_payloads"] + report["unreadable_segments"]
    clean = not problems and not faults
    if args.json:
        print(json.dumps({"clean": clean, "repair": args.repair, "report": report, "problems": problems}, indent=2))
        return EXIT_OK if clean else EXIT_PROBLEMS
    for problem in problems:
        print(printable(problem))
    print(
        f"{report['objects']} pages ({human_bytes(report['bytes'])}) in {report['segments']} segments were checked: "
        f"{report['bad_payloads']} corrupt pages, {report['bad_headers']} bad headers, "
        f"{report['unreadable_segments']} unreadable segments; {report['torn']} cut short by a crash (no fault), "
        f"{report['free_slots']} slots free, {report['quarantined']} quarantined before"
    )
    if clean:
        print("clean")
    elif args.repair:
        print("problems found; corrupt pages are quarantined now, broken headers are free slots")
    else:
        print("problems found; corrupt pages are never served, `tardis verify --repair` takes them out")
    return EXIT_OK if clean else EXIT_PROBLEMS


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
