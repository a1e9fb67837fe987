# SPDX-License-Identifier: Apache-2.0
"""KV pages between a pool and a gio session, layer by layer, as torch ops (docs/torch-ops.md).

Importing this registers, for CPU and CUDA tensors and with fake kernels::

    tardis::batch_get(int session, int layer, Tensor(a!)[] pools, Tensor pages, Tensor slots, Tensor count,
                      Tensor(b!) flags, *, Tensor? blocks=None, Tensor? digests=None) -> ()
    tardis::batch_put(int session, int layer, Tensor[] pools, Tensor pages, Tensor slots, Tensor count,
                      Tensor(a!) flags, *, Tensor? blocks=None, Tensor(b!)? digests=None) -> ()
    tardis::wait_layer(int session, int layer, Tensor(a!)[] pools, Tensor flags) -> ()
    tardis::lookup(int index, Tensor keys, Tensor count, Tensor(a!) answers, *, int space=0) -> ()

On CUDA tensors each is one call into libtardis_gpu.so that enqueues on the current stream: nothing is allocated,
nothing waits, and it can be captured in a CUDA graph; ids and counts are read when it runs. On CPU tensors the calling
thread does the same work by the same ring before the op returns. Ids, counts, flags and pools are on the session's
device.

pools (`KvPools.layer(i)`): K and V of the layer, `[tokens, heads, dim]`, or its one buffer.
pages, slots: int32 `[n]`, page i of the transfer is page pages[i] of the pools and slot slots[i] of the drive.
count: int32 `[1]`, how many of them; above n all are refused.
flags: int32 `[layers]`; the op sets flags[layer] to 1 (done) or 2 (error) when all is over. It must be 0 before, on a
    GPU before other streams begin to wait for it: `flags.zero_()`.
blocks: int64 `[slots]`, the first block of each slot, instead of slots side by side; -1: it has none.
digests: int64 `[m, layers, layout.digests]`, of page i of the transfer: expected by get, written by put.
keys: uint8 `[n, 32]`, block hashes at a multiple of 16 bytes.
answers: int64 `[n, 4]`, `ANSWER_DTYPE` in a row; rows from count on are left as they are.

An id outside of its range is refused by itself and the others are moved; then flags[layer] is 2, and
`GioSession.layer_report` says which.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from sglang_tardis import gio_abi
from sglang_tardis.gio_abi import GioError, GpuLibraryMissingError
from sglang_tardis.gio_session import GioSession, LayerReport, RingReport, find_session
from sglang_tardis.gpu_index import ANSWER_DTYPE, ENTRY_DTYPE, ObjectIndex, find_index
from sglang_tardis.kv_pools import KvPools, PageLayout, pool_page_count

__all__ = [
    "ANSWER_DTYPE",
    "ENTRY_DTYPE",
    "GioError",
    "GioSession",
    "GpuLibraryMissingError",
    "KvPools",
    "LayerReport",
    "ObjectIndex",
    "PageLayout",
    "RingReport",
    "find_session",
]

_DIGESTED_BYTES = 16 << 10
_MOST_ID = (1 << 31) - 1  # of int32 ids: no negative one is a page or a slot


# ---- what the tensors must be; by fake kernels too, and so without addresses
def _expect(tensor: torch.Tensor, name: str, dtype: torch.dtype, shape: tuple[int | None, ...]) -> None:
    fits = tensor.dim() == len(shape) and all(
        wanted is None or size == wanted for size, wanted in zip(tensor.shape, shape, strict=True)
    )
    if tensor.dtype != dtype or not fits or not tensor.is_contiguous():
        wanted = [size if size is not None else "n" for size in shape]
        raise ValueError(
            f"{name}: expected contiguous {dtype} {wanted}, found {tensor.dtype} {list(tensor.shape)} with strides "
            f"{tensor.stride()}"
        )


def _check_transfer(
    pools: Sequence[torch.Tensor],
    pages: torch.Tensor,
    slots: torch.Tensor,
    count: torch.Tensor,
    flags: torch.Tensor,
    blocks: torch.Tensor | None,
    digests: torch.Tensor | None,
) -> None:
    if len(pools) not in (1, 2):
        raise ValueError(f"pools: expected K and V of a layer, or one buffer, found {len(pools)} tensors")
    for pool in pools:
        if not pool.is_contiguous():
            raise ValueError(
                f"pools: expected contiguous tokens, found shape {tuple(pool.shape)} with strides {pool.stride()}"
            )
    _expect(pages, "pages", torch.int32, (None,))
    _expect(slots, "slots", torch.int32, (pages.shape[0],))
    _expect(count, "count", torch.int32, (1,))
    _expect(flags, "flags", torch.int32, (None,))
    if blocks is not None:
        _expect(blocks, "blocks", torch.int64, (None,))
    if digests is not None:
        _expect(digests, "digests", torch.int64, (None, None, None))


def _check_lookup(keys: torch.Tensor, count: torch.Tensor, answers: torch.Tensor) -> None:
    _expect(keys, "keys", torch.uint8, (None, 32))
    _expect(count, "count", torch.int32, (1,))
    _expect(answers, "answers", torch.int64, (keys.shape[0], 4))


def _same_device(device: torch.device, **tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name}: expected a tensor on {device} as the session, found {tensor.device}")


# ---- the ops
def _transfer(
    op: int,
    handle: int,
    layer: int,
    pools: Sequence[torch.Tensor],
    pages: torch.Tensor,
    slots: torch.Tensor,
    count: torch.Tensor,
    flags: torch.Tensor,
    blocks: torch.Tensor | None,
    digests: torch.Tensor | None,
) -> None:
    _check_transfer(pools, pages, slots, count, flags, blocks, digests)
    session = find_session(handle)
    layout, device = session.layout, session.device
    sides = 1 if layout.value_bytes == 0 else 2
    if len(pools) != sides:
        raise ValueError(f"pools: expected {sides} tensors as in the session's layout, found {len(pools)}")
    _same_device(device, pages=pages, slots=slots, count=count, flags=flags, blocks=blocks, digests=digests)
    if flags.shape[0] != layout.layers:
        raise ValueError(f"flags: expected one for each of {layout.layers} layers, found {flags.shape[0]}")
    if not 0 < pages.shape[0] <= session.most_pages:
        raise ValueError(
            f"pages: expected 1 to {session.most_pages} ids, found {pages.shape[0]}; transfer more in several calls"
        )
    with session.transfer(layer) as call:
        page_counts = []
        for side, (pool, page_bytes) in enumerate(zip(pools, (layout.key_bytes, layout.value_bytes), strict=False)):
            _same_device(device, pools=pool)
            page_counts.append(pool_page_count(pool, page_bytes, "pools"))
            call.pools[side] = pool.data_ptr()
            if call.pools[side] % 16 != 0:
                raise ValueError(f"pools: expected addresses that are multiples of 16, found {call.pools[side]:#x}")
        if len(set(page_counts)) != 1 or page_counts[0] == 0:
            raise ValueError(f"pools: expected as many whole pages of V as of K, found {page_counts}")
        call.op = op
        call.pool_page_count = min(page_counts[0], _MOST_ID)
        call.pool_pages, call.slots, call.count = pages.data_ptr(), slots.data_ptr(), count.data_ptr()
        call.most_pages = pages.shape[0]
        call.slot_blocks = blocks.data_ptr() if blocks is not None else None
        call.slot_count = min(blocks.shape[0], _MOST_ID) if blocks is not None else session.slots
        call.digests, call.digest_stride = _digests_of(session, layer, pages.shape[0], digests)
        call.flag = flags.data_ptr() + 4 * layer
        _run(session, call, flags, layer)


def _run(session: GioSession, call: gio_abi.Layer, flags: torch.Tensor, layer: int) -> None:
    if session.device.type == "cuda":
        session.host_calls += 1
        with torch.cuda.device(session.device):
            stream = torch.cuda.current_stream().cuda_stream
            gio_abi.gpu().call("tardis_gpu_gio_layer", ctypes.byref(call), stream)
        return
    if flags[layer] != 0:
        raise ValueError(
            f"flags[{layer}]: expected 0 before a transfer, found {int(flags[layer])}; flags.zero_() first"
        )
    session.host_calls += 1
    gio_abi.core().call("tardis_gio_host_layer", ctypes.byref(call))


def _digests_of(session: GioSession, layer: int, pages: int, digests: torch.Tensor | None) -> tuple[int, int]:
    if digests is None:
        return 0, 0
    layout = session.layout
    if digests.shape[0] < pages or tuple(digests.shape[1:]) != (layout.layers, layout.digests):
        raise ValueError(
            f"digests: expected [{pages} or more, {layout.layers}, {layout.digests}], found {list(digests.shape)}"
        )
    if session.commands_per_page > 1 and session.most_bytes % _DIGESTED_BYTES != 0:
        raise NotImplementedError(
            f"digests: expected commands of whole 16 KiB, found {session.most_bytes} bytes; use larger slot_bytes"
        )
    return digests.data_ptr() + 8 * layer * layout.digests, 8 * layout.layers * layout.digests


def _batch_get(
    session: int,
    layer: int,
    pools: Sequence[torch.Tensor],
    pages: torch.Tensor,
    slots: torch.Tensor,
    count: torch.Tensor,
    flags: torch.Tensor,
    *,
    blocks: torch.Tensor | None = None,
    digests: torch.Tensor | None = None,
) -> None:
    _transfer(gio_abi.READ, session, layer, pools, pages, slots, count, flags, blocks, digests)


def _batch_put(
    session: int,
    layer: int,
    pools: Sequence[torch.Tensor],
    pages: torch.Tensor,
    slots: torch.Tensor,
    count: torch.Tensor,
    flags: torch.Tensor,
    *,
    blocks: torch.Tensor | None = None,
    digests: torch.Tensor | None = None,
) -> None:
    _transfer(gio_abi.WRITE, session, layer, pools, pages, slots, count, flags, blocks, digests)


def _fake_transfer(
    session: int,
    layer: int,
    pools: Sequence[torch.Tensor],
    pages: torch.Tensor,
    slots: torch.Tensor,
    count: torch.Tensor,
    flags: torch.Tensor,
    *,
    blocks: torch.Tensor | None = None,
    digests: torch.Tensor | None = None,
) -> None:
    _check_transfer(pools, pages, slots, count, flags, blocks, digests)


def _check_wait(session: int, layer: int, pools: Sequence[torch.Tensor], flags: torch.Tensor) -> None:
    _expect(flags, "flags", torch.int32, (None,))


def _wait_layer(session: int, layer: int, pools: Sequence[torch.Tensor], flags: torch.Tensor) -> None:
    _check_wait(session, layer, pools, flags)
    found = find_session(session)
    _same_device(found.device, flags=flags)
    if not 0 <= layer < flags.shape[0]:
        raise ValueError(f"layer: expected 0 to {flags.shape[0] - 1}, found {layer}")
    if found.device.type == "cuda":
        found.host_calls += 1
        with torch.cuda.device(found.device):
            stream = torch.cuda.current_stream().cuda_stream
            gio_abi.gpu().call("tardis_gpu_gio_wait", flags.data_ptr() + 4 * layer, stream)
    elif flags[layer] == 0:
        raise GioError(
            f"wait_layer: expected a transfer of layer {layer} before it, found its flag 0: it would not end"
        )


def _lookup(index: int, keys: torch.Tensor, count: torch.Tensor, answers: torch.Tensor, *, space: int = 0) -> None:
    _check_lookup(keys, count, answers)
    found = find_index(index)
    _same_device(found.device, keys=keys, count=count, answers=answers)
    if not 0 <= space <= 0xFFFF:
        raise ValueError(f"space: expected 0 to 65535, found {space}")
    for name, tensor in (("keys", keys), ("answers", answers)):
        if tensor.data_ptr() % 16 != 0:
            raise ValueError(f"{name}: expected an address that is a multiple of 16, found {tensor.data_ptr():#x}")
    if keys.shape[0] == 0:
        return
    found.host_calls += 1
    place, places = ctypes.byref(found.place), (keys.data_ptr(), count.data_ptr(), keys.shape[0], space)
    if found.device.type == "cuda":
        with torch.cuda.device(found.device):
            stream = torch.cuda.current_stream().cuda_stream
            ticket = found.tickets.data_ptr()
            gio_abi.gpu().call("tardis_gpu_index_lookup", place, *places, answers.data_ptr(), ticket, None, 0, stream)
    else:
        gio_abi.core().call("tardis_index_lookup", place, *places, answers.data_ptr())


def _fake_lookup(index: int, keys: torch.Tensor, count: torch.Tensor, answers: torch.Tensor, *, space: int = 0) -> None:
    _check_lookup(keys, count, answers)


def _register() -> torch.library.Library:
    library = torch.library.Library("tardis", "DEF")
    ids = "Tensor pages, Tensor slots, Tensor count"
    ops = {
        f"batch_get(int session, int layer, Tensor(a!)[] pools, {ids}, Tensor(b!) flags, *, Tensor? blocks=None, "
        "Tensor? digests=None) -> ()": (_batch_get, _fake_transfer),
        f"batch_put(int session, int layer, Tensor[] pools, {ids}, Tensor(a!) flags, *, Tensor? blocks=None, "
        "Tensor(b!)? digests=None) -> ()": (_batch_put, _fake_transfer),
        "wait_layer(int session, int layer, Tensor(a!)[] pools, Tensor flags) -> ()": (_wait_layer, _check_wait),
        "lookup(int index, Tensor keys, Tensor count, Tensor(a!) answers, *, int space=0) -> ()": (
            _lookup,
            _fake_lookup,
        ),
    }
    for schema, (run, fake) in ops.items():
        name = schema.split("(", 1)[0]
        library.define(schema)
        for key in ("CPU", "CUDA"):
            library.impl(name, run, key)
        torch.library.register_fake(f"tardis::{name}", fake, lib=library)
    return library


_LIBRARY = _register()  # the ops live as long as this
