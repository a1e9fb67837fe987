# SPDX-License-Identifier: Apache-2.0
"""`tardis nvmed`: the process that has an NVMe drive, for others that use it (docs/nvmed.md)."""

from __future__ import annotations

import argparse
import contextlib
import grp
import os
import pwd
import resource
import signal
import socket
import sys
import threading

from . import choose
from .errors import EXIT_OK, CommandError

_ENDS = (signal.SIGTERM, signal.SIGINT)
_LOOK_SECONDS = 0.5  # how often the main thread looks whether the broker still serves


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "nvmed",
        help="have an NVMe drive for several processes",
        description="Open an NVMe drive through VFIO and let other processes use ranges of it, on queues of their own. "
        "Clients are processes of the same user, and of a group. Serves until SIGTERM or SIGINT.",
    )
    parser.add_argument("--device", required=True, metavar="PCI", help="address of the drive, like 0000:81:00.0")
    parser.add_argument("--socket", required=True, metavar="PATH", help="where clients connect")
    parser.add_argument("--group", help="a group whose members may be clients too (name or number)")
    parser.add_argument("--user", help="whose process this becomes once the drive is open (name or number; needs root)")
    parser.add_argument("--clients", type=_count, metavar="N", help="clients at once")
    parser.add_argument("--queues", type=_count, metavar="N", help="queue pairs of all clients together")
    parser.add_argument("--client-queues", type=_count, metavar="N", help="queue pairs of a client")
    parser.add_argument("--client-ranges", type=_count, metavar="N", help="ranges of blocks of a client")
    parser.add_argument("--client-regions", type=_count, metavar="N", help="mapped ranges of memory of a client")
    parser.add_argument("--client-bytes", metavar="SIZE", help="queues and mapped memory of a client, like 4GiB")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal, or until the drive is of no use."""
    from ..nvmed_abi import GioError, Nvmed, default_options, drop_privileges

    user = None if args.user is None else _user(args.user)
    group = None if args.group is None else _group(args.group)
    # Before there are threads: all of them leave these signals to sigtimedwait().
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
    try:
        options = default_options()
        for name in ("clients", "queues", "client_queues", "client_ranges", "client_regions"):
            if getattr(args, name) is not None:
                setattr(options, name, getattr(args, name))
        if args.client_bytes is not None:
            options.client_bytes = choose.size("--client-bytes", args.client_bytes)
        if group is not None:
            options.group = group
        if user is not None:
            # Who is not root is held to it when memory is mapped; clients are held to --client-bytes.
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        broker = Nvmed(args.device, args.socket, options, _log)
        try:
            if user is not None:
                os.chown(args.socket, user.pw_uid, user.pw_gid if group is None else group)
                drop_privileges(user.pw_uid, user.pw_gid, *([] if group is None else [group]))
            _log(broker.report)
            _serve(broker)
        finally:
            broker.close()
    except GioError as error:
        raise CommandError(str(error)) from error
    except (ValueError, PermissionError) as error:  # of setrlimit and chown
        raise CommandError(f"{error}; --user needs root") from error
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDS)
    return EXIT_OK


def notify(state: str) -> None:
    """Tell the service manager, if one started this process (sd_notify(3)); a failure changes nothing."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to:
        to.sendto(state.encode(), f"\0{address[1:]}" if address.startswith("@") else address)


def _serve(broker) -> None:
    from ..nvmed_abi import GioError

    ends: list[GioError] = []

    def serve() -> None:
        try:
            broker.run()
        except GioError as error:
            ends.append(error)

    thread = threading.Thread(target=serve, name="tardis-nvmed")
    thread.start()
    notify("READY=1")
    while thread.is_alive() and signal.sigtimedwait(_ENDS, _LOOK_SECONDS) is None:
        pass
    notify("STOPPING=1")
    broker.stop()
    thread.join()
    if ends:
        raise ends[0]


def _log(line: str) -> None:
    with contextlib.suppress(OSError):
        print(f"tardis nvmed: {line}", file=sys.stderr, flush=True)


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"expected 1 to 65535, found {value}")
    return value


def _user(name: str) -> pwd.struct_passwd:
    try:
        return pwd.getpwuid(int(name)) if name.isdigit() else pwd.getpwnam(name)
    except KeyError:
        raise CommandError(f"--user: expected a user of this machine, found {name!r}") from None


def _group(name: str) -> int:
    if name.isdigit():
        return int(name)
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise CommandError(f"--group: expected a group of this machine, found {name!r}") from None
