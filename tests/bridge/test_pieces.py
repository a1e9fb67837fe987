# SPDX-License-Identifier: Apache-2.0
"""Piece matrices: the right bytes in canonical order, from every layout, checked on real memory."""

import ctypes
from importlib import metadata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_tardis.bridge.pieces import LAYER_MAJOR, PieceLayout, PieceMap, piece_layout, piece_matrix

LAYERS, PAGE, HEADS, DIM, V_DIM, PAGES = 3, 4, 2, 5, 3, 7


class Pool:
    """A host pool over numpy memory, with the address rules of SGLang's MHA and MLA pools.

    `truth[page]` are the bytes of a page in the canonical order, or as they lie for the token-major layouts.
    """

    def __init__(self, layout: str, *, is_mla: bool, v_dim: int = DIM, seed: int = 0, element: int = 2) -> None:
        self.layout, self.layer_num, self.page_size, self.page_num = layout, LAYERS, PAGE, PAGES
        self.is_mla = is_mla
        rng = np.random.default_rng(seed)
        streams = [(1, DIM)] if is_mla else [(HEADS, DIM), (HEADS, v_dim)]
        # The KV itself, independent of any layout: [page][layer][token][head][dim], each element `element` bytes.
        self.kv = [
            rng.integers(0, 256, (PAGES, LAYERS, PAGE, heads, dim * element), dtype=np.uint8) for heads, dim in streams
        ]
        if layout == "page_first_direct":
            order = (0, 1, 2, 3, 4)
        elif layout == "layer_first":
            order = (1, 0, 2, 3, 4)
        elif layout == "page_first":
            order = (0, 2, 1, 3, 4)
        else:
            order = (0, 3, 2, 1, 4)
        self.buffers = [np.ascontiguousarray(stream.transpose(order)) for stream in self.kv]
        self.calls = 0

    @property
    def truth(self) -> list[bytes]:
        if self.layout in ("page_first_direct", "layer_first"):
            return [
                b"".join(stream[page, layer].tobytes() for layer in range(LAYERS) for stream in self.kv)
                for page in range(PAGES)
            ]
        return [b"".join(buffer[page].tobytes() for buffer in self.buffers) for page in range(PAGES)]

    def get_page_buffer_meta(self, indices):
        self.calls += 1
        assert len(indices) % self.page_size == 0
        pages = [index // self.page_size for index in indices.tolist()[:: self.page_size]]
        pointers, sizes = [], []
        for page in pages:
            if self.layout == "layer_first":
                for layer in range(LAYERS):
                    for buffer in self.buffers:
                        pointers.append(buffer.ctypes.data + (layer * PAGES + page) * buffer[0, 0].nbytes)
                        sizes.append(buffer[0, 0].nbytes)
            else:
                for buffer in self.buffers:
                    pointers.append(buffer.ctypes.data + page * buffer[0].nbytes)
                    sizes.append(buffer[0].nbytes)
        return pointers, sizes


def gather(matrix: np.ndarray, layout: PieceLayout) -> list[bytes]:
    sizes = layout.region_bytes * layout.parts
    return [
        b"".join(ctypes.string_at(int(address), size) for address, size in zip(row, sizes, strict=True))
        for row in matrix
    ]


CASES = [
    (layout, is_mla, v_dim)
    for layout in ("page_first_direct", "layer_first", "page_first", "page_head")
    for is_mla, v_dim in ((False, DIM), (False, V_DIM), (True, DIM))
]


@pytest.mark.parametrize(("layout", "is_mla", "v_dim"), CASES)
def test_pieces_gather_the_bytes_in_stored_order(layout, is_mla, v_dim):
    pool = Pool(layout, is_mla=is_mla, v_dim=v_dim)
    pieces = PieceMap.from_pool(pool, is_mla=is_mla)
    assert pieces.affine
    canonical = layout in ("page_first_direct", "layer_first")
    assert pieces.layout.tag == (LAYER_MAJOR if canonical else layout)
    assert pieces.layout.parts == (LAYERS if canonical else 1)
    assert len(pieces.layout.region_bytes) == (1 if is_mla else 2)
    assert pieces.layout.object_bytes == len(pool.truth[0])

    calls = pool.calls
    order = np.array([6, 0, 3, 3, 5], dtype=np.int64)
    matrix = pieces.matrix(order)
    assert matrix.dtype == np.uint64 and matrix.flags.c_contiguous and matrix.shape == (5, pieces.layout.pieces)
    assert gather(matrix, pieces.layout) == [pool.truth[page] for page in order]
    assert pool.calls == calls, "an affine pool must not be asked again"


@pytest.mark.parametrize(("is_mla", "v_dim"), [(False, DIM), (False, V_DIM), (True, DIM)])
def test_layer_first_and_page_first_direct_are_interchangeable(is_mla, v_dim):
    maps, contents = [], []
    for layout in ("page_first_direct", "layer_first"):
        pool = Pool(layout, is_mla=is_mla, v_dim=v_dim, seed=1)
        maps.append(PieceMap.from_pool(pool, is_mla=is_mla))
        contents.append((pool, gather(maps[-1].matrix(np.arange(PAGES)), maps[-1].layout)))
    assert maps[0].layout == maps[1].layout
    assert contents[0][1] == contents[1][1]


def test_page_first_bytes_are_not_layer_major():
    direct, first = (Pool(layout, is_mla=False, seed=1) for layout in ("page_first_direct", "page_first"))
    assert direct.truth != first.truth
    maps = [PieceMap.from_pool(pool, is_mla=False) for pool in (direct, first)]
    assert maps[0].layout.tag != maps[1].layout.tag


@pytest.mark.parametrize("layout", ["page_first_kv_split", "page_unified", "", "PAGE_FIRST", "nonsense"])
def test_other_layouts_are_refused_by_flag(layout):
    pool = Pool("page_first", is_mla=False)
    pool.layout = layout
    with pytest.raises(
        ValueError, match=r"--hicache-mem-layout.*page_first_direct, layer_first, page_first, page_head"
    ):
        PieceMap.from_pool(pool, is_mla=False)


def test_mla_and_mha_are_not_confused():
    with pytest.raises(ValueError, match=r"MHA pool .* should give 2"):
        PieceMap.from_pool(Pool("page_first", is_mla=True), is_mla=False)
    with pytest.raises(ValueError, match=r"MLA pool .* should give 1"):
        PieceMap.from_pool(Pool("page_first", is_mla=False), is_mla=True)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="multiples"):
        piece_layout("page_first_direct", layers=3, is_mla=False, sizes=[10, 9])
    with pytest.raises(ValueError, match="different sizes"):
        piece_layout("layer_first", layers=2, is_mla=False, sizes=[8, 8, 8, 4])
    with pytest.raises(ValueError, match="non-empty"):
        piece_layout("page_first", layers=2, is_mla=False, sizes=[8, 0])
    with pytest.raises(ValueError, match="at least one layer"):
        piece_layout("page_first", layers=0, is_mla=False, sizes=[8, 8])


def test_a_pool_that_is_not_affine_is_asked_every_time():
    class Scattered(Pool):
        """Pages in shuffled order, as if each had an allocation of its own."""

        place = np.array([0, 1, 2, 5, 4, 3, 6])

        def get_page_buffer_meta(self, indices):
            pages = self.place[indices[:: self.page_size] // self.page_size]
            slots = (pages[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)
            return super().get_page_buffer_meta(slots)

    for layout in ("page_first_direct", "layer_first", "page_first"):
        pool = Scattered(layout, is_mla=False)
        pieces = PieceMap.from_pool(pool, is_mla=False)
        assert not pieces.affine
        calls = pool.calls
        got = gather(pieces.matrix(np.arange(PAGES)), pieces.layout)
        assert got == [pool.truth[page] for page in Scattered.place]
        assert pool.calls == calls + 1


def test_a_pool_that_is_affine_except_at_its_end_is_noticed():
    class LastElsewhere(Pool):
        def get_page_buffer_meta(self, indices):
            pointers, sizes = super().get_page_buffer_meta(indices)
            per_page = len(pointers) // (len(indices) // self.page_size)
            for row, first in enumerate(indices.tolist()[:: self.page_size]):
                if first // self.page_size == PAGES - 1:
                    pointers[row * per_page] += 64
            return pointers, sizes

    assert not PieceMap.from_pool(LastElsewhere("page_first", is_mla=False), is_mla=False).affine


def test_a_pool_with_pages_of_different_sizes_is_refused():
    class Uneven(Pool):
        def get_page_buffer_meta(self, indices):
            pointers, sizes = super().get_page_buffer_meta(indices)
            per_page = len(sizes) // (len(indices) // self.page_size)
            return pointers, [
                size + (LAYERS if indices[row // per_page * self.page_size] else 0) for row, size in enumerate(sizes)
            ]

    with pytest.raises(ValueError, match="regions"):
        PieceMap.from_pool(Uneven("page_first", is_mla=False), is_mla=False)


def test_one_page_and_no_page():
    pool = Pool("page_first_direct", is_mla=False)
    pieces = PieceMap(
        pool.get_page_buffer_meta, layout=pool.layout, layers=LAYERS, is_mla=False, page_tokens=PAGE, pages=1
    )
    assert gather(pieces.matrix(np.array([0])), pieces.layout) == pool.truth[:1]
    assert pieces.matrix(np.array([], dtype=np.int64)).shape == (0, 2 * LAYERS)
    assert pieces.pages_of(np.array([], dtype=np.int64)).shape == (0,)
    with pytest.raises(IndexError):
        pieces.matrix(np.array([1]))


def test_page_numbers_out_of_the_pool_are_refused():
    pieces = PieceMap.from_pool(Pool("page_first", is_mla=False), is_mla=False)
    for pages in ([-1], [PAGES], [0, 2**62]):
        with pytest.raises(IndexError, match="page numbers"):
            pieces.matrix(np.array(pages, dtype=np.int64))
    with pytest.raises(ValueError, match="one-dimensional"):
        pieces.matrix(np.zeros((2, 2), dtype=np.int64))


def test_slots_must_form_whole_aligned_pages():
    pieces = PieceMap.from_pool(Pool("page_first", is_mla=False), is_mla=False)
    slots = np.concatenate([np.arange(8, 12), np.arange(0, 4)])
    assert pieces.pages_of(slots).tolist() == [2, 0]
    for wrong in (slots[:-1], slots[1:-3], slots[::-1], slots + 1, np.array([0, 1, 2, 2]), slots.reshape(2, 4)):
        with pytest.raises(ValueError, match="slots"):
            pieces.pages_of(wrong)


@given(
    base=st.integers(0, 2**47),
    stride=st.integers(-(2**40), 2**40),
    pages=st.integers(1, 5000),
    layers=st.integers(1, 64),
)
def test_affine_rule_equals_asking(base, stride, pages, layers):
    """Also for strides that go down, as in a pool that is filled from its end."""

    def meta(slots):
        numbers = [slot // PAGE for slot in slots.tolist()[::PAGE]]
        return [(base + 2**48 + stride * n + 7 * r) % 2**64 for n in numbers for r in range(2)], [640] * 2 * len(
            numbers
        )

    pieces = PieceMap(meta, layout="page_first", layers=layers, is_mla=False, page_tokens=PAGE, pages=pages)
    assert pieces.affine
    wanted = np.unique(np.array([0, pages // 3, pages - 1]))
    asked = np.array(meta((wanted[:, None] * PAGE + np.arange(PAGE)).reshape(-1))[0], dtype=np.uint64).reshape(-1, 2)
    assert np.array_equal(pieces.matrix(wanted), asked)


def test_matrix_of_page_first_direct_steps_by_layer():
    layout = piece_layout("page_first_direct", layers=2, is_mla=False, sizes=[20, 12])
    matrix = piece_matrix("page_first_direct", layout, np.array([[1000, 5000]], dtype=np.uint64))
    assert matrix.tolist() == [[1000, 5000, 1010, 5006]]


def installed(*packages: str) -> bool:
    """Asked of the metadata: an import would find the folder tests/sglang where the real package is absent."""
    try:
        return all(metadata.version(package) for package in packages)
    except metadata.PackageNotFoundError:
        return False


needs_sglang = pytest.mark.skipif(not installed("sglang", "torch"), reason="SGLang and torch are not installed")


@needs_sglang
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("mha", "layer_first"),
        ("mha", "page_first"),
        ("mha", "page_first_direct"),
        ("mha", "page_head"),
        ("asymmetric", "page_first"),
        ("asymmetric", "page_first_direct"),
        ("mla", "layer_first"),
        ("mla", "page_first"),
        ("mla", "page_first_direct"),
    ],
)
def test_real_sglang_pools(kind, layout):
    """The installed SGLang's own pool classes, on CPU tensors: affine, and their page views hold the gathered bytes."""
    import torch
    from sglang.srt.mem_cache.pool_host import mha, mla

    cls = {
        "mha": mha.MHATokenToKVPoolHost,
        "asymmetric": mha.AsymmetricMHATokenToKVPoolHost,
        "mla": mla.MLATokenToKVPoolHost,
    }[kind]
    pool = object.__new__(cls)  # constructors want a device pool; only geometry and memory matter here
    pool.__dict__.update(
        layout=layout, layer_num=LAYERS, page_size=PAGE, page_num=PAGES, size=PAGE * PAGES, dtype=torch.bfloat16,
        head_num=HEADS, head_dim=DIM, v_head_dim=V_DIM if kind == "asymmetric" else DIM, kv_cache_dim=DIM,
        device="cpu", pin_memory=False, allocator=None, dcp_size=1, dcp_rank=0,
    )  # fmt: skip
    kv = [
        torch.randint(-9, 9, (PAGES, LAYERS, PAGE, heads, dim)).to(torch.bfloat16)
        for heads, dim in ([(1, DIM)] if kind == "mla" else [(HEADS, DIM), (HEADS, pool.v_head_dim)])
    ]
    shape = {
        "layer_first": lambda t: t.transpose(0, 1).reshape(LAYERS, -1, *t.shape[3:]),
        "page_first": lambda t: t.transpose(1, 2).reshape(PAGES * PAGE, LAYERS, *t.shape[3:]),
        "page_first_direct": lambda t: t,
        "page_head": lambda t: t.permute(0, 3, 2, 1, 4),
    }[layout]
    streams = [shape(t).contiguous() for t in kv]
    if kind == "mla":
        pool.kv_buffer = streams[0]
    elif kind == "asymmetric":
        pool.kv_buffer = tuple(streams)
    else:
        pool.kv_buffer = torch.stack(streams)

    pieces = PieceMap.from_pool(pool, is_mla=kind == "mla")
    assert pieces.affine
    got = gather(pieces.matrix(np.arange(PAGES)), pieces.layout)
    raw = [t.contiguous().view(torch.uint8).numpy() for t in kv]
    for page in range(PAGES):
        if pieces.layout.tag == LAYER_MAJOR:
            expected = b"".join(stream[page, layer].tobytes() for layer in range(LAYERS) for stream in raw)
        else:
            order = (1, 0, 2, 3) if layout == "page_first" else (2, 1, 0, 3)
            expected = b"".join(np.ascontiguousarray(stream[page].transpose(order)).tobytes() for stream in raw)
        assert got[page] == expected
    host = torch.arange(2 * PAGE, 4 * PAGE)
    pointers, _ = pool.get_page_buffer_meta(host)
    regions = np.array(pointers, dtype=np.uint64).reshape(2, -1)
    asked = piece_matrix(layout, pieces.layout, regions)
    assert np.array_equal(asked, pieces.matrix(pieces.pages_of(host)))
