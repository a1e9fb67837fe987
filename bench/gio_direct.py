# SPDX-License-Identifier: Apache-2.0
"""Commands of rings on a GPU that land in HBM directly, beside the same ones by way of bounce slots.

Drives `tardis_gpu_gio_direct_bench` (cpp/tests). The GPU submits NVMe commands of K and V, half each, and retires them.
Threads of the host play the controller: they start copy engines between a namespace in pinned memory and scattered
pages in HBM (direct), or copy to bounce slots that SMs carry on (bounce). No drive takes part; with one, direct landing
would be its own DMA into HBM, which is not tried here. Every row is compared word for word once before it is measured.

rig: ...            what one large copy of a copy engine reaches in the same run, and loads and stores of 4 SMs
direct, bounce      a row of IOCBs from the first kernel's start to the last flag, by controller threads; direct on one
                    CTA, which moves nothing, bounce on four; the limit is the copy engine's or the SMs'
..., digests behind a kernel behind each ring reads in HBM what landed and compares digests
one at a time       the time of single commands from submission to landed
"""

from __future__ import annotations

import sys
from typing import Any

from common import Report, measure_by_program

NAME = "tardis_gpu_gio_direct_bench"
KNOWN = frozenset({"case", "system", "size", "value", "unit", "limit", "ratio"})


def add_row(report: Report, row: dict[str, Any]) -> None:
    """One line of the program as a row of the report; what tells rows apart becomes part of their case."""
    more = {key: value for key, value in row.items() if key not in KNOWN}
    case = row["case"]
    for key, text in (("controller_threads", "controller threads"), ("verifying_ctas", "verifying CTAs")):
        if key in more:
            case += f", {more[key]} {text}"
    if "cudaMemcpyAsync" in more.get("engine", ""):
        case += ", a call a piece"
    report.add(case, row["system"], row["size"], row["value"], row["unit"], row["limit"], **more)


def main() -> int:
    """Run the program, adding its rows as they come."""
    return measure_by_program(__doc__, NAME, add_row)[1]


if __name__ == "__main__":
    sys.exit(main())
