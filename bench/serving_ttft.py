# SPDX-License-Identifier: Apache-2.0
"""Time to first token of a real SGLang server by where a prompt's KV comes from, and whether the answer stays the same.

Three steps, one server each (`--steps`):

direct    page_first_direct layout: recompute, device hit, DRAM (L2) hit, then storage (L3) hits of SGLang's `file`
          backend, of a plain readv backend and of tardis, attached one after the other to the same server; cold prompts
          without storage and with tardis attached (what a miss costs).
restart   a new server on the store that `direct` left, with `--hicache-storage-backend tardis` on its command line: L3
          hits, each compared with a device hit in the same server and with the device hit before the restart. Then the
          negative control: pages damaged on disk must change the answer when verification is off, and must become
          misses, counted, when it is on.
kernel    the same as `direct` in the page_first layout with the transfer kernels, SGLang's default.

One request at a time, random token ids, greedy; the client's clock, first streamed chunk; medians. No state is assumed:
the server's own `cached_tokens_details` must say what the state means (a hit on N tokens is N minus one page, all from
one tier), and the first token with its top-20 logprobs must equal the prompt's device hit bit for bit. Anything else is
printed, listed under "failures" in the result file, and makes the exit status 1.

With a GPU it uses Llama-3.1-8B's shape with random weights (`--model-path` for another), 8 K and 32 K prompts. Stock
SGLang's `dummy` weights give near-constant logits: install demo/cpu_support beside it, which draws better ones.
`--device cpu` runs the same program on a tiny model (also through demo/cpu_support): that checks the program, its times
mean nothing.

Limits: a DRAM hit cannot beat the device hit plus its bytes over the host link; a storage hit cannot beat the DRAM hit
plus its bytes at the rate at which all cores read files in `--l3-dir` into memory. Both rates are measured first.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import sys
import time

from common import Report, add_common_arguments
from ttft_campaign import Campaign
from ttft_step import STEPS, Step


def compare_layouts(report: Report) -> None:
    """Cold prompts of page_first_direct over those of page_first: above 1 is slower."""
    for row in list(report.rows.values()):
        if row["case"].startswith("cold") and row["system"].startswith("page_first_direct"):
            other = report.rows.get(
                (row["case"], row["system"].replace("page_first_direct", "page_first"), str(row["size"]))
            )
            if other:
                report.add(
                    f"{row['case']}: layouts",
                    f"direct/kernel{row['system'].removeprefix('page_first_direct')}",
                    row["size"],
                    row["value"] / other["value"],
                    "x",
                )


def main() -> int:
    """Run the steps that were asked for; 0 if every check held and nothing was skipped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument(
        "--steps", default=",".join(STEPS), help="comma list of direct, restart, kernel (default: all, in this order)"
    )
    parser.add_argument(
        "--systems",
        help="storage systems to measure (default: readv,tardis,file; without a GPU no file, whose "
        "copies need pinned memory)",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model-path", type=pathlib.Path, help="a folder with config.json (weights are random)")
    parser.add_argument(
        "--l3-dir", type=pathlib.Path, required=True, help="folder for all storage data, for example on tmpfs"
    )
    parser.add_argument("--capacity", help="capacity of each tardis store (default: 40GiB, without a GPU 512MiB)")
    parser.add_argument(
        "--tardis-config", type=json.loads, default={}, metavar="JSON", help="further tardis settings for every store"
    )
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("."), help="folder for logs and single requests"
    )
    parser.add_argument("--append", action="store_true", help="keep the rows that --json FILE holds already")
    parser.add_argument(
        "--deadline", type=float, default=3600, metavar="S", help="start nothing that may end later than this"
    )
    parser.add_argument(
        "--start-seconds", type=float, default=150, metavar="S", help="least time left to start a server (default 150)"
    )
    parser.add_argument("--launcher", help="command that starts and stops the server instead; see sglang_server.py")
    parser.add_argument("--attention-backend", default="fa3", help="with a GPU (default %(default)s)")
    parser.add_argument(
        "--server-flag", action="append", default=[], help="a further server flag (repeatable; write --server-flag=--x)"
    )
    parser.add_argument("--port", type=int, default=31500)
    arguments = parser.parse_args()
    arguments.systems = arguments.systems or ("readv,tardis,file" if arguments.device == "cuda" else "readv,tardis")
    steps = arguments.steps.split(",")
    unknown = [name for name in steps if name not in STEPS]
    if unknown:
        parser.error(f"--steps: {unknown[0]!r} is not one of {', '.join(STEPS)}")
    campaign = Campaign(arguments)
    campaign.measure_limits()
    for name in steps:
        storage = campaign.tardis_config(campaign.l3 / "tardis") if name == "restart" else None
        if name != "restart":
            # A store holds several layouts side by side; a new campaign starts with an empty one.
            shutil.rmtree(campaign.l3 / "tardis", ignore_errors=True)
        Step(campaign, name, storage).run()
    compare_layouts(campaign.report)
    campaign.report.note(
        failures=campaign.failures, skipped=campaign.skipped, seconds=round(time.monotonic() - campaign.began, 1)
    )
    for text in campaign.failures:
        print("FAILED:", text[:400])
    for text in campaign.skipped:
        print("SKIPPED:", text)
    print(
        "every state, answer and control as expected" if not campaign.failures + campaign.skipped else "see above",
        flush=True,
    )
    return 1 if campaign.failures or campaign.skipped else 0


if __name__ == "__main__":
    sys.exit(main())
