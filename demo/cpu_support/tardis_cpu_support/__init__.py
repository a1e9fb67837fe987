# SPDX-License-Identifier: Apache-2.0
"""Lets SGLang's hierarchical cache run on ``--device cpu``. For demonstrations and tests only.

SGLang's HiCache code (radix tree, controller, host pools, threads) is independent of the device except for a few calls
that exist for accelerators only. This package replaces exactly those, inside the process:

- rotary embedding: the plain torch implementation in place of one that imports an optional package;
- host pool memory: the same mapping, but not registered with CUDA;
- the copies between the device pool and the host pool (``sgl_kernel.kvcacheio``): torch functions with the same names
  and arguments (see :mod:`tardis_cpu_support.kvcacheio`). The host pools' own dispatch code stays in use;
- groups of ranks: without a NCCL communicator, so that gloo, which stands beside it, is used;
- the last slot of a prefix: SGLang's torch function in place of its Triton kernel, for attention backends that it does
  not know to run on a CPU.

SGLang loads it in every process it starts, through the ``sglang.srt.plugins`` entry point. It does nothing unless the
environment asks for it:

``TARDIS_CPU_SUPPORT=1``
    apply the replacements above.
``TARDIS_SEEDED_WEIGHTS=1``
    ``--load-format dummy`` draws matrices from N(0, 1 / columns), seeded by their names (stock: U(-1e-3, 1e-3), which
    makes all logits nearly equal, so that comparing them proves nothing). Works on any device.

Tests that build pools in their own process call :func:`apply_cpu_support` directly.
"""

from __future__ import annotations

import os

__all__ = ["CPU_SUPPORT_ENV", "SEEDED_WEIGHTS_ENV", "apply_cpu_support", "apply_seeded_weights", "register"]

CPU_SUPPORT_ENV = "TARDIS_CPU_SUPPORT"
SEEDED_WEIGHTS_ENV = "TARDIS_SEEDED_WEIGHTS"


def register() -> None:
    """Entry point: apply what the environment asks for."""
    if os.environ.get(CPU_SUPPORT_ENV) == "1":
        apply_cpu_support()
    if os.environ.get(SEEDED_WEIGHTS_ENV) == "1":
        apply_seeded_weights()


def apply_cpu_support() -> None:
    """Replace the accelerator-only calls of SGLang's hierarchical cache. Idempotent."""
    _use_native_rotary_embedding()
    _allocate_host_pools_unregistered()
    _install_transfer_functions()
    _join_ranks_by_gloo()
    _find_last_slots_by_torch()


def apply_seeded_weights() -> None:
    """Make ``--load-format dummy`` reproducible and its logits discriminating. Idempotent."""
    import sglang.srt.model_loader.loader as loader
    import sglang.srt.model_loader.weight_utils as weight_utils

    from tardis_cpu_support.weights import initialize_seeded_weights

    weight_utils.initialize_dummy_weights = initialize_seeded_weights
    loader.initialize_dummy_weights = initialize_seeded_weights


def _use_native_rotary_embedding() -> None:
    import sglang.srt.layers.rotary_embedding.base as base

    base._is_cpu = True  # read in __init__: skips the import of vllm's rotary kernel
    base.RotaryEmbedding.forward_cpu = base.RotaryEmbedding.forward_native


def _allocate_host_pools_unregistered() -> None:
    from sglang.srt.mem_cache.pool_host import common

    def allocate(dims, dtype, device, pin_memory, allocator, registration_granularity_bytes=None):
        return allocator.allocate(dims, dtype=dtype, device=device)

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate


def _install_transfer_functions() -> None:
    import sglang.srt.mem_cache.pool_host.mha as mha
    import sglang.srt.mem_cache.pool_host.mla as mla

    from tardis_cpu_support import kvcacheio

    for name in kvcacheio.__all__:
        function = getattr(kvcacheio, name)
        setattr(mha, name, function)
        setattr(mla, name, function)


def _join_ranks_by_gloo() -> None:
    from sglang.srt.distributed import parallel_state

    original = parallel_state.init_model_parallel_group
    if getattr(original, "tardis_cpu_support", False):
        return

    def without_nccl(*args, **kwargs):
        return original(*args, **{**kwargs, "use_pynccl": False})

    without_nccl.tardis_cpu_support = True
    parallel_state.init_model_parallel_group = without_nccl


def _find_last_slots_by_torch() -> None:
    try:
        from sglang.srt.mem_cache import allocation
    except ImportError:  # older releases: their attention backends for CPU are known there
        return
    allocation.get_last_loc_triton = allocation.get_last_loc_torch
