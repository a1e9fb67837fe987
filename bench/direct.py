# SPDX-License-Identifier: Apache-2.0
"""A real SGLang server with the direct door, beside HiCache-DRAM: what hits cost, what is hidden, what answers.

Servers in turn (`--servers`), of which all answer the same prompts:

direct          tardis, mode direct, an empty store
restart         the same, started anew on that store, with a smaller DRAM tier; before it starts, pages of one prompt
                are damaged
hicache-direct  HiCache-DRAM, page_first_direct and direct: its fastest pair
hicache         HiCache-DRAM with SGLang's defaults; the smaller DRAM tier
host            tardis through HiCache's host pool (not by default), and host-restart
nixl            HiCache-DRAM (its fastest pair) with SGLang's `nixl` storage backend, NIXL's POSIX plugin in the same
                --l3-dir; the smaller DRAM tier, levels and files (not by default; wants the package nixl)
lmcache         SGLang's --enable-lmcache and LMCache's server, with as much memory and its `fs_native` adapter in
                --l3-dir: the same cases (not by default; wants lmcache, on a GPU built for SGLang's torch)
disk            the direct door on a store on a disk (not by default; --disk-dir), one case: hits from files beside fio

Cases (`--cases`, parts of their names): TTFT of recompute, device hit, DRAM hit, hit from files after /flush_cache,
first hit after the restart, by length; a share of hits with new tokens behind it, and what the prefill waits for
(bubble: its time beyond that with the same share on the device, of the latter); long prompts over a shared context, as
many as DRAM tier and store hold, one at a time, by a few clients that wait for their answers (closed loop), and all at
once; a working set of four times the DRAM tier; prompts that nobody has seen; times between tokens while pages are
stored; damaged pages.

What must hold, else it is listed under "failures" and the exit status is 1: every request's cached tokens come from
where the case says; the first token with its top-20 log probabilities equals a device hit's, bit for bit; damaged pages
are computed again. What is aimed at is printed at the end and kept under "checks"; a miss of it is no failure.

Whether a hit is from DRAM or from files follows from what was emptied before: an external linker's hits are the host's
for SGLang, whichever they are. The counters of each case are kept.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import time

from common import add_common_arguments, file_system
from direct_campaign import Campaign
from direct_cases import ORIGIN, Cases, damage
from direct_checks import checks, crossover, shares
from direct_profile import DEFAULT, KINDS, Kind
from direct_server import DirectServer
from serving_client import OutOfTime
from store_throughput import direct_flag


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--servers", default=",".join(DEFAULT), help="comma list, in order (default %(default)s)")
    parser.add_argument("--cases", default="", help="comma list of parts of their names (default: all)")
    parser.add_argument("--l3-dir", type=pathlib.Path, required=True, help="folder for stores, for example on tmpfs")
    parser.add_argument("--disk-dir", type=pathlib.Path, help="a folder on a disk, for the store of the server `disk`")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model-path", type=pathlib.Path, help="a folder with config.json (weights are random)")
    parser.add_argument("--attention-backend", default="fa3", help="with a GPU (default %(default)s)")
    parser.add_argument("--capacity", help="of a store (default 44GiB, without a GPU 512MiB)")
    parser.add_argument(
        "--tardis-config", type=json.loads, default={}, metavar="JSON", help="further settings of tardis"
    )
    parser.add_argument(
        "--nixl-config", type=json.loads, default={}, metavar="JSON", help='of NIXL\'s plugin: {"use_uring": "true"}'
    )
    parser.add_argument(
        "--lmcache-flag", action="append", default=[], help="a further flag of LMCache's server (repeatable)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of prompts (default %(default)s)")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."), help="folder for logs and requests")
    parser.add_argument("--append", action="store_true", help="keep what --json FILE holds already")
    parser.add_argument("--keep", action="store_true", help="leave the stores in --l3-dir")
    parser.add_argument("--deadline", type=float, default=3600, metavar="S", help="start nothing that may end later")
    parser.add_argument(
        "--start-seconds", type=float, default=130, metavar="S", help="least time left to start a server"
    )
    parser.add_argument("--launcher", help="command that starts and stops the server; see sglang_server.py")
    parser.add_argument("--server-flag", action="append", default=[], help="a further server flag (repeatable)")
    parser.add_argument("--port", type=int, default=31700)
    arguments = parser.parse_args(words)
    arguments.servers = arguments.servers.split(",")
    unknown = [name for name in arguments.servers if name not in KINDS]
    if unknown:
        parser.error(f"--servers: {unknown[0]!r} is not one of {', '.join(KINDS)}")
    if "disk" in arguments.servers:
        if arguments.disk_dir is None or not arguments.disk_dir.is_dir():
            parser.error(f"--disk-dir: the server `disk` wants a folder on a disk, found {arguments.disk_dir}")
        if not direct_flag(arguments.disk_dir):
            parser.error(
                f"--disk-dir {arguments.disk_dir}: expected a file system on a disk that takes O_DIRECT, found "
                f"{file_system(arguments.disk_dir)}"
            )
    return arguments


def without(other: str, device: str) -> str:
    """Why it cannot be used; empty if it can. Asked in another process: what is loaded must not stay here."""
    modules = {"nixl": ["nixl._api"], "lmcache": ["torch", "lmcache.v1.multiprocess.server"]}[other]
    if (other, device) == ("lmcache", "cuda"):
        modules.append("lmcache.cuda_ops")
    done = subprocess.run(
        [sys.executable, "-c", f"import {', '.join(modules)}"], capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it cannot be imported"])[-1]


def measure(campaign: Campaign, kind: Kind) -> None:
    """One server, from its start to its end."""
    if not campaign.time_for(f"server {kind.name}", campaign.arguments.start_seconds):
        return
    if kind.other and (missing := without(kind.other, campaign.profile.device)):
        campaign.skip(f"server {kind.name}: {missing}")
        return
    if kind.fresh:
        campaign.new_store(kind)
    wanted, free = campaign.profile.other_bytes(kind), shutil.disk_usage(campaign.folder).free
    if kind.other and wanted > free:  # its folder has no limit of its own
        campaign.skip(f"server {kind.name}: {wanted / 1e9:.1f} GB wanted in --l3-dir, {free / 1e9:.1f} are free")
        return
    if kind.name in ORIGIN:
        damage(campaign, kind)
    server = DirectServer(campaign, kind)
    campaign.report.note(**{f"server_{kind.name}": server.flags})
    try:
        campaign.log(f"{kind.name} is starting: {kind.title}")
        seconds = server.start(max(30.0, min(400.0, campaign.left() - 20)))
        campaign.report.add("server start", kind.name, "-", seconds, "s")
        cases = Cases(campaign, server)
        if kind.name not in ORIGIN:  # there the first hit of all is measured
            cases.warm_up()
        cases.run()
    except OutOfTime as error:
        campaign.skipped.append(f"{kind.name}: out of time: {error}")
    except Exception as error:
        campaign.fail(f"{kind.name}: {error!r}")
    finally:
        began = time.monotonic()
        server.stop()
        campaign.log(f"{kind.name} stopped in {time.monotonic() - began:.1f} s")
        campaign.save()


def conclude(campaign: Campaign) -> None:
    """Print and keep what follows from all rows."""
    rows = campaign.report.rows
    found = checks(rows, campaign.limits, campaign.profile.token_bytes, campaign.profile.page_size)
    crossovers = {}
    for state in ("dram", "files"):
        for kind in KINDS:
            if measured := shares(rows, state, kind):
                crossovers[f"{kind}, {state}"] = crossover(measured)
    campaign.report.note(checks=[check.to_json() for check in found], crossover_percent=crossovers)
    for check in found:
        print(check.text())
    for name, share in crossovers.items():
        print(f"crossover, {name}: {'beyond what was measured' if share is None else f'{share:.1f} % hits'}")
    for text in campaign.failures:
        print("FAILED:", text[:600])
    for text in campaign.skipped:
        print("SKIPPED:", text)
    print("see above" if campaign.failures + campaign.skipped else "every state and answer as expected", flush=True)


def main(words: list[str] | None = None) -> int:
    """Measure the servers that were asked for; 0 if everything held and nothing was skipped."""
    arguments = parse(words)
    campaign = Campaign(arguments)
    if not campaign.limits:
        campaign.measure_limits()
    for name in arguments.servers:
        measure(campaign, KINDS[name])
    if not arguments.keep:
        for name in arguments.servers:
            shutil.rmtree(campaign.store(KINDS[name]), ignore_errors=True)
    conclude(campaign)
    return 1 if campaign.failures or campaign.skipped else 0


if __name__ == "__main__":
    sys.exit(main())
