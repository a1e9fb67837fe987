# SPDX-License-Identifier: Apache-2.0
"""Entry of the command `tardis`."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence

from .. import __version__
from ..config import ConfigError, load_config
from . import bench, clear, doctor, info, ls, nvme, nvmed, prune, rm, sglang_patch, verify
from .errors import EXIT_ERROR, CommandError


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="tardis",
        description="Look at, check, prune and measure a sglang-tardis store, and find out how it will do its I/O.",
        epilog="PATH is the folder of the store (the first, if it has several); without it, the one that TARDIS_CONFIG "
        "or the defaults name.",
    )
    parser.add_argument("--version", action="version", version=f"tardis {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (info, ls, verify, rm, prune, clear, bench, doctor, nvme, nvmed, sglang_patch):
        module.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. Errors are one line on stderr."""
    _prepare_streams()
    args = build_parser().parse_args(argv)
    try:
        if getattr(args, "path", "") is None and args.command != "doctor":
            args.path = load_config().folder
        status = args.run(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return _fail(args.command, "interrupted", 130)
    except BrokenPipeError:  # the reader of a pipe has gone, as in `tardis info | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (CommandError, ConfigError, OSError) as error:
        return _fail(args.command, str(error))
    except ImportError as error:
        return _fail(args.command, f"the C++ core of sglang-tardis cannot be loaded ({error}); reinstall the package")
    except Exception as error:
        if type(error).__module__ == "sglang_tardis.store":  # its errors; importing it here would need the core
            return _fail(args.command, str(error))
        raise


def _prepare_streams() -> None:
    """A closed stream must not become a file of the store; a character unknown to the terminal is no error."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            while os.open(os.devnull, os.O_RDWR) < number:
                pass
            setattr(sys, name, open(os.devnull, "w" if number else "r"))
        elif number and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _fail(command: str, message: str, status: int = EXIT_ERROR) -> int:
    with contextlib.suppress(OSError):  # the exit status still tells
        print(f"tardis {command}: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
