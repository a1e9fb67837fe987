# SPDX-License-Identifier: Apache-2.0
"""Real SGLang servers on ``--device cpu``, shared between tests because each start takes half a minute on two cores."""

from __future__ import annotations

import contextlib
import importlib.metadata
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
for folder in (REPOSITORY / "demo", REPOSITORY / "bench", Path(__file__).parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from real_server import HIT, PAGE, START_TIMEOUT, TOKENS, Lives, text  # noqa: E402
from server import Server  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    missing = [name for name in ("sglang", "sglang-tardis", "tardis-cpu-support") if not _installed(name)]
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.server)
            item.add_marker(pytest.mark.timeout(1800))  # the first test of each kind starts the servers
            if missing:
                item.add_marker(
                    pytest.mark.skip(reason=f"not installed: {', '.join(missing)} (`make test` installs them)")
                )


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


_SERVER = pytest.StashKey[Server]()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop the shared server behind the last test of this folder: an idle one still keeps a core busy."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        server = item.config.stash.get(_SERVER, None)
        if server is not None:
            server.stop()


@pytest.fixture(scope="session")
def lives(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Lives]:
    """Store, kill, restore, stop, restore."""
    folder = tmp_path_factory.mktemp("lives")
    record = Lives(prompts=[text(seed) for seed in (1, 2)], store=folder / "store")

    with contextlib.closing(Server(record.spec(), folder / "server-1.log")) as server:
        server.start(START_TIMEOUT)
        for ids in record.prompts:
            record.cold.append(server.generate(ids))
            record.device.append(server.generate(ids))
        server.wait_until_stored(TOKENS * len(record.prompts))
        server.flush_cache()
        record.flushed += [server.generate(ids) for ids in record.prompts]
        server.stop(signal.SIGKILL)

    with contextlib.closing(Server(record.spec(), folder / "server-2.log")) as server:
        server.start(START_TIMEOUT)
        for ids in record.prompts:
            record.after_kill.append(server.generate(ids))
            record.device_after_kill.append(server.generate(ids))
        restored = len(record.prompts) * HIT // PAGE
        server.wait_until(
            lambda metrics: metrics.get("tardis_read_pages_hit_total", 0) >= restored, "tardis's counters"
        )
        record.metrics = server.metrics()
        server.stop(signal.SIGTERM)

    with contextlib.closing(Server(record.spec(), folder / "server-3.log")) as server:
        server.start(START_TIMEOUT)
        record.server = server
        pytestconfig.stash[_SERVER] = server
        record.after_term += [server.generate(ids) for ids in record.prompts]
        record.start_line = next(line for line in server.log_text().splitlines() if "tardis: store" in line)
        yield record
