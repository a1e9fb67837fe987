# SPDX-License-Identifier: Apache-2.0
"""What a server cannot be made to show at will: requests that end before the result of the batch that loads for them.

Cache, scheduler and requests are stand-ins with the attributes that SGLang's own code gives them; the real ones are in
server/test_direct.py.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang_tardis.sglang import load_results
from sglang_tardis.sglang.load_results import LoadResults


@pytest.fixture(autouse=True)
def one_stage(monkeypatch):
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: SimpleNamespace(pp_size=1))


class Linker:
    """Loads that land or do not; remembers what it was asked."""

    def __init__(self):
        self.landed, self.finished, self.refused = {}, [], []

    def finish_layer_wise_loading(self, index):
        self.finished.append(index)
        return self.landed[index]

    def refuse_rid(self, rid):
        self.refused.append(rid)


class Wrapper:
    def __init__(self, linker):
        self.cache_linker = linker
        self.inflight_load_rids, self.inflight_load_index, self.private_load_indices = [], -1, {}


def request(rid, **changes):
    values = dict(
        rid=rid,
        skip_radix_cache_insert=False,
        discard_output_reason=None,
        to_finish=None,
        is_retracted=False,
        session=None,
        grammar=None,
        beam_group=None,
        inflight_middle_chunks=0,
        kv=SimpleNamespace(holds_kv=True),
        finished=lambda: False,
    )
    return SimpleNamespace(**values | changes)


class Server:
    """Launches batches of requests that all load."""

    def __init__(self, **changes):
        self.linker = Linker()
        self.wrapper = Wrapper(self.linker)
        self.cache = SimpleNamespace(linker=self.wrapper, _all_reduce_attn_groups=lambda tensor, op: None)
        values = dict(
            tree_cache=self.cache,
            disaggregation_mode=DisaggregationMode.NULL,
            enable_pdmux=False,
            enable_overlap_mlx=False,
            enable_hisparse=False,
            chunked_req=None,
            _pending_chunked_abort_req=None,
        )
        self.scheduler = SimpleNamespace(**values | changes)
        self.asked_sglang = []

    def launch(self, index, *reqs, landed=True):
        batch = SimpleNamespace(
            reqs=list(reqs),
            forward_iter=index,
            is_dllm=lambda: False,
            spec_algorithm=SimpleNamespace(is_none=lambda: True),
        )
        self.linker.landed[index] = landed
        self.wrapper.inflight_load_rids = [req.rid for req in reqs]
        self.wrapper.inflight_load_index = index
        self.wrapper.private_load_indices.update({req.rid: object() for req in reqs})

        def run(scheduler, batch):
            return load_results.finish_loads(lambda cache, reqs: self.asked_sglang.append(reqs) or [], self.cache, reqs)

        assert load_results.run_batch(run, self.scheduler, batch) == []
        return batch

    def result(self, batch):
        LoadResults.of(self.cache).result(self.scheduler, batch)


def test_the_linker_hears_what_a_batch_computes():
    server, heard = Server(), []
    server.linker.expect_tokens = heard.append
    reqs = [request("a", extend_len=64), request("b", extend_input_len=8192), request("c")]
    for cache in (server.cache, SimpleNamespace(linker=None), SimpleNamespace()):
        assert load_results.new_batch(None, reqs, None, None, cache, None, True) is None
    assert heard == [8256]


def test_nothing_is_waited_for_at_the_launch_and_results_come_in_order():
    server = Server()
    first, second = request("a"), request("b")
    batches = [server.launch(0, first), server.launch(1, second)]
    assert server.linker.finished == [] and server.asked_sglang == []
    assert first.skip_radix_cache_insert and second.skip_radix_cache_insert  # no chunk is published
    assert set(server.wrapper.private_load_indices) == {"a", "b"}
    server.result(batches[0])
    assert server.linker.finished == [0] and not first.skip_radix_cache_insert and second.skip_radix_cache_insert
    assert set(server.wrapper.private_load_indices) == {"b"}
    server.result(batches[1])
    assert server.linker.finished == [0, 1] and not second.skip_radix_cache_insert


def test_a_request_that_is_released_early_waits_for_its_load_once():
    server = Server()
    req, other = request("a"), request("b", skip_radix_cache_insert=True)
    batch = server.launch(0, req, other, landed=False)
    load_results.claim_row(server.cache, req)
    load_results.claim_row(server.cache, other)
    load_results.claim_row(server.cache, request("c"))
    assert server.linker.finished == [0]
    req.is_retracted, other.kv.holds_kv = True, False  # both are gone from this batch
    server.result(batch)
    assert server.linker.finished == [0] and server.linker.refused == ["a", "b"]
    assert req.discard_output_reason is None and other.discard_output_reason is None
    assert not req.skip_radix_cache_insert
    assert other.skip_radix_cache_insert, "it was barred by SGLang, before"
    assert LoadResults.of(server.cache)._failed == []


@pytest.mark.parametrize(
    "changes",
    [
        {"session": SimpleNamespace(streaming=True)},
        {"beam_group": object()},
        {"to_finish": FINISH_ABORT("the client went away")},
    ],
)
def test_what_cannot_run_again_is_aborted_as_sglang_does(changes):
    server = Server()
    req = request("a", **changes)
    batch = server.launch(0, req, landed=False)
    server.scheduler.chunked_req = req
    server.result(batch)
    assert isinstance(req.discard_output_reason, FINISH_ABORT) and req.skip_radix_cache_insert
    assert server.scheduler._pending_chunked_abort_req is req
    if req.to_finish is not None:
        assert req.discard_output_reason is req.to_finish


def test_a_flush_forgets_what_is_under_way():
    server = Server()
    req = request("a")
    server.launch(0, req)
    load_results.reset(server.wrapper)
    assert not req.skip_radix_cache_insert
    load_results.claim_row(server.cache, req)
    assert server.linker.finished == []  # its own reset ended the load


@pytest.mark.parametrize("changes", [{"enable_pdmux": True}, {"disaggregation_mode": DisaggregationMode.PREFILL}])
def test_other_event_loops_keep_sglangs_own_wait(changes):
    server = Server(**changes)
    req = request("a")
    server.launch(0, req)
    assert server.asked_sglang == [(req,)] and not req.skip_radix_cache_insert


def test_other_linkers_are_left_alone():
    server = Server()
    server.wrapper.cache_linker = SimpleNamespace()
    server.launch(0, request("a"))
    assert len(server.asked_sglang) == 1
