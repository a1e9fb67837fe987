# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of a page lie in SGLang's host pools, and in which order the store keeps them.

The canonical order ("layer-major") is [layer][K,V][token][head][dim]: one layer of a page is one read. Both layouts
that keep a layer's K and V contiguous (`page_first_direct`, `layer_first`) are stored as exactly these bytes and can
read each other's objects. `page_first` and `page_head` interleave layers within a token; their pages are stored byte
for byte, each under a layout tag of its own, because transposing on the data path would cost more than it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

if TYPE_CHECKING:
    from ..store import ObjectLayout

LAYER_MAJOR = "layer-major"
SUPPORTED_LAYOUTS = ("page_first_direct", "layer_first", "page_first", "page_head")

PageBufferMeta = Callable[[Any], "tuple[Sequence[int], Sequence[int]]"]
"""`HostKVCache.get_page_buffer_meta`: token slots of whole pages -> (addresses, sizes in bytes), page after page."""


class PieceLayout(msgspec.Struct, frozen=True):
    """How one page is cut into the pieces that the store gathers and scatters."""

    tag: str
    """Layout tag: part of the namespace. Objects with equal tags and geometry have interchangeable bytes."""
    parts: int
    """Parts of an object: the layers in the layer-major order, else 1."""
    region_bytes: tuple[int, ...]
    """Bytes of each region of one part, in stored order: (K, V), or one for MLA."""

    @property
    def pieces(self) -> int:
        """Pieces of one page: parts x regions."""
        return self.parts * len(self.region_bytes)

    @property
    def object_bytes(self) -> int:
        """Bytes of one page."""
        return self.parts * sum(self.region_bytes)

    def object_layout(self) -> ObjectLayout:
        """The store's description of the same thing."""
        from ..store import ObjectLayout

        return ObjectLayout(parts=self.parts, region_bytes=self.region_bytes)


def _check_layout(layout: str) -> None:
    if layout not in SUPPORTED_LAYOUTS:
        raise ValueError(
            f"host memory layout {layout!r} is not supported by the tardis storage backend; start SGLang with "
            f"--hicache-mem-layout set to one of {', '.join(SUPPORTED_LAYOUTS)} (page_first_direct is the fastest here)"
        )


def piece_layout(layout: str, *, layers: int, is_mla: bool, sizes: Sequence[int]) -> PieceLayout:
    """Derive the piece layout from what the pool says about one page.

    `layout` is SGLang's name (`--hicache-mem-layout`), `layers` the layers held by the pool, `sizes` the region sizes
    in bytes that `get_page_buffer_meta` gives for one page. Raises ValueError where the layout is not supported or
    where the pool's answer does not fit it.
    """
    _check_layout(layout)
    if layers < 1:
        raise ValueError(f"a pool must have at least one layer, got {layers}")
    streams = 1 if is_mla else 2
    kind = "MLA" if is_mla else "MHA"
    expected = streams * layers if layout == "layer_first" else streams
    sizes = tuple(int(size) for size in sizes)
    if len(sizes) != expected or any(size <= 0 for size in sizes):
        raise ValueError(
            f"an {kind} pool of {layers} layers in layout {layout} should give {expected} non-empty regions a page, "
            f"this one gives {len(sizes)}: {sizes[:8]}"
        )
    if layout == "layer_first":
        per_stream = tuple(sizes[:streams])
        if sizes != per_stream * layers:
            raise ValueError(f"layers of different sizes cannot be stored as one object: region sizes {sizes[:16]}")
        return PieceLayout(LAYER_MAJOR, layers, per_stream)
    if layout == "page_first_direct":
        if any(size % layers for size in sizes):
            raise ValueError(f"region sizes {sizes} are not multiples of the {layers} layers they should hold")
        return PieceLayout(LAYER_MAJOR, layers, tuple(size // layers for size in sizes))
    return PieceLayout(layout, 1, sizes)


def piece_matrix(layout: str, pieces: PieceLayout, addresses: np.ndarray) -> np.ndarray:
    """Addresses of every piece from the region addresses of pages.

    `addresses`: (n, regions a page) uint64 in the order of `get_page_buffer_meta`. Returns (n, parts * regions) uint64,
    C-contiguous, in stored order [part][region].
    """
    _check_layout(layout)
    addresses = np.ascontiguousarray(addresses, dtype=np.uint64)
    if layout != "page_first_direct":
        return addresses  # the pool's order is the stored order: (k0, v0, k1, v1, ...), (K, V) or one region
    steps = np.arange(pieces.parts, dtype=np.uint64)[:, None] * np.asarray(pieces.region_bytes, dtype=np.uint64)
    return (addresses[:, None, :] + steps[None, :, :]).reshape(len(addresses), pieces.pieces)


class PieceMap:
    """Page number -> addresses of its pieces, for one host pool.

    Asks the pool about a few pages, learns address = base + page * stride, and checks that rule on a middle and the
    last page. From then on a batch of pages costs one vectorised expression instead of a Python loop over pages and
    layers. Where the rule does not hold, every batch asks the pool (`affine` is False; correct, but slow).
    """

    def __init__(
        self, meta: PageBufferMeta, *, layout: str, layers: int, is_mla: bool, page_tokens: int, pages: int
    ) -> None:
        """Learn the map.

        `meta` is called with an int64 numpy array of token slots (SGLang's MHA and MLA pools use only `len` and
        `tolist`). `page_tokens`: slots of one page in the pool's logical numbering; `pages`: pages in the pool. Raises
        ValueError where the layout is not supported or the pool's answers contradict it.
        """
        _check_layout(layout)
        if page_tokens < 1 or pages < 1:
            raise ValueError(f"a pool needs pages of at least one token, got {pages} pages of {page_tokens}")
        self._meta = meta
        self._mem_layout = layout
        self.page_tokens = page_tokens
        self.pages = pages
        _, sizes = self._ask(np.zeros(1, dtype=np.int64))
        self.layout = piece_layout(layout, layers=layers, is_mla=is_mla, sizes=sizes[0])
        self._sizes = sizes[0]

        probes = np.unique(np.array([0, min(1, pages - 1), pages // 2, pages - 1], dtype=np.int64))
        truth = self._ask_checked(probes)
        self._base = truth[0]
        self._stride = truth[1] - truth[0] if len(probes) > 1 else np.zeros_like(truth[0])
        self.affine = bool(np.array_equal(truth, self._rule(probes)))

    @classmethod
    def from_pool(cls, pool: Any, *, is_mla: bool) -> PieceMap:
        """Build the map of one of SGLang's `HostKVCache` pools (0.5.16 ... 0.5.23)."""
        return cls(
            pool.get_page_buffer_meta,
            layout=pool.layout,
            layers=int(pool.layer_num),
            is_mla=is_mla,
            # Under decode context parallelism the tree counts wider pages than a rank holds.
            page_tokens=int(getattr(pool, "logical_page_size", pool.page_size)),
            pages=int(pool.page_num),
        )

    def pages_of(self, slots: Any) -> np.ndarray:
        """Page numbers (int64) of token slots as SGLang passes them: whole, aligned, consecutive pages.

        Raises ValueError where they are not; serving a page from anywhere else would be serving wrong bytes.
        """
        slots = np.asarray(slots, dtype=np.int64)
        if slots.ndim != 1 or slots.size % self.page_tokens:
            raise ValueError(f"expected whole pages of {self.page_tokens} token slots, got shape {slots.shape}")
        rows = slots.reshape(-1, self.page_tokens)
        first = rows[:, 0]
        if (first % self.page_tokens).any() or (rows != first[:, None] + np.arange(self.page_tokens)).any():
            raise ValueError(f"token slots do not form aligned pages of {self.page_tokens} consecutive slots")
        return first // self.page_tokens

    def matrix(self, pages: Any) -> np.ndarray:
        """Piece addresses of pages: (n,) page numbers -> (n, parts * regions) uint64, C-contiguous, [part][region].

        Raises IndexError for a page that the pool does not have.
        """
        pages = np.asarray(pages, dtype=np.int64)
        if pages.ndim != 1:
            raise ValueError(f"expected a one-dimensional array of page numbers, got shape {pages.shape}")
        if pages.size == 0:
            return np.empty((0, self.layout.pieces), dtype=np.uint64)
        if pages.min() < 0 or pages.max() >= self.pages:
            raise IndexError(f"page numbers must lie in 0 ... {self.pages - 1}, got {pages.min()} ... {pages.max()}")
        return self._rule(pages) if self.affine else self._ask_checked(pages)

    def _rule(self, pages: np.ndarray) -> np.ndarray:
        # Unsigned arithmetic wraps, which is what a "negative" stride needs.
        return pages.astype(np.uint64)[:, None] * self._stride + self._base

    def _ask(self, pages: np.ndarray) -> tuple[np.ndarray, list[tuple[int, ...]]]:
        """The pool's own answer: region addresses (n, regions) and each page's region sizes."""
        slots = (pages[:, None] * self.page_tokens + np.arange(self.page_tokens, dtype=np.int64)).reshape(-1)
        addresses, sizes = self._meta(slots)
        regions, rest = divmod(len(addresses), len(pages))
        if rest or regions == 0 or len(sizes) != len(addresses):
            raise ValueError(
                f"the host pool described {len(pages)} pages by {len(addresses)} addresses and {len(sizes)} sizes"
            )
        table = np.array([int(address) for address in addresses], dtype=np.uint64).reshape(len(pages), regions)
        return table, [tuple(int(s) for s in sizes[i : i + regions]) for i in range(0, len(sizes), regions)]

    def _ask_checked(self, pages: np.ndarray) -> np.ndarray:
        addresses, sizes = self._ask(pages)
        for page, got in zip(pages.tolist(), sizes, strict=True):
            if got != self._sizes:
                raise ValueError(f"page {page} of the host pool has regions {got[:8]}, page 0 has {self._sizes[:8]}")
        return piece_matrix(self._mem_layout, self.layout, addresses)
