# SPDX-License-Identifier: Apache-2.0
"""Loads the plugin as SGLang would, and SGLang's cache code for a machine without a GPU."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "0")
for folder in (REPOSITORY / "demo" / "cpu_support", Path(__file__).parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed in this environment: its cache code cannot be tested", allow_module_level=True)


@pytest.fixture(scope="session", autouse=True)
def sglang_with_tardis():
    """SGLang's own plugin loader, then the hooks again in case the package is used from the source tree."""
    import torch
    from sglang.srt.plugins import load_plugins
    from sglang_tardis.sglang import seams
    from tardis_cpu_support import apply_cpu_support

    torch.set_num_threads(1)  # small tensors: more threads only wait for each other
    load_plugins()
    seams.install_late()
    apply_cpu_support()


@pytest.fixture(autouse=True)
def model_as_started():
    """Weight updates are remembered per process; each test starts with the weights the server was started with."""
    from sglang_tardis.sglang import weight_updates

    weight_updates.forget()
    yield
    weight_updates.forget()


@pytest.fixture
def model(tmp_path):
    """Folder of a small checkpoint."""
    from tree_server import write_checkpoint

    return write_checkpoint(tmp_path / "model")


@pytest.fixture(scope="session")
def processes():
    """Where ranks come from (rank_processes.py)."""
    from rank_processes import RankProcesses

    processes = RankProcesses()
    yield processes
    processes.close()


@pytest.fixture(scope="session", autouse=True)
def processes_early(request):
    """Have SGLang imported for the ranks on another core while other tests run, if their tests will."""
    if any("processes" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("processes")


@pytest.fixture
def open_storage(tmp_path):
    """Opens backends and closes them after the test."""
    from host_pools import storage_config
    from sglang_tardis.sglang.seams import attaching_controller
    from sglang_tardis.sglang.storage import TardisStorage

    opened = []

    def make(pool, device=None, folder=None, **changes):
        class Controller:
            mem_pool_device = device

        token = attaching_controller.set(Controller)
        try:
            mla = "MLA" in type(pool).__name__
            storage = TardisStorage(storage_config(folder or tmp_path / "store", mla=mla, **changes), pool)
        finally:
            attaching_controller.reset(token)
        opened.append(storage)
        return storage

    yield make
    for storage in opened:
        storage.close()


@pytest.fixture
def serve(model, tmp_path):
    """Opens servers on one store and closes them after the test."""
    from linker_server import LinkerServer

    opened = []

    def make(folder=None, checkpoint=None, **changes):
        server = LinkerServer(folder or tmp_path / "store", checkpoint or model, **changes)
        opened.append(server)
        return server

    yield make
    for server in opened:
        server.close()
