# SPDX-License-Identifier: Apache-2.0
"""Page events of SGLang's allocators, on the CPU; sglang16_checks.py does the same with 0.5.16."""

from __future__ import annotations

import page_event_cases
import pytest


@pytest.mark.parametrize("need_sort", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_random_use(page_size, need_sort):
    page_event_cases.random_use(page_size, need_sort)


def test_segments_are_freed_once():
    allocator, table = page_event_cases.make_allocator(4, True), page_event_cases.Table()
    page_event_cases.PageEvents(allocator, table)
    slots = allocator.alloc(24)
    allocator.free_segment(slots[:11], start_pos=0)
    allocator.free_group_begin()
    allocator.free_segments([(slots[12:16], 12), (slots[16:], 16)])
    allocator.free_group_end()
    assert table.free == page_event_cases.really_free(allocator)
    assert len(table.free) == page_event_cases.PAGES


@pytest.mark.parametrize("case", ["refusals", "listener_failures", "detaching_below_others"])
def test_edges(case):
    getattr(page_event_cases, case)()
