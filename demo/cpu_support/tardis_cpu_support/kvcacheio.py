# SPDX-License-Identifier: Apache-2.0
"""Torch versions of the copies between SGLang's device pools and host pools, for tensors that all live in CPU memory.

Names and arguments are those of ``sgl_kernel.kvcacheio``; the effects follow the host pools' documented layouts:

=================  ===============================================  =====================
suffix             host buffer of one of K, V (or of MLA's latent)  unit that is copied
=================  ===============================================  =====================
(none)             ``[layer][slot][item]``                          a token's row
``pf``             ``[slot][layer][item]``                          a token's row
``direct ... pf``  ``[page][layer][token][item]``                   a page
``ph``             ``[page][head][token][layer][dim]``              a token's heads
=================  ===============================================  =====================

A device buffer is always ``[slot][item]`` per layer (``lf``). Indices are int64 slots. Functions whose layers come as a
table of addresses (uint64, one a layer) read and write through those addresses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

__all__ = [
    "transfer_kv_all_layer",
    "transfer_kv_all_layer_direct_lf_pf",
    "transfer_kv_all_layer_lf_pf",
    "transfer_kv_all_layer_lf_ph",
    "transfer_kv_all_layer_mla",
    "transfer_kv_all_layer_mla_lf_pf",
    "transfer_kv_direct",
    "transfer_kv_per_layer",
    "transfer_kv_per_layer_direct_pf_lf",
    "transfer_kv_per_layer_mla",
    "transfer_kv_per_layer_mla_pf_lf",
    "transfer_kv_per_layer_pf_lf",
    "transfer_kv_per_layer_ph_lf",
]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as one row of bytes."""
    return tensor.view(-1).view(torch.uint8)


def _rows(tensor: torch.Tensor, item_size: int) -> torch.Tensor:
    """The tensor's memory as (rows, item_size) bytes."""
    return _bytes_of(tensor).view(-1, item_size)


def _rows_at(address: int, indices: torch.Tensor, item_size: int) -> torch.Tensor:
    """Memory at an address as (rows, item_size) bytes, as many rows as the indices need."""
    rows = int(indices.max()) + 1
    memory = (ctypes.c_uint8 * (rows * item_size)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(rows, item_size)


def _page_first(tensor: torch.Tensor, item_size: int, layout_dim: int) -> torch.Tensor:
    """A page_first host buffer as (slots, layers, item_size) bytes; layout_dim is the bytes of one slot."""
    return _bytes_of(tensor).view(-1, layout_dim // item_size, item_size)


def _first_of_pages(indices: torch.Tensor, page_size: int) -> list[int]:
    return indices[::page_size].tolist()


# ---- layer_first --------------------------------------------------------------------------------------------------


def transfer_kv_per_layer_mla(src, dst, src_indices, dst_indices, item_size, **_tuning) -> None:
    """One layer, rows to rows."""
    _rows(dst, item_size)[dst_indices] = _rows(src, item_size)[src_indices]


def transfer_kv_per_layer(src_k, dst_k, src_v, dst_v, src_indices, dst_indices, item_size, **_tuning) -> None:
    """One layer of K and V, rows to rows."""
    transfer_kv_per_layer_mla(src_k, dst_k, src_indices, dst_indices, item_size)
    transfer_kv_per_layer_mla(src_v, dst_v, src_indices, dst_indices, item_size)


def transfer_kv_all_layer_mla(
    src_layers, dst_layers, src_indices, dst_indices, item_size, num_layers, **_tuning
) -> None:
    """All layers, rows to rows, through address tables."""
    if src_indices.numel() == 0:
        return
    for source, target in zip(src_layers.tolist(), dst_layers.tolist(), strict=True):
        _rows_at(target, dst_indices, item_size)[dst_indices] = _rows_at(source, src_indices, item_size)[src_indices]


def transfer_kv_all_layer(
    src_k_layers, dst_k_layers, src_v_layers, dst_v_layers, src_indices, dst_indices, item_size, num_layers, **_tuning
) -> None:
    """All layers of K and V, rows to rows, through address tables."""
    transfer_kv_all_layer_mla(src_k_layers, dst_k_layers, src_indices, dst_indices, item_size, num_layers)
    transfer_kv_all_layer_mla(src_v_layers, dst_v_layers, src_indices, dst_indices, item_size, num_layers)


# ---- page_first ---------------------------------------------------------------------------------------------------


def transfer_kv_per_layer_mla_pf_lf(
    src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim, **_tuning
) -> None:
    """One layer, from a page_first host buffer to device rows."""
    _rows(dst, item_size)[dst_indices] = _page_first(src, item_size, src_layout_dim)[src_indices, layer_id]


def transfer_kv_per_layer_pf_lf(
    src_k, dst_k, src_v, dst_v, src_indices, dst_indices, layer_id, item_size, src_layout_dim, **_tuning
) -> None:
    """One layer of K and V, from a page_first host buffer to device rows."""
    for source, target in ((src_k, dst_k), (src_v, dst_v)):
        transfer_kv_per_layer_mla_pf_lf(source, target, src_indices, dst_indices, layer_id, item_size, src_layout_dim)


def transfer_kv_all_layer_mla_lf_pf(
    src_layers, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers, **_tuning
) -> None:
    """All layers, from device rows (address table) to a page_first host buffer."""
    if src_indices.numel() == 0:
        return
    target = _page_first(dst, item_size, dst_layout_dim)
    for layer, source in enumerate(src_layers.tolist()):
        target[dst_indices, layer] = _rows_at(source, src_indices, item_size)[src_indices]


def transfer_kv_all_layer_lf_pf(
    src_k_layers, dst_k, src_v_layers, dst_v, src_indices, dst_indices, item_size, dst_layout_dim, num_layers, **_tuning
) -> None:
    """All layers of K and V, from device rows (address tables) to a page_first host buffer."""
    for sources, target in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        transfer_kv_all_layer_mla_lf_pf(
            sources, target, src_indices, dst_indices, item_size, dst_layout_dim, num_layers
        )


# ---- page_head ----------------------------------------------------------------------------------------------------


def _page_head(tensor: torch.Tensor, item_size: int, layout_dim: int, page_size: int, head_num: int) -> torch.Tensor:
    """A page_head host buffer as (pages, heads, tokens, layers, bytes of one head)."""
    return _bytes_of(tensor).view(-1, head_num, page_size, layout_dim // item_size, item_size // head_num)


def transfer_kv_per_layer_ph_lf(
    src_k, dst_k, src_v, dst_v, src_indices, dst_indices, layer_id, item_size, src_layout_dim, page_size, head_num, **_
) -> None:
    """One layer of K and V, from a page_head host buffer to device rows."""
    page, token = src_indices // page_size, src_indices % page_size
    for source, target in ((src_k, dst_k), (src_v, dst_v)):
        heads = _page_head(source, item_size, src_layout_dim, page_size, head_num)[page, :, token, layer_id]
        _rows(target, item_size)[dst_indices] = heads.reshape(-1, item_size)


def transfer_kv_all_layer_lf_ph(
    src_k_layers,
    dst_k,
    src_v_layers,
    dst_v,
    src_indices,
    dst_indices,
    item_size,
    dst_layout_dim,
    num_layers,
    page_size,
    head_num,
    **_tuning,
) -> None:
    """All layers of K and V, from device rows (address tables) to a page_head host buffer."""
    if src_indices.numel() == 0:
        return
    page, token = dst_indices // page_size, dst_indices % page_size
    for sources, target in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        view = _page_head(target, item_size, dst_layout_dim, page_size, head_num)
        for layer, source in enumerate(sources.tolist()):
            rows = _rows_at(source, src_indices, item_size)[src_indices]
            view[page, :, token, layer] = rows.view(-1, head_num, item_size // head_num)


# ---- direct: whole pages ------------------------------------------------------------------------------------------


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor], dst_layers: Sequence[torch.Tensor], src_indices, dst_indices, page_size
) -> None:
    """Layer by layer, rows to rows."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[torch.Tensor], dst_ptrs: Sequence[torch.Tensor], src_indices, dst_indices, layer_id, page_size
) -> None:
    """One layer, from page_first_direct host buffers to device rows, page by page."""
    pages = zip(_first_of_pages(src_indices, page_size), _first_of_pages(dst_indices, page_size), strict=True)
    for host, device in pages:
        for source, target in zip(src_ptrs, dst_ptrs, strict=True):
            target[device : device + page_size] = source[host // page_size, layer_id].view(
                target[device : device + page_size].shape
            )


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor], dst_ptrs: Sequence[torch.Tensor], src_indices, dst_indices, page_size
) -> None:
    """All layers, from device rows to page_first_direct host buffers, page by page.

    `src_ptrs` holds the layers of the first target (K), then those of the second (V), if any.
    """
    layers = len(src_ptrs) // len(dst_ptrs)
    pages = zip(_first_of_pages(src_indices, page_size), _first_of_pages(dst_indices, page_size), strict=True)
    for device, host in pages:
        for which, target in enumerate(dst_ptrs):
            for layer in range(layers):
                rows = src_ptrs[which * layers + layer][device : device + page_size]
                slot = target[host // page_size, layer]
                slot.copy_(rows.view(slot.shape))
