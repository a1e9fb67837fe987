# SPDX-License-Identifier: Apache-2.0
"""Hits from files on the machine's disk, beside what fio reads from it in the same run."""

from __future__ import annotations

import statistics

from common import file_system
from direct_server import DirectServer
from serving_workloads import Request, full_hit
from store_throughput import Memory, fio, plain_files


class DiskCase:
    """The only case of the server `disk`. Its store takes O_DIRECT (`direct_io` on), so no page cache helps."""

    def __init__(self, server: DirectServer) -> None:
        self.server, self.campaign, self.profile = server, server.campaign, server.profile
        self.folder = self.campaign.store(server.kind).parent

    def read_rate(self) -> tuple[str, float]:
        """(what read, GB/s) of pages of the same size at random places of one file: fio, or where it is not installed
        a pool of 8 threads with preadv.
        """
        page = self.profile.page_size * self.profile.token_bytes
        total = max(self.profile.disk_bytes // page, 1) * page
        try:
            rate = fio(self.folder, page, total, "randread")
        finally:
            (self.folder / "fio.bin").unlink(missing_ok=True)
        if rate is not None:
            return "fio, io_uring, 32 in flight", rate
        pages = total // page
        _, rate = plain_files(self.folder, Memory(pages, page, True), Memory(pages, page, False), 1)
        return "preadv, 8 threads (fio is not installed)", rate

    def run(self) -> None:
        """Prompts of one length: computed, stored, and read back into an empty device pool and an empty DRAM tier."""
        server, name = self.server, self.server.kind.name
        length = self.profile.lengths(server.kind)[-1]
        before = self.read_rate()
        requests = [server.request(f"disk/{number}", length) for number in range(2)]
        cold, device, answers = [], [], {}
        for request in requests:
            cold.append(server.ask(request, "recompute").ttft)
            hit = server.ask(request, "device")
            device.append(hit.ttft)
            answers[request.name] = hit
            server.settle(quiet=1.5)
        times, equal = self.hits(requests, answers)
        after = self.read_rate()

        # The better of both rates: a virtual disk's changes from one second to the next.
        tool, rate = max(before, after, key=lambda found: found[1])
        said = {"limit_is": tool, "medium": f"disk ({file_system(self.folder)}), O_DIRECT"}
        moved = full_hit(length, self.profile.page_size) * self.profile.token_bytes
        on_device, read = statistics.median(device), statistics.median(times)
        add = self.campaign.report.add
        add("disk: plain read", tool, f"{length} tokens", rate, "GB/s", both=[round(x[1], 3) for x in (before, after)])
        server.row("recompute", length, cold)
        server.row("device", length, device)
        server.row("files on the disk", length, times, (on_device + moved / rate / 1e9) * 1e3, equal=equal, **said)
        add("disk: rate of hits", name, length, moved / max(read - on_device, 1e-9) / 1e9, "GB/s", rate, **said)

    def hits(self, requests: list[Request], answers: dict) -> tuple[list[float], str]:
        """TTFT of hits from files, seconds, and how many answers equal the device hit's."""
        server, times, equal = self.server, [], []
        counted = server.published()
        for _ in range(self.profile.repetitions):
            for request in requests:
                server.flush()
                outcome = server.ask(request, "files")
                times.append(outcome.ttft)
                hit = answers[request.name]
                equal.append((outcome.ids[:1], outcome.top) == (hit.ids[:1], hit.top))
                if not equal[-1]:
                    self.campaign.fail(f"disk, {request.name}: the answer differs from the device hit's")
        server.check_source("files", counted)
        return times, f"{sum(equal)}/{len(equal)}"
