# SPDX-License-Identifier: Apache-2.0
"""Sizes, ids and places at the ends of what 32 and 64 bits hold; sessions that end while they are in use."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the torch ops were not tested")

from sglang_tardis.gpu import GioError, GioSession, ObjectIndex, PageLayout  # noqa: E402

OPS = torch.ops.tardis
LAYOUT = PageLayout(1, 4096)
WRAPPED = 1 << 32


def ids(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize(
    "options",
    [
        {"bytes": -4096},
        {"bytes": (1 << 64) + (1 << 20)},
        {"queues": WRAPPED + 1},
        {"queues": -1},
        {"entries": WRAPPED + 64},
        {"commands": WRAPPED + 5},
        {"commands": -1},
        {"threads": WRAPPED + 1},
        {"slot_bytes": WRAPPED + 8192},
        {"slot_bytes": -4096},
        {"bounce_bytes": -1},
        {"rest_us": -1},
        {"rest_us": 10_001},
    ],
    ids=lambda options: str(*options.items()),
)
def test_options_that_would_wrap_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        GioSession(LAYOUT, **{"bytes": 1 << 20, **options}).close()


@pytest.mark.parametrize(
    ("options", "commands"),
    [
        ({}, 63),
        ({"bounce_bytes": 64 << 10}, 4),
        ({"bounce_bytes": 1}, 2),
        ({"bounce_bytes": 1 << 40}, 63),
        ({"bounce_bytes": 1, "entries": 2}, 1),
        ({"bounce_bytes": 64 << 10, "commands": 5}, 5),
    ],
)
def test_bounce_slots_bound_the_commands_in_flight(options, commands):
    with GioSession(LAYOUT, bytes=1 << 20, queues=2, slot_bytes=8192, **options) as session:
        assert session.commands == commands


def test_pages_of_4_gib_are_refused():
    with pytest.raises(ValueError, match="below 4 GiB"):
        PageLayout(1, WRAPPED + 4096)
    with pytest.raises(ValueError, match="below 4 GiB"):
        PageLayout(1, 4096, WRAPPED)


def test_pages_of_more_commands_than_a_transfer_has_are_refused():
    with pytest.raises(ValueError, match="larger slot_bytes"):
        GioSession(PageLayout(1, 1 << 27), bytes=1 << 28, slot_bytes=4096).close()


def test_places_that_would_wrap_are_refused():
    memory = torch.full((4096,), 7, dtype=torch.uint8)
    with GioSession(LAYOUT, bytes=1 << 20) as session:
        for offset in (1 << 64, -4096, (1 << 64) - 4096):
            for move in (session.write, session.read):
                with pytest.raises((ValueError, GioError)):
                    move(offset, memory)
        found = torch.empty_like(memory)
        session.read(0, found)
        assert not found.any()


def test_negative_ids_are_outside_of_large_tables(tmp_path):
    """As 32 bits without a sign, these would be among the last of so many blocks. The table is a file of holes."""
    pool, first = torch.zeros(4, 1, 2048, dtype=torch.bfloat16), -(1 << 31)
    blocks = torch.from_file(str(tmp_path / "blocks"), shared=True, size=(1 << 31) + 8, dtype=torch.int64)
    with GioSession(LAYOUT, bytes=1 << 20) as session:
        slots = ids(first + 3, -1, 5)
        OPS.batch_put(session.handle, 0, [pool], ids(0, 1, 2), slots, ids(3), session.flags, blocks=blocks)
        assert session.layer_report(0).ends == ("refused", "refused", "done")


def test_indexes_that_would_wrap_are_refused():
    for entries in (-1, 1 << 64, int(0.8 * (1 << 64)) + 1):
        with pytest.raises(ValueError, match="entries"):
            ObjectIndex(entries)


def test_reports_of_no_layer_are_refused():
    with GioSession(PageLayout(2, 4096), bytes=1 << 20) as session:
        for layer in (-1, 2):
            with pytest.raises(ValueError, match="layer"):
                session.layer_report(layer)


def test_the_end_of_the_process_waits_for_a_transfer():
    """A thread is amid a transfer when the interpreter ends: memory must not go from under it."""
    program = textwrap.dedent("""
        import atexit, threading
        import torch
        from sglang_tardis.gpu import GioError, GioSession, PageLayout

        layout = PageLayout(1, 1 << 20)
        session = GioSession(layout, bytes=64 << 20)
        pool = torch.zeros(64, 1, 1 << 19, dtype=torch.bfloat16)
        pages = torch.arange(64, dtype=torch.int32)
        count = torch.tensor([64], dtype=torch.int32)
        begun, refused = threading.Event(), threading.Event()

        def work():
            while True:
                session.flags.zero_()
                try:
                    torch.ops.tardis.batch_put(session.handle, 0, [pool], pages, pages, count, session.flags)
                except GioError:
                    return refused.set()
                begun.set()

        threading.Thread(target=work, daemon=True).start()
        begun.wait()
        atexit._run_exitfuncs()  # now, and not when the thread may be gone by chance
        assert refused.wait(10)
    """)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, (ended.returncode, ended.stderr)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_of_a_fork_leaves_the_session_alone():
    """It has no threads of the controller to wait for."""
    program = textwrap.dedent("""
        import os, signal
        import torch
        from sglang_tardis.gpu import GioSession, PageLayout

        session = GioSession(PageLayout(1, 4096), bytes=1 << 20)
        child = os.fork()
        if child == 0:
            signal.alarm(3)
            session.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        session.write(0, torch.zeros(4096, dtype=torch.uint8))
        session.close()
    """)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20)
    assert ended.returncode == 0, (ended.returncode, ended.stderr)
