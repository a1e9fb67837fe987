# SPDX-License-Identifier: Apache-2.0
"""Which pages of a KV pool lie in HBM and which in host memory, and how a page table names them. Pure arithmetic.

A policy is `host` (all pages in host memory) or `hbm_fraction` (a share of the pages in HBM). With a share, pages of
both kinds are spread evenly over the page numbers, so that any run of pages, and so any request, has about that share:
of n pages in a row, at most one more or less than n times the share. Each kind is a pool of its own, in which pages
keep their order. In entries of a page table, as the decode kernel takes them (tardis/attention.h), bit 30 names it.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

__all__ = ["HBM_BIT", "Placement"]

HBM_BIT = 1 << 30
"""TARDIS_ATTENTION_SECOND_POOL: the page is one of the HBM pool."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where each of `pages` pages is.

    Attributes:
        pages: of SGLang's pool, its dummy page 0 included.
        hbm_pages: of them, in HBM.
    """

    pages: int
    hbm_pages: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.pages < HBM_BIT or not 0 <= self.hbm_pages <= self.pages:
            raise ValueError(
                f"Placement: expected 1 to {HBM_BIT - 1} pages, of which some may be in HBM, found {self.hbm_pages} of "
                f"{self.pages}"
            )

    @classmethod
    def of(cls, pages: int, hbm_fraction: float | Fraction) -> Placement:
        """With a share of the pages in HBM, rounded down.

        Raises:
            ValueError: a share below 0 or above 1.
        """
        if not 0 <= hbm_fraction <= 1:
            raise ValueError(f"Placement: expected a share of 0 to 1 in HBM, found {hbm_fraction}")
        return cls(pages, int(Fraction(hbm_fraction) * pages))

    @classmethod
    def within(cls, page_bytes: int, host_bytes: int, hbm_bytes: int) -> Placement:
        """As many pages as fit, with all of the HBM that may be used.

        Args:
            page_bytes: of K and V of a page, in all layers.
            host_bytes: that may be used.
            hbm_bytes: that may be used.

        Raises:
            ValueError: not a page fits.
        """
        if page_bytes < 1 or min(host_bytes, hbm_bytes) < 0 or host_bytes // page_bytes + hbm_bytes // page_bytes < 1:
            raise ValueError(
                f"Placement: expected room for a page of {page_bytes} bytes, found {host_bytes} bytes of host memory "
                f"and {hbm_bytes} of HBM; raise one of them"
            )
        return cls(host_bytes // page_bytes + hbm_bytes // page_bytes, hbm_bytes // page_bytes)

    @property
    def host_pages(self) -> int:
        """How many are in host memory."""
        return self.pages - self.hbm_pages

    def is_hbm(self, page: Any) -> Any:
        """Whether a page is in HBM. Ints, and arrays or tensors of int64, as all below."""
        return self.hbm_before(page + 1) > self.hbm_before(page)

    def hbm_before(self, page: Any) -> Any:
        """How many pages with smaller numbers are in HBM: the page's own number in the HBM pool, if it is there."""
        return page * self.hbm_pages // self.pages

    def entry(self, page: Any) -> Any:
        """What a page table has for a page: its number in its pool, and HBM_BIT if that is the HBM pool."""
        before = self.hbm_before(page)
        hbm = self.hbm_before(page + 1) - before  # 0 or 1
        return hbm * (before + HBM_BIT) + (1 - hbm) * (page - before)

    def page(self, entry: int) -> int:
        """The page that an entry names.

        Raises:
            ValueError: it names none.
        """
        number, hbm = entry & ~HBM_BIT, entry & HBM_BIT
        count = self.hbm_pages if hbm else self.host_pages
        if not 0 <= number < count:
            raise ValueError(f"Placement: expected one of {count} pages, found entry {entry:#x}")
        if hbm:  # the last page before which there are `number` in HBM
            return ((number + 1) * self.pages - 1) // self.hbm_pages
        return number * self.pages // self.host_pages
