# SPDX-License-Identifier: Apache-2.0
"""What checks of SGLang 0.5.16 do in processes of their own: forked before this one has threads."""

from __future__ import annotations

import multiprocessing
import sys
import traceback

from sglang16_tree import Server, tokens

__all__ = ["run_late_imports", "run_two_ranks"]


def late_imports(results):
    """Load the plugin as a scheduler process does: with the controller imported, but not yet the tree."""
    try:
        from sglang.srt.plugins import load_plugins
        from sglang_tardis.sglang import plugin, seams

        plugin.register()  # load_plugins would, were the package installed; then it applies what is registered
        load_plugins()
        assert "sglang.srt.mem_cache.hiradix_cache" not in sys.modules
        assert not [seam for seam in seams.check() if not seam.ok], seams.check()
        from sglang.srt.mem_cache.hiradix_cache import HiRadixCache

        assert {"prefix keys", "extra keys"} <= {seam.name for seam in seams.check() if not seam.ok}
        seams.install_late()  # what building the cache controller does
        assert not [seam for seam in seams.check() if not seam.ok], seams.check()
        assert hasattr(HiRadixCache.write_backup_storage, "__wrapped__")
        results.put(None)
    except BaseException:
        results.put(traceback.format_exc())


def run_late_imports():
    import sglang.srt.managers.cache_controller
    import sglang.srt.managers.scheduler_components.weight_updater  # noqa: F401

    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=late_imports, args=(results,), daemon=True)
    process.start()
    outcome = results.get(timeout=120)
    process.join(10)
    return outcome


def two_ranks(rank, results, mla, folder, model):
    """One of two TP ranks: stores a prompt, and gets it back from storage, with the other."""
    try:
        import torch.distributed as dist
        from sglang.srt.runtime_context import get_parallel

        name = "mla" if mla else "mha"
        dist.init_process_group("gloo", init_method=f"file://{folder / f'rendezvous-{name}'}", rank=rank, world_size=2)
        with get_parallel().override(tp_rank=rank, tp_size=2, pp_rank=0, pp_size=1):
            server = Server(folder / f"ranks-{name}", model, mla=mla, tp=(rank, 2))
            prompt = tokens(1, 5)
            splits = [server.prefill(prompt)]
            server.flush()
            splits.append(server.prefill(prompt))
            splits.append(server.prefill(prompt[:32] + tokens(2, 2)))
            backend = server.controller.storage_backend
            written = backend._store.stats()["set_pages_written"]
            result = (splits, written, backend._identity.fingerprint().hex(), str(backend._rank))
            server.close()
        results.put((rank, result))
    except BaseException:
        results.put((rank, traceback.format_exc()))


def run_two_ranks(mla, folder, model):
    """What each rank saw, or its traceback."""
    context = multiprocessing.get_context("fork")  # before this process has threads of its own
    results = context.Queue()
    ranks = [
        context.Process(target=two_ranks, args=(rank, results, mla, folder, model), daemon=True) for rank in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        return [result for _, result in sorted(results.get(timeout=90) for _ in ranks)]
    finally:
        for process in ranks:
            process.join(10)
            if process.is_alive():
                process.kill()
