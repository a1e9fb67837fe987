# SPDX-License-Identifier: Apache-2.0
"""Which pages go where."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from sglang_tardis.attention.placement import HBM_BIT, Placement

CASES = [(1, 0), (1, 1), (7, 0), (7, 7), (7, 3), (10, 1), (97, 96), (100, 37), (1000, 333)]


@pytest.mark.parametrize(("pages", "hbm"), CASES)
def test_every_page_has_one_place(pages, hbm):
    placement = Placement(pages, hbm)
    entries = [placement.entry(page) for page in range(pages)]
    in_hbm = [entry - HBM_BIT for entry in entries if entry & HBM_BIT]
    in_host = [entry for entry in entries if not entry & HBM_BIT]
    assert in_hbm == list(range(hbm)) and in_host == list(range(pages - hbm))
    assert [placement.page(entry) for entry in entries] == list(range(pages))
    assert [bool(entry & HBM_BIT) for entry in entries] == [bool(placement.is_hbm(page)) for page in range(pages)]


@pytest.mark.parametrize(("pages", "hbm"), CASES)
def test_any_run_of_pages_has_its_share(pages, hbm):
    placement = Placement(pages, hbm)
    for first in range(0, pages, max(1, pages // 20)):
        for last in range(first, pages, max(1, pages // 20)):
            found = sum(bool(placement.is_hbm(page)) for page in range(first, last))
            assert abs(found - Fraction(hbm, pages) * (last - first)) < 1


def test_tables_are_made_on_tensors():
    placement = Placement(1000, 333)
    pages = torch.tensor([[0, 5, 999], [3, 3, 500]])
    assert placement.entry(pages).tolist() == [[placement.entry(page) for page in row] for row in pages.tolist()]
    assert placement.entry(pages).to(torch.int32).tolist() == placement.entry(pages).tolist()


def test_shares_and_sizes():
    assert Placement.of(1000, 0.25) == Placement(1000, 250)
    assert Placement.of(3, Fraction(1, 2)) == Placement(3, 1)
    assert Placement.of(8, 0) == Placement(8) and Placement(8).host_pages == 8
    assert Placement.within(100, 1050, 399) == Placement(13, 3)
    assert Placement.within(100, 1050, 99) == Placement(10, 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Placement.of(10, 1.1), "a share of 0 to 1"),
        (lambda: Placement.of(10, -0.1), "a share of 0 to 1"),
        (lambda: Placement(0), "expected 1 to"),
        (lambda: Placement(3, 4), "found 4 of 3"),
        (lambda: Placement.within(100, 99, 99), "room for a page of 100 bytes"),
        (lambda: Placement(10, 3).page(7), "expected one of 7 pages"),
        (lambda: Placement(10, 3).page(HBM_BIT | 3), "expected one of 3 pages"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
