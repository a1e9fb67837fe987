# SPDX-License-Identifier: Apache-2.0
"""`tardis nvme`: drives that a store could have to itself, and how they are released to it."""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Callable

from . import nvme_text
from .errors import EXIT_ERROR, EXIT_OK, EXIT_PROBLEMS, CommandError
from .render import print_json, printable


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command's arguments, and those of its own commands."""
    parser = commands.add_parser(
        "nvme",
        help="look at NVMe drives, release them to vfio-pci and back, and format them for a store",
        description="Look at the NVMe drives of this machine, give them to vfio-pci and back, and make a namespace the "
        "place of a store's segments.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _action(actions, "list", _list, "every NVMe controller, who has it and what for; opens none, needs no root")
    one = _action(actions, "identify", _identify, "what a drive says of itself; vfio-pci must have it, and it is reset")
    one.add_argument("address", metavar="PCI", help="as `tardis nvme list` shows it")
    one = _action(actions, "smart", _smart, "a drive's health; vfio-pci must have it, and it is reset")
    one.add_argument("address", metavar="PCI", help="as `tardis nvme list` shows it")
    one = _action(actions, "format-store", _format_store, "make a namespace the place of the segments of a store")
    one.add_argument("address", metavar="PCI", help="as `tardis nvme list` shows it")
    one.add_argument("namespace", metavar="NSID", type=int, help="id of the namespace, as `identify` shows it")
    one.add_argument("--home", required=True, metavar="DIR", help="folder of the store; made if it is not there")
    one.add_argument("--erase", action="store_true", help="whatever is on the namespace is lost")
    one = _action(actions, "release", _release, "give a drive to vfio-pci, or back to the kernel; root does it")
    one.add_argument("address", metavar="PCI", help="as `tardis nvme list` shows it")
    one.add_argument("--to", choices=("vfio-pci", "nvme"), default="vfio-pci", help="the driver (default: vfio-pci)")
    one.add_argument("--dry-run", action="store_true", help="only print the commands")
    one = _action(actions, "gpu", _gpu, "whether a drive and a GPU reach each other: what was tried")
    one.add_argument("address", metavar="PCI", nargs="?", help="a drive that vfio-pci has; it is reset")


def _action(
    actions: argparse._SubParsersAction, name: str, run_action: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.add_argument(
        "--root", default="/", metavar="DIR", help="the folder that has the machine's sys, proc and dev (default: /)"
    )
    parser.set_defaults(run=run, run_action=run_action)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run one of the command's own commands."""
    from ..gio_abi import GioError

    try:
        return args.run_action(args)
    except GioError as error:
        raise CommandError(printable(error)) from None


def _list(args: argparse.Namespace) -> int:
    from .. import nvme

    drives = nvme.drives(args.root)
    print_json({"drives": drives}) if args.json else print(nvme_text.listing(drives))
    return EXIT_OK


def _identify(args: argparse.Namespace) -> int:
    from .. import nvme

    facts = nvme.identify(args.address, args.root)
    print_json(facts) if args.json else print(nvme_text.identity(facts))
    return EXIT_OK


def _smart(args: argparse.Namespace) -> int:
    from .. import nvme

    log = nvme.health(args.address, args.root)
    print_json(log) if args.json else print(nvme_text.health(log))
    return EXIT_PROBLEMS if log["critical_warning"] else EXIT_OK


def _format_store(args: argparse.Namespace) -> int:
    from .. import nvme

    try:
        made = nvme.format_store(args.address, args.namespace, args.home, erase=args.erase, root=args.root)
    except nvme.GioError as error:
        # The core speaks of its option.
        raise CommandError(printable(error).replace("with force", "with --erase")) from None
    print_json(made) if args.json else print(nvme_text.formatted(made))
    return EXIT_OK


def _release(args: argparse.Namespace) -> int:
    from .. import nvme

    plan = nvme.release(args.address, args.to, root=args.root)
    as_root = os.geteuid() == 0
    if as_root and not args.dry_run and not plan["done"]:
        if plan["module_missing"] and args.root == "/":
            _load_module(args.to)
        plan = nvme.release(args.address, args.to, carry_out=True, root=args.root)
    print_json(plan) if args.json else print(nvme_text.release(plan))
    if plan["done"] or args.dry_run:
        return EXIT_OK
    if not args.json:
        raise CommandError("nothing was done, since only root can: run the lines above as root")
    return EXIT_ERROR


def _load_module(name: str) -> None:
    try:
        loaded = subprocess.run(["modprobe", name], capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise CommandError(f"modprobe {name}: {error.strerror}; load the module by other means") from None
    if loaded.returncode:
        raise CommandError(f"modprobe {name}: {loaded.stderr.strip() or 'failed'}")


def _gpu(args: argparse.Namespace) -> int:
    from .. import nvme

    answer = {
        "gpu": nvme.gpu_facts(),
        "doorbells": _doorbells(args.address, args.root),
        "memory": {"available": False, "probes": nvme.gpu_memory_probes(args.root)},
    }
    print_json(answer) if args.json else print(nvme_text.gpu(answer))
    return EXIT_PROBLEMS if answer["doorbells"]["tried"] and not answer["doorbells"]["reached"] else EXIT_OK


def _doorbells(address: str | None, root: str) -> dict[str, object]:
    """Whether the GPU reads the registers of a drive; `found` says what was read, or why nothing was tried."""
    from .. import nvme

    nothing = {"tried": False, "reached": False}
    drives = nvme.drives(root)
    if not drives:
        return {**nothing, "found": "not available: no NVMe device"}
    if nvme.gpu_facts() is None:
        return {**nothing, "found": "not available: no GPU, or no libtardis_gpu.so"}
    if address is None:
        return {**nothing, "found": "not tried: name a drive that vfio-pci has, which is reset for it"}
    verdict = nvme.check_doorbells(address, root)
    return {"tried": True, "reached": verdict["reached"], "found": verdict["found"]}
