# SPDX-License-Identifier: Apache-2.0
"""What SGLang 0.5.16 needs beyond ``tardis_cpu_support`` to serve on a machine without a GPU. For tests only.

Some calls of that release exist for GPUs only, even with ``--device cpu``: the streams and events of its cache
controller, and the two Triton kernels of its page allocator. The first are replaced by torch's stand-ins for the CPU,
the others by functions with the same effect, one of them SGLang's own.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["register"]


class _Launch:
    """Stands for a Triton kernel: ``kernel[grid](arguments)`` calls a function."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, _grid: object) -> Callable[..., None]:
        return self._function


def _alloc_extend(prefix_lens, seq_lens, last_loc, free_pages, out_indices, _batch, page_size) -> None:
    from sglang.srt.mem_cache.allocator.paged import alloc_extend_naive

    alloc_extend_naive(prefix_lens, seq_lens, last_loc, free_pages, out_indices, page_size, "cpu")


def _alloc_decode(seq_lens, last_loc, free_pages, out_indices, _batch, page_size) -> None:
    """The slot of one more token a sequence: the next in its page, or the first of a free one."""
    taken = 0
    for i, (length, last) in enumerate(zip(seq_lens.tolist(), last_loc.tolist(), strict=True)):
        if (length - 1) % page_size:
            out_indices[i] = last + 1
        else:
            out_indices[i] = free_pages[taken] * page_size
            taken += 1


def register() -> None:
    """Entry point of the group ``sglang.srt.plugins``; does nothing on another release."""
    import importlib.metadata

    if importlib.metadata.version("sglang") != "0.5.16":
        return
    import sglang.srt.managers.cache_controller as controller
    import sglang.srt.mem_cache.allocator.paged as paged
    import torch

    controller.device_module = torch.cpu
    paged.alloc_extend_kernel = _Launch(_alloc_extend)
    paged.alloc_decode_kernel = _Launch(_alloc_decode)
