# SPDX-License-Identifier: Apache-2.0
"""Runs of pages: each page once, from its object, and no two runs that could be one."""

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_tardis import loads_abi
from sglang_tardis.host_memory import registered_step
from sglang_tardis.page_runs import PAGE_RUN, page_runs

BASE, STRIDE = 1 << 40, 4096


@st.composite
def loads(draw):
    """Pieces of pages in a row, whose objects are in a row: some side by side, in any order."""
    at, pages = draw(st.integers(0, 3)), []
    for _ in range(draw(st.integers(0, 12))):
        length, slot = draw(st.integers(1, 6)), draw(st.integers(0, 40))
        pages += [(at + i, slot + i) for i in range(length)]
        at += length + draw(st.integers(0, 2))
    return draw(st.permutations(pages))


@settings(deadline=None, max_examples=300)
@given(loads())
def test_runs_are_the_pages(pages):
    ids = np.array([page for page, _ in pages], np.int32)
    addresses = np.array([BASE + slot * STRIDE for _, slot in pages], np.uint64)
    runs = page_runs(ids, addresses, STRIDE)
    found = [
        (int(run["page"]) + i, (int(run["object"]) - BASE) // STRIDE + i) for run in runs for i in range(run["pages"])
    ]
    assert sorted(found) == sorted(pages) and len(found) == len(set(found))
    ends = {(int(run["page"] + run["pages"]), int(run["object"]) + int(run["pages"]) * STRIDE) for run in runs}
    assert not ends & {(int(run["page"]), int(run["object"])) for run in runs}, "two runs that are one"


def test_one_object_for_two_pages():
    runs = page_runs(np.array([5, 4], np.int32), np.array([BASE, BASE], np.uint64), STRIDE)
    assert runs.tolist() == [(BASE, 4, 1), (BASE, 5, 1)]


def test_no_run_crosses_a_seam():
    """To a copy engine, memory that several calls have pinned is several memories."""
    ids, addresses = np.arange(7, dtype=np.int32), BASE + np.arange(7, dtype=np.uint64) * np.uint64(STRIDE)
    runs = page_runs(ids, addresses, STRIDE, [BASE, BASE + 2 * STRIDE, BASE + 6 * STRIDE])
    assert runs.tolist() == [(BASE, 0, 2), (BASE + 2 * STRIDE, 2, 4), (BASE + 6 * STRIDE, 6, 1)]


@pytest.mark.parametrize("object_bytes", [16, 4096, 3 * 512, 2_621_440, 4_718_592 + 16])
def test_seams_are_between_objects(object_bytes):
    step = registered_step(object_bytes)
    assert step % object_bytes == 0 and step % 4096 == 0 and step <= 64 << 30


def test_what_is_no_page_stays_none():
    runs = page_runs(np.array([0, -1], np.int32), np.array([BASE + STRIDE, BASE], np.uint64), STRIDE)
    assert runs.tolist() == [(BASE, 0xFFFFFFFF, 2)], "which the library refuses"


def test_the_library_reads_the_same():
    assert ctypes.sizeof(loads_abi.GpuLoadRun) == PAGE_RUN.itemsize
    for name, _ in loads_abi.GpuLoadRun._fields_:
        assert getattr(loads_abi.GpuLoadRun, name).offset == PAGE_RUN.fields[name][1]
    try:
        gpu = loads_abi.gpu()  # compares what is declared twice
    except loads_abi.GpuLibraryMissingError:
        pytest.skip("libtardis_gpu.so is not built")
    call = loads_abi.GpuLoadRuns()
    assert gpu.library.tardis_gpu_load_runs_enqueue(ctypes.byref(call), None) == 1  # cudaErrorInvalidValue
