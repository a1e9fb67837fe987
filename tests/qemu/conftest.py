# SPDX-License-Identifier: Apache-2.0
"""Guests two at a time: tests of this folder that take `lab` run in threads, all of them from when the first is due.

Each is reported in its own turn, as always. None of them may use a fixture other than `lab`.
"""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import re
import time

import pytest
from guest_image import MissingError
from guest_lab import Bench, Lab

AT_ONCE = 2


class Scenarios:
    """The tests of this session that start guests, from when the first of them is due."""

    def __init__(self, items: list[pytest.Function], folder: pathlib.Path):
        self.bench = Bench(folder)
        self.labs: dict[str, Lab] = {}
        self._pool = concurrent.futures.ThreadPoolExecutor(AT_ONCE, "scenario")
        self._results: dict[str, concurrent.futures.Future[None]] = {}
        for item in items:
            lab = self.labs[item.nodeid] = Lab(self.bench, re.sub(r"\W+", "-", item.name).strip("-"))
            arguments = item.callspec.params if hasattr(item, "callspec") else {}
            self._results[item.nodeid] = self._pool.submit(item.obj, lab=lab, **arguments)

    def wait(self, item: pytest.Function) -> None:
        self._results[item.nodeid].result()
        self.labs[item.nodeid].remove_images()  # after a failure they stay, for whoever looks into it

    def close(self) -> None:
        self.bench.close()
        self._pool.shutdown(cancel_futures=True)


SCENARIOS = pytest.StashKey[Scenarios]()
STARTED = pytest.StashKey[float]()


def uses_lab(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and "lab" in item.fixturenames


@pytest.fixture(scope="session")
def scenarios(request, tmp_path_factory):
    items = [item for item in request.session.items if uses_lab(item)]
    started = time.monotonic()
    try:
        running = Scenarios(items, tmp_path_factory.mktemp("qemu"))
    except MissingError as missing:
        if os.environ.get("CI") == "true":
            pytest.fail(f"{missing} (a failure and not a skip, because this is continuous integration)", pytrace=False)
        pytest.skip(str(missing))
    request.config.stash[SCENARIOS], request.config.stash[STARTED] = running, started
    yield running
    running.close()


@pytest.fixture
def lab(scenarios, request):
    """What the test starts its guests with: guest_lab.Lab."""
    return scenarios.labs[request.node.nodeid]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if not uses_lab(pyfuncitem):
        return None
    lab = pyfuncitem.funcargs["lab"]
    try:
        pyfuncitem.config.stash[SCENARIOS].wait(pyfuncitem)
    finally:
        for note in lab.notes:
            print(note)
    return True


def pytest_terminal_summary(terminalreporter, config):
    running = config.stash.get(SCENARIOS, None)
    if running is not None:
        seconds = running.bench.last_end - config.stash[STARTED]
        crashes = sum(lab.qemu_crashes for lab in running.labs.values())
        said = f"qemu: {running.bench.guests_started} guests, {crashes} crashes of QEMU itself, {seconds:.0f} s"
        terminalreporter.write_line(said)
