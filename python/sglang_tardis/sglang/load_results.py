# SPDX-License-Identifier: Apache-2.0
"""Loads of SGLang's external linker are finished when their batch's result is processed; what failed is computed.

SGLang waits for the loads of a batch as soon as its forward was launched, on the scheduler's thread, and aborts the
requests whose pages did not come. Here the wait is moved to the batch's result, which waits for the GPU anyway, and a
request whose load failed runs again without its external hit:

1. *launched*: the loads of a batch are remembered by its iteration. Until they are confirmed their requests are barred
   from the radix tree (``skip_radix_cache_insert``), so that no chunk is published that stands on unproven pages.
2. *result*: the rank waits for its own loads, the ranks agree (MIN), in the order of results, which is the same on all.
3. *failed*: what the request's batches in flight put out is dropped, as SGLang drops what a middle chunk puts out. It
   leaves every batch and waits until none in flight has it; then its KV is freed without an insert and it queues again
   as a retracted request does, and the linker offers nothing to it any more.

Whoever frees a request's KV earlier (abort, retraction, preemption) waits for its load first: nothing is freed that a
load may still write. Where a request cannot be run again, SGLang's own abort (503) is taken: streaming sessions, beam
search, grammars with speculative decoding. Event loops other than the normal and the overlapping one (pipeline or
prefill/decode disaggregation, PD multiplexing, dLLM, HiSparse) keep SGLang's own wait and abort.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any, Protocol

import torch

from sglang_tardis.log import logger

__all__ = ["LoadResults", "RetryingLinker"]

_ATTRIBUTE = "tardis_load_results"

#: Requests of the result that is being processed whose output is dropped; the streamer leaves them out.
_dropped: ContextVar[Sequence[Any]] = ContextVar("tardis_dropped", default=())


class RetryingLinker(Protocol):
    """What these hooks need of a linker; one without ``refuse_rid`` is left to SGLang."""

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait until nothing of this index writes any more; whether all of it landed. Called once."""

    def refuse_rid(self, rid: str) -> None:
        """Offer no more hits to this request."""

    def expect_tokens(self, count: int) -> None:
        """The batch whose loads start next computes so many tokens."""


class _Launched:
    """The loads of one batch, from its launch to its result."""

    def __init__(self, index: int, rids: Sequence[str], barred: list[Any]) -> None:
        self.index = index
        self.rids = rids
        self.barred = barred  # requests that would have been published
        self.landed: bool | None = None  # on this rank


class _Failed:
    """A request that is to run again, until no batch in flight has it."""

    def __init__(self, req: Any, published: bool) -> None:
        self.req = req
        self.published = published
        self.removed = False  # from what is scheduled next


class LoadResults:
    """Loads under way of one scheduler's cache. Scheduler thread only."""

    def __init__(self, cache: Any, wrapper: Any) -> None:
        self._cache = cache
        self._wrapper = wrapper
        self._launched: dict[int, _Launched] = {}
        self._by_rid: dict[str, _Launched] = {}
        self._failed: list[_Failed] = []
        self._launching: Any = None
        self._defers: bool | None = None

    @staticmethod
    def of(cache: Any) -> LoadResults | None:
        """Those of a tree cache; None if it has no linker that wants them."""
        wrapper = getattr(cache, "linker", None)
        if wrapper is None:
            return None
        results = wrapper.__dict__.get(_ATTRIBUTE)
        if results is None and hasattr(wrapper.cache_linker, "refuse_rid"):
            results = wrapper.__dict__[_ATTRIBUTE] = LoadResults(cache, wrapper)
        return results

    # ---- launched ----

    @contextlib.contextmanager
    def launching(self, scheduler: Any, batch: Any) -> Iterator[None]:
        """A batch is being launched; its loads may wait for its result."""
        if self._defers is None:
            self._defers = _result_follows(scheduler)
        self._launching = batch if self._defers and not batch.is_dllm() else None
        try:
            yield
        finally:
            self._launching = None

    def expect_tokens(self, count: int) -> None:
        """See `RetryingLinker`."""
        self._wrapper.cache_linker.expect_tokens(count)

    def launch(self) -> bool:
        """Remember the loads of the batch that was just launched; False if SGLang shall finish them itself."""
        batch, wrapper = self._launching, self._wrapper
        if batch is None:
            return False
        rids, wrapper.inflight_load_rids = wrapper.inflight_load_rids, []
        if rids:
            index, wrapper.inflight_load_index = wrapper.inflight_load_index, -1
            names = set(rids)
            barred = [req for req in batch.reqs if req.rid in names and not req.skip_radix_cache_insert]
            for req in barred:
                req.skip_radix_cache_insert = True
            launched = self._launched[batch.forward_iter] = _Launched(index, rids, barred)
            self._by_rid.update(dict.fromkeys(rids, launched))
        return True

    def wait_for(self, rid: str) -> None:
        """Return when no load writes to this request's pages; without the other ranks."""
        launched = self._by_rid.get(rid)
        if launched is not None:
            self._wait(launched)

    def _wait(self, launched: _Launched) -> bool:
        if launched.landed is None:
            launched.landed = bool(self._wrapper.cache_linker.finish_layer_wise_loading(launched.index))
        return launched.landed

    def reset(self) -> None:
        """The cache is emptied; the linker's own reset ends what is under way."""
        for launched in self._launched.values():
            _publish(launched.barred)
        self._launched.clear()
        self._by_rid.clear()

    # ---- result ----

    def result(self, scheduler: Any, batch: Any) -> None:
        """Before a batch's result is used: its loads have landed on every rank, or their requests are to run again."""
        launched = self._launched.pop(batch.forward_iter, None)
        if launched is None:
            return
        landed = torch.tensor([int(self._wait(launched))], dtype=torch.int)
        self._cache._all_reduce_attn_groups(landed, torch.distributed.ReduceOp.MIN)
        for rid in launched.rids:
            if self._by_rid.get(rid) is launched:
                del self._by_rid[rid]
                self._wrapper.private_load_indices.pop(rid, None)
        _publish(launched.barred)
        if not landed.item():
            self._fail(scheduler, batch, launched)

    def _fail(self, scheduler: Any, batch: Any, launched: _Launched) -> None:
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        again, aborted, names = [], [], set(launched.rids)
        for rid in launched.rids:
            self._wrapper.cache_linker.refuse_rid(rid)
        for req in batch.reqs:
            if req.rid not in names or req.finished() or req.is_retracted or not req.kv.holds_kv:
                continue
            if req.to_finish is None and _can_run_again(req, batch):
                self._failed.append(_Failed(req, not req.skip_radix_cache_insert))
                again.append(req.rid)
            else:
                req.discard_output_reason = req.to_finish or FINISH_ABORT(
                    "External KV cache load failed", HTTPStatus.SERVICE_UNAVAILABLE
                )
                if scheduler.chunked_req is req:
                    scheduler._pending_chunked_abort_req = req
                aborted.append(req.rid)
            req.skip_radix_cache_insert = True
        if again:
            logger.warning("tardis: pages of %d request(s) did not land; they are computed: %s", len(again), again)
        if aborted:
            logger.error("tardis: pages of %d request(s) did not land; they are aborted: %s", len(aborted), aborted)

    @contextlib.contextmanager
    def dropping(self, scheduler: Any, batch: Any) -> Iterator[None]:
        """While a result is processed: what it says of failed requests is neither kept nor sent."""
        dropped = [failed.req for failed in self._failed if failed.req in batch.reqs]
        for req in dropped:
            if batch.forward_mode.is_decode():
                req.is_retracted = True
            else:  # a middle chunk: nothing is committed, and the logprobs of the others are found behind its own
                req.inflight_middle_chunks = max(req.inflight_middle_chunks, 0) + 1
        token = _dropped.set(dropped)
        try:
            yield
        finally:
            _dropped.reset(token)
        self._run_again(scheduler)

    # ---- failed ----

    def remove_failed(self, scheduler: Any, *batches: Any) -> None:
        """Before the next batch is chosen: failed requests leave the batches and the chunk that it would be made of."""
        if not self._failed:
            return
        if (aborted := scheduler._pending_chunked_abort_req) is not None and aborted is scheduler.chunked_req:
            self._failed = [failed for failed in self._failed if failed.req is not aborted]  # SGLang's abort ends it
        reqs = [failed.req for failed in self._failed]
        for batch in batches:
            if batch is not None and any(req in batch.reqs for req in reqs):
                batch.filter_batch(reqs_to_exclude=reqs)
                batch.batch_is_full = False
        if scheduler.chunked_req in reqs:
            scheduler.chunked_req = None
        for failed in self._failed:
            failed.removed = True
        self._run_again(scheduler)

    def _run_again(self, scheduler: Any) -> None:
        """Queue the failed requests that no batch in flight has."""
        if not self._failed:
            return
        in_flight = [batch for batch, _result in getattr(scheduler, "result_queue", ())]
        waiting = []
        for failed in self._failed:
            req = failed.req
            if not req.kv.holds_kv:  # paused or preempted meanwhile: it is queued already
                req.skip_radix_cache_insert = not failed.published
            elif failed.removed and not any(req in batch.reqs for batch in in_flight):
                self._queue(scheduler, failed)
            else:
                waiting.append(failed)
        self._failed = waiting

    def _queue(self, scheduler: Any, failed: _Failed) -> None:
        from sglang.srt.managers.scheduler import _make_abort_req
        from sglang.srt.mem_cache.common import release_kv_cache

        req = failed.req
        release_kv_cache(req, scheduler.tree_cache, checkpoint=False)
        seen = req.retracted_stain
        req.reset_for_retract()
        req.skip_radix_cache_insert = not failed.published
        if not seen:  # what it had found counts for nothing: its cached tokens are counted when it runs again
            req.retracted_stain = False
            req.cached_tokens = req.cached_tokens_device = req.cached_tokens_host = req.cached_tokens_storage = 0
            req._cache_breakdown_computed = False
        if req.to_finish is None:
            scheduler._add_request_to_queue(req, is_retracted=True)
        else:  # aborted meanwhile
            scheduler._release_aborted_request(req)
            scheduler.send_abort_output(_make_abort_req(req, finished_reason=req.to_finish.to_json()), req)


def _publish(reqs: Sequence[Any]) -> None:
    for req in reqs:
        req.skip_radix_cache_insert = False


def _result_follows(scheduler: Any) -> bool:
    """Whether each launch is followed by one result, in order, on the scheduler's thread."""
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.runtime_context import get_parallel

    return (
        scheduler.disaggregation_mode == DisaggregationMode.NULL
        and get_parallel().pp_size == 1
        and not scheduler.enable_pdmux
        and not scheduler.enable_overlap_mlx
        and not scheduler.enable_hisparse
    )


def _can_run_again(req: Any, batch: Any) -> bool:
    streaming = req.session is not None and req.session.streaming
    advanced = req.grammar is not None and not batch.spec_algorithm.is_none()
    return not streaming and not advanced and req.beam_group is None


# ---- the hooks ------------------------------------------------------------------------------------------------------


def new_batch(cls, reqs, req_to_token_pool, token_to_kv_pool_allocator, tree_cache, *args, **kwargs):
    """ScheduleBatch.init_new, just before the loads of a batch that extends are started."""
    results = LoadResults.of(tree_cache)
    if results is not None:
        results.expect_tokens(sum(_extends_by(req) for req in reqs))


def _extends_by(req: Any) -> int:
    # Before 0.5.23 it is a field of another name.
    return getattr(req, "extend_len", None) or getattr(req, "extend_input_len", None) or 0


def run_batch(original, self, batch, *args, **kwargs):
    """Scheduler.run_batch."""
    results = LoadResults.of(self.tree_cache)
    if results is None:
        return original(self, batch, *args, **kwargs)
    with results.launching(self, batch):
        return original(self, batch, *args, **kwargs)


def finish_loads(original, self, reqs):
    """UnifiedRadixCache.finish_external_linker_loads: nobody has failed so far."""
    results = LoadResults.of(self)
    if results is not None and results.launch():
        return []
    return original(self, reqs)


def process_result(original, self, batch, result):
    """Scheduler.process_batch_result."""
    results = LoadResults.of(self.tree_cache)
    if results is None:
        return original(self, batch, result)
    results.result(self, batch)
    with results.dropping(self, batch):
        return original(self, batch, result)


def choose_batch(self, running_batch, last_batch):
    """Scheduler.get_next_batch_to_run."""
    results = LoadResults.of(self.tree_cache)
    if results is not None:
        results.remove_failed(self, running_batch, last_batch)


def stream_output(self, reqs, return_logprob, skip_req=None):
    """SchedulerOutputStreamer.stream_output."""
    dropped = _dropped.get()
    if dropped:
        return (self, [req for req in reqs if req not in dropped], return_logprob, skip_req), {}
    return None


def claim_row(self, req):
    """UnifiedRadixCache.claim_kv_row, where every release of a request's KV begins."""
    results = LoadResults.of(self)
    if results is not None:
        results.wait_for(req.rid)


def reset(self):
    """UnifiedCacheLinkerWrapper.reset."""
    results = self.__dict__.get(_ATTRIBUTE)
    if results is not None:
        results.reset()
