# SPDX-License-Identifier: Apache-2.0
"""What a restore keeps of its rate beside other traffic of the link, with the arbiter and without. Needs a GPU.

Drives `tardis_gpu_gio_link_bench` (cpp/tests). "restore in beside other traffic" is a mover of the class above all,
`limit` its rate alone in the same run, `beside_gb_s` what the others moved meanwhile; "budgets of N" is what each class
below may move while it is outranked. "alone, with the arbiter" is a mover that nobody disturbs, `limit` the same
without the arbiter. Pages of 128 KiB from all over pools of 512 MiB, 2 SMs a mover; medians. No drive takes part.
"""

from __future__ import annotations

import sys
from typing import Any

from common import Report, measure_by_program

NAME = "tardis_gpu_gio_link_bench"
KEPT = 0.9  # of its rate alone
COST = 0.99  # of the rate without arbiter


def add_row(report: Report, row: dict[str, Any]) -> None:
    """One line of the program as a row of the report."""
    extra = {key: row[key] for key in ("beside_gb_s", "samples") if key in row}
    report.add(row["case"], row["system"], row["size"], row["value"], "GB/s", row["limit"] or None, **extra)


def missed(report: Report) -> list[str]:
    """Rows with the arbiter that are below what it is for."""
    floors = {"a mover alone, with the arbiter": COST, "restore in beside other traffic": KEPT}
    return [
        f"{row['case']}, {row['system']}, {row['size']}: {row['ratio']}, expected {floors[row['case']]}"
        for row in report.rows.values()
        if row["system"] != "without arbiter" and row["ratio"] and row["ratio"] < floors.get(row["case"], 0)
    ]


def main() -> int:
    """Measure."""
    report, status = measure_by_program(__doc__, NAME, add_row)
    for line in missed(report):
        print(f"below what is aimed at: {line}")
    return status


if __name__ == "__main__":
    sys.exit(main())
