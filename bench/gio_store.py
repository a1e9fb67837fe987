# SPDX-License-Identifier: Apache-2.0
"""Reads of a store's data files through the software controller, by its threads and the size of commands. No GPU.

Drives `tardis_gio_store_bench` (cpp/tests): a host thread or two keep the rings of a gio session full and touch no
data themselves, so that what is measured is what the threads of the controller copy. Each kind of command is compared
with what was stored first. The limit is what as many plain threads reach in the same run, the best of pread, copies
from a mapping of the files, and the same by streaming stores. On a tmpfs all of it is copies of memory.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

from common import (
    Report,
    add_common_arguments,
    add_program_argument,
    add_program_row,
    machine_facts,
    required_program,
    run_program,
)

NAME = "tardis_gio_store_bench"


def main() -> int:
    """Run the program, adding its rows as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    add_program_argument(parser, NAME)
    parser.add_argument("--folder", type=pathlib.Path, default="/dev/shm", help="where the store is made")
    parser.add_argument("--mib", type=int, help="size of the store; default: 16384, with --quick 256")
    parser.add_argument("--threads", default=None, help="of the controller, one after the other; default: 1,4,8,12")
    parser.add_argument("--clients", type=int, default=2, help="threads that keep the rings full")
    arguments = parser.parse_args()
    program = required_program(parser, arguments.program, NAME)
    report = Report(arguments.json, machine_facts(arguments.folder))
    quick = arguments.quick

    return run_program(
        [
            str(program.absolute()),
            f"folder={arguments.folder}",
            f"size_mib={arguments.mib or (256 if quick else 16384)}",
            f"threads={arguments.threads or ('1' if quick else '1,4,8,12')}",
            f"clients={arguments.clients}",
            f"ms={50 if quick else 400}",
        ],
        lambda row: add_program_row(report, row),
    )


if __name__ == "__main__":
    sys.exit(main())
