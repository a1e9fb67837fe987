# SPDX-License-Identifier: Apache-2.0
"""What the rows of attention_serving.py say about what was aimed at. No server is needed."""

from __future__ import annotations

from attention_serving_profile import REFERENCE
from checks import Check, Rows

GIB = 2**30
SLACK = 2.0
"""GiB of HBM that two servers may differ by: graphs, work spaces, what the allocator keeps."""
LINK_SHARE = 0.8
"""Of the link's rate, for a decode step over the longest context: weights and the rest of a step do not use it."""


def checks(rows: Rows, resident_pool: int, host_pool: int) -> list[Check]:
    """The aims of which all sides were measured; those whose name begins with `must` fail the run.

    Args:
        rows: of the result table.
        resident_pool: bytes of KV of the reference's pool, in HBM.
        host_pool: of the pool in host memory.
    """
    found: list[Check] = []

    def get(case: str, system: str, size: object, key: str = "value") -> float | None:
        row = rows.get((case, system, str(size)))
        return None if row is None else row[key]

    kv = get("KV in HBM", "host", "GiB", "bytes")
    if kv is not None:
        found.append(Check("must: bytes of KV in HBM, host", kv, 0, "B"))
    host, reference, everything = (get("HBM", name, "serving", "bytes") for name in ("host", REFERENCE, "all servers"))
    weights = get("HBM", "host", "serving", "weights") or get("HBM", "all servers", "serving", "weights") or 0
    if host is not None and reference is not None:
        beside = (host - weights) - (reference - weights - resident_pool)
        found.append(Check("must: HBM beside weights and pools, host over resident", beside / GIB, SLACK, "GiB"))
    elif everything is not None and host_pool and resident_pool:
        servers = rows["HBM", "all servers", "serving"]["servers"]
        in_hbm = sum(name != "host" for name in servers)
        beside = everything - len(servers) * weights - in_hbm * resident_pool
        name = "must: HBM of all beside weights and pools that are in HBM, under half of host's pool"
        found.append(Check(name, beside / GIB, host_pool / 2 / GIB, "GiB"))
    for system in ("host", "all servers"):
        before, after = (get("HBM", system, f"{when} the long prompt") for when in ("before", "after"))
        if before is not None and after is not None:
            found.append(Check(f"must: HBM that a long prompt takes, {system}", after - before, SLACK, "GiB"))
    for (case, system, size), row in rows.items():
        if case.startswith("equality, ") and system != REFERENCE:  # a difference is a failure of its own already
            found.append(Check(f"{case}, {system}: differing of {size}", row["differs"], 0, "answers"))
        if case == "beyond":
            wanted = system == "host"
            found.append(Check(f"must: {size} tokens, {system}", row["value"], int(wanted), "answered", wanted))
    contexts = [int(size) for case, system, size in rows if (case, system) == ("context: KV", "host")]
    share = get("context: KV", "host", max(contexts, default=0), "ratio")
    if share is not None:
        found.append(Check(f"KV of a step over {max(contexts)} tokens, of the link", share, LINK_SHARE, "x", True))
    return found
