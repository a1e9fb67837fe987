# SPDX-License-Identifier: Apache-2.0
"""The direct door: the real tree, the real linker and the real store, on CPU tensors."""

from __future__ import annotations

import pytest
from linker_server import LinkerServer, Served
from tree_server import prompt


@pytest.fixture
def serve(model, tmp_path):
    """Opens servers on one store and closes them after the test."""
    opened = []

    def make(folder=None, checkpoint=None, **changes):
        server = LinkerServer(folder or tmp_path / "store", checkpoint or model, **changes)
        opened.append(server)
        return server

    yield make
    for server in opened:
        server.close()


def test_pages_come_back_from_memory_from_files_and_after_a_restart(serve):
    tokens = prompt(1, 20)
    server = serve()
    assert server.serve(tokens) == Served(0, 0, 320, True)
    assert server.serve(tokens) == Served(320, 0, 0, True)

    server.forget_device()
    assert server.serve(tokens) == Served(0, 320, 0, True)
    assert (server.linker.counts["pages_from_memory"], server.linker.counts["pages_from_files"]) == (20, 0)

    server.forget_dram()
    assert server.serve(tokens) == Served(0, 320, 0, True)
    assert server.linker.counts["pages_from_files"] == 20
    server.close()

    again = serve()
    assert again.serve(tokens + prompt(2, 3)) == Served(0, 320, 48, True)
    assert again.linker.counts["pages_from_files"] == 20
