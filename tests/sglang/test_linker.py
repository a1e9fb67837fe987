# SPDX-License-Identifier: Apache-2.0
"""The direct door: the real tree, the real linker and the real store, on CPU tensors."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import corrupt
import numpy as np
import pytest
import torch
from host_pools import host_pool, publish, slots
from linker_server import Served
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_kv_host_pool
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang_tardis.gio_abi import GioError
from sglang_tardis.load_engine import Load
from sglang_tardis.sglang import weight_updates
from tree_server import prompt


def test_pages_come_back_from_memory_from_files_and_after_a_restart(serve):
    tokens = prompt(1, 20)
    server = serve()
    assert server.serve(tokens) == Served(0, 0, 320, True)
    assert server.serve(tokens) == Served(320, 0, 0, True)

    server.forget_device()
    assert server.serve(tokens) == Served(0, 320, 0, True)
    assert (server.linker.state()["pages_from_memory"], server.linker.state()["pages_from_files"]) == (20, 0)

    server.forget_dram()
    assert server.serve(tokens) == Served(0, 320, 0, True)
    assert server.linker.state()["pages_from_files"] == 20
    server.close()

    again = serve()
    assert again.serve(tokens + prompt(2, 3)) == Served(0, 320, 48, True)
    assert again.linker.state()["pages_from_files"] == 20


KINDS = {
    "MHA": {},
    "fp8, K and V of one layer in half a block": {"dtype": "fp8_e4m3", "head_dim": 16},
    "MLA": {"mla": True, "head_dim": 112, "layers": 3},
    "several digests and commands a page": {"heads": 8, "head_dim": 128, "layers": 2, "tokens": 1024},
}


@pytest.mark.parametrize("kind", KINDS)
def test_pools_of_each_kind(serve, kind):
    tokens = prompt(3, 9)
    server = serve(**KINDS[kind])
    assert server.serve(tokens).computed == 144
    for forget in (server.forget_device, server.forget_dram):
        forget()
        assert server.serve(tokens) == Served(0, 144, 0, True)
    assert (server.linker.state()["pages_from_memory"], server.linker.state()["pages_from_files"]) == (9, 9)


def test_a_prompt_partly_in_memory_and_partly_in_files(serve):
    """Every other page is evicted from the tier: lookups go on from one to the other."""
    tokens = prompt(4, 12)
    server = serve()
    server.serve(tokens)
    server.forget_device()
    hashes = _hashes(tokens)
    namespace = server.linker._live.current()
    assert server.linker._door.tier.erase(namespace.handle, np.ascontiguousarray(hashes[1::2])) == 6
    assert server.serve(tokens) == Served(0, 192, 0, True)
    assert (server.linker.state()["pages_from_memory"], server.linker.state()["pages_from_files"]) == (6, 6)
    server.forget_device()
    assert server.serve(tokens).loaded == 192
    assert server.linker.state()["pages_from_memory"] == 18, "pages from files were not promoted where there was room"

    server.forget_device()
    files = namespace._store.remove(hashes[3:5].tobytes().hex()[:64])  # one page is in memory alone
    assert files == 1 and namespace.lookup(hashes) == 3
    assert server.serve(tokens) == Served(0, 192, 0, True)


def test_loads_of_more_pages_than_a_board_takes(serve, monkeypatch):
    tokens = prompt(5, 40)
    server = serve()
    engine = server.linker._door.engine
    monkeypatch.setattr(engine, "most_file_pages", 3)
    monkeypatch.setattr(engine, "most_pinned_pages", 2)
    server.serve(tokens)
    for forget in (server.forget_device, server.forget_dram):  # 20 and 14 loads of one batch, on 8 boards
        forget()
        assert server.serve(tokens) == Served(0, 640, 0, True)
    assert engine.under_way == 0 and len(engine._free) == 8


def test_several_requests_in_a_batch_and_several_batches_at_once(serve):
    server = serve(tokens=4096)
    prompts = [prompt(seed, 6) for seed in range(12)]
    for tokens in prompts:
        server.serve(tokens)
    server.forget_dram()
    batches = []
    for first in range(0, 12, 3):
        loads = []
        for tokens in prompts[first : first + 3]:
            req = server.request()
            assert server.queue(tokens, req)[0] == 0
            loads.append((tokens, server.cache.linker.private_load_indices[req.rid]))
        batches.append((server.linker.start_layer_wise_loading(), loads))
    assert [index for index, _ in batches] == [0, 1, 2, 3]
    for index, loads in batches:
        server.forward(index)
        for tokens, loaded in loads:
            server.check(loaded, tokens)  # before the batch was finished
    for index, _ in reversed(batches):
        assert server.linker.finish_layer_wise_loading(index)
        assert server.linker.is_finished(index)
    assert server.linker._door.engine.under_way == 0


def test_what_the_tier_cannot_take_comes_from_files(serve):
    server = serve(extra={"dram": "64KiB"})  # two pages
    assert server.linker._door.tier.slots == 2
    tokens = prompt(6, 10)
    assert server.serve(tokens).computed == 160
    assert server.linker.state()["pages_dropped_no_room"] > 0
    before = 0
    for _ in range(9):  # the tree offers again what was not kept
        server.forget_device()
        served = server.serve(tokens)
        assert served.good and served.loaded >= before
        before = served.loaded
    assert before == 160 and server.linker.state()["pages_from_files"] > 0


def test_a_store_without_room_leaves_pages_in_memory(serve):
    server = serve(extra={"capacity": "8MiB", "segment_size": "4MiB"}, tokens=8192)
    for seed in range(8):
        assert server.serve(prompt(seed, 20)).good
    server.linker.drain()
    assert server.linker._store.stats()["evicted_pages"] > 0
    server.forget_device()
    served = server.serve(prompt(7, 20))
    assert served == Served(0, 320, 0, True)
    server.forget_dram()
    assert server.serve(prompt(7, 20)).good


def test_what_waits_to_be_stored_is_bounded(serve, monkeypatch):
    server = serve(extra={"write_behind": "128KiB"})
    behind = server.linker._door.behind
    gate = threading.Event()
    namespace = server.linker._live.current()
    stored = type(namespace).set
    monkeypatch.setattr(type(namespace), "set", lambda *arguments: gate.wait(20) and stored(*arguments))
    server.serve(prompt(1, 4))  # waits
    server.serve(prompt(2, 4))
    assert behind.waiting_bytes == 4 * server.linker._layout.object_bytes
    assert server.linker.state()["pages_in_memory_only"] == 4
    gate.set()
    server.forget_device()
    for seed in (1, 2):
        assert server.serve(prompt(seed, 4)) == Served(0, 64, 0, True)
    server.forget_dram()  # they were offered again, with room
    for seed in (1, 2):
        assert server.serve(prompt(seed, 4)) == Served(0, 64, 0, True)
    assert behind.waiting_bytes == 0


def test_damaged_bytes_are_computed_again_and_not_offered_again(serve, tmp_path, caplog):
    tokens, other = prompt(1, 10), prompt(2, 4)
    server = serve()
    server.serve(tokens)
    server.serve(other)
    server.close()
    corrupt.flip_signs(corrupt.stored_pages(tmp_path / "store")[_hashes(tokens)[4].tobytes()])

    server = serve()
    req = server.request("r1")
    assert server.match(tokens, req) == (0, 160)
    assert server.serve(tokens, "r1") == Served(0, 0, 160, False)
    assert "they are computed" in caplog.text
    state = server.linker.state()
    assert state["failed_loads"] == 1 and state["loader_damaged_pages"] == 1
    assert server.serve(other) == Served(0, 64, 0, True)

    server.forget_device()  # the page was computed, and is in memory with right bytes
    assert server.linker.lookup("r1", [_transfer(tokens)]) == [], "the request is to be computed"
    assert server.serve(tokens, "r2") == Served(0, 160, 0, True)
    server.forget_dram()
    assert server.serve(tokens, "r3") == Served(0, 160, 0, True), "it was stored again"


def test_pages_that_vanish_between_lookup_and_load_make_it_fail(serve):
    tokens = prompt(1, 10)
    server = serve()
    server.serve(tokens)
    server.forget_dram()
    req = server.request()
    server.queue(tokens, req)
    assert server.linker._store.clear() == 10
    index = server.linker.start_layer_wise_loading()
    server.forward(index)
    assert not server.linker.finish_layer_wise_loading(index)
    assert server.linker.lookup(req.rid, [_transfer(tokens)]) == []
    assert server.linker.state()["loader_missing"] > 0


def test_requests_whose_loads_failed_are_remembered_up_to_a_bound(serve):
    linker = serve().linker
    for number in range(5000):
        linker.refuse_rid(f"r{number}")
    assert len(linker._refused) == 4096 and "r4999" in linker._refused and "r0" not in linker._refused


def test_a_thousand_aborted_loads_leave_nothing_behind(serve):
    tokens = prompt(1, 8)
    server = serve()
    server.serve(tokens)
    server.forget_device()
    linker, wrapper = server.linker, server.cache.linker
    hashes = _hashes(tokens)
    linker._door.tier.erase(linker._live.current().handle, np.ascontiguousarray(hashes[5:]))
    taken = server.allocator.alloc(128)
    threads = threading.active_count()
    for number in range(1000):
        rid = f"r{number}"
        pages = 8 if number % 20 == 0 else 5  # the others are in memory
        assert linker.lookup(rid, [_transfer(tokens[: 16 * pages])]) == [pages]
        assert linker.load(rid, [_transfer(tokens[: 16 * pages], taken[: 16 * pages])])
        if number % 2:  # aborted while it was queued
            assert linker.cancel_queued_load(rid) and not linker.cancel_queued_load(rid)
            continue
        index = linker.start_layer_wise_loading()
        assert linker.finish_layer_wise_loading(index)  # started ones are finished before anything is freed
    assert linker.start_layer_wise_loading() == -1
    state = linker.state()
    assert state["dram_pinned"] == state["dram_reserved"] == state["loads_under_way"] == 0
    assert len(linker._door.engine._free) == 8 and threading.active_count() == threads
    assert not wrapper.cache_linker._batches and not linker.layer_done_counter._sources
    server.check(taken, tokens)
    # A lease that was left would keep its slot from being used again.
    server.linker._store.clear()
    assert linker._store.stats()["slots_live"] == 0


def test_aborts_by_the_tree(serve):
    tokens = prompt(1, 8)
    server = serve()
    server.serve(tokens)
    server.forget_device()
    free = server.allocator.available_size()
    req = server.request()
    _, _, loaded = server.queue(tokens, req)
    assert server.linker.state()["dram_pinned"] == 8
    server.cache.linker.release_request(req.rid)
    server.allocator.free(loaded)
    assert server.linker.state()["dram_pinned"] == 0
    assert server.allocator.available_size() == free
    assert server.cache.ready_to_load_host_cache() == -1


def test_reset_while_loads_and_offloads_are_under_way(serve):
    server = serve(tokens=4096)
    prompts = [prompt(seed, 10) for seed in range(6)]
    for tokens in prompts:
        server.serve(tokens)
    server.forget_device()
    for tokens in prompts[:3]:
        server.queue(tokens, server.request())
    server.cache.ready_to_load_host_cache()
    server.queue(prompts[3], server.request())  # stays queued
    for page in server._device_buffers():
        for buffer in page:
            buffer[: server.page_size].fill_(0)
    taken = server.allocator.alloc(32)
    server.linker.offload([_transfer(prompt(99, 2), taken)])
    server.flush()
    state = server.linker.state()
    assert state["dram_published"] == state["dram_pinned"] == state["loads_under_way"] == 0
    assert server.linker.num_completed_offloads() == 0
    for tokens in prompts:  # the store is what it was
        assert server.serve(tokens) == Served(0, 160, 0, True)


def test_pages_are_loaded_in_the_order_of_the_pool(serve):
    server = serve()
    tokens = prompt(1, 8)
    server.serve(tokens)
    server.forget_device()
    free = server.allocator.free_pages
    server.allocator.free_pages = free[torch.randperm(len(free), generator=torch.Generator().manual_seed(1))]
    req = server.request()
    server.queue(tokens, req)
    loaded = server.cache.linker.private_load_indices[req.rid]
    assert len(loaded) == 128 and bool((loaded.diff() > 0).all())
    req.prefix_len = 128
    assert torch.equal(server.cache.prefix_device_indices(req), loaded)  # where SGLang takes the request's slots from
    index = server.linker.start_layer_wise_loading()
    server.forward(index)
    server.check(loaded, tokens)
    assert server.linker.finish_layer_wise_loading(index)


def test_loads_hide_behind_the_tokens_of_their_own_batch(serve, monkeypatch):
    server = serve()
    tokens = prompt(1, 8)
    server.serve(tokens)
    hidden, engine = [], server.linker._door.engine
    begin = engine.begin
    monkeypatch.setattr(engine, "begin", lambda pages: hidden.append(pages.hides) or begin(pages))
    for expected in (8192, 512, None):
        server.forget_device()
        if expected is not None:
            server.linker.expect_tokens(expected)
        assert server.serve(tokens) == Served(0, 128, 0, True)
    assert hidden == [True, False, False]


def test_what_forwards_wait_for_layers_is_counted(serve, monkeypatch):
    tokens = prompt(1, 8)
    server = serve()
    server.serve(tokens)
    counts, engine = server.linker._door.counts, server.linker._door.engine
    assert counts["layer_wait_ns"] == 0  # nothing was loaded
    waited = engine.runner.wait_layer

    def slowly(load, layer):
        waited(load, layer)
        time.sleep(0.02)

    monkeypatch.setattr(engine.runner, "wait_layer", slowly)
    server.forget_device()
    assert server.serve(tokens) == Served(0, 128, 0, True)
    assert 0.08e9 <= counts["layer_wait_ns"] < 2e9  # four layers, each for once however often it is asked for


def test_the_waits_of_other_batches_return_at_once(serve):
    server = serve()
    counter = server.linker.layer_done_counter
    assert counter.num_layers == 4 and counter.consumer_index == -1
    for index in (-1, 17):
        counter.set_consumer(index)
        counter.wait_until(3)
    assert server.linker.start_layer_wise_loading() == -1
    assert server.linker.finish_layer_wise_loading(-1) and server.linker.is_finished(17)


def test_both_doors_have_the_same_objects(serve, model, open_storage, tmp_path):
    for mla in (False, True):
        folder, geometry = tmp_path / f"store{mla}", {"layers": 4, "heads": 2, "head_dim": 64}
        tokens = prompt(1, 6)
        server = serve(folder, mla=mla, head_dim=112 if mla else 64)
        server.serve(tokens)
        server.linker.drain()
        identity = server.linker._live.identity
        buffers = list(server._device_buffers())
        content = [server.page_content(tokens, end) for end in range(16, 97, 16)]
        if mla:
            pool = MLATokenToKVPool(
                size=512,
                page_size=16,
                dtype=torch.bfloat16,
                layer_num=4,
                device="cpu",
                enable_memory_saver=False,
                kv_lora_rank=112,
                qk_rope_head_dim=16,
            )
            publish(model, page_size=16, hicache_mem_layout="page_first_direct", hicache_io_backend="direct")
            host = build_kv_host_pool(kv_pool=pool, page_size=16)
            host.pin_memory = False
        else:
            host, pool = host_pool(model, "page_first_direct", **geometry)
        storage = open_storage(host, pool, folder, extra={"capacity": "256MiB"})
        assert storage._identity == identity and storage._identity.fingerprint() == identity.fingerprint()
        keys = [one.tobytes().hex() for one in _hashes(tokens)]
        assert storage.batch_exists(keys) == 6
        wanted = slots([4, 0, 2, 9, 7, 3], 16)
        assert storage.batch_get_v1(keys, wanted) == [True] * 6
        pages = host.kv_buffer.view(torch.uint8)
        for page, place in enumerate((4, 0, 2, 9, 7, 3)):
            for layer in range(len(buffers)):
                for stream, rows in enumerate(content[page][layer]):
                    # page_first_direct: [K,V][page][layer][token][head][dim]; MLA without the first
                    found = pages[place, layer] if mla else pages[stream, place, layer]
                    assert torch.equal(found.reshape(16, -1), rows)


def test_ranks_of_equal_bytes_share_what_one_of_them_writes(serve, tmp_path):
    first, second = (serve(mla=True, head_dim=112, tp=(rank, 2)) for rank in (0, 1))
    assert first.linker._live.identity.fingerprint() == second.linker._live.identity.fingerprint()
    tokens = prompt(1, 8)
    second.serve(tokens)
    second.linker.drain()
    assert second.linker._store.stats()["slots_live"] == 0, "the rank that only reads wrote"
    second.forget_device()
    assert second.serve(tokens) == Served(0, 128, 0, True), "its own memory"
    first.serve(tokens)
    first.linker.drain()
    second.forget_dram()
    assert second.serve(tokens) == Served(0, 128, 0, True), "what the other one wrote"


def test_ranks_of_other_bytes_keep_apart(serve):
    first, second = (serve(tp=(rank, 2), shard=str(rank)) for rank in (0, 1))
    assert first.linker._live.identity.fingerprint() != second.linker._live.identity.fingerprint()
    tokens = prompt(1, 8)
    first.serve(tokens)
    first.linker.drain()
    assert first.linker.lookup("r", [_transfer(tokens)]) == list(range(1, 9)), "for SGLang to intersect"
    assert second.serve(tokens) == Served(0, 0, 128, True)
    for server in (first, second):
        server.forget_dram()
        assert server.serve(tokens) == Served(0, 128, 0, True)


def test_new_weights_get_a_namespace_of_their_own(serve):
    tokens = prompt(1, 8)
    server = serve()
    server.serve(tokens)
    weights, server.weights = server.weights, "others"
    for unknown in (False, True):
        server.flush()  # as an update does, before it tells
        live = weight_updates.LiveWeights(update="weight-update/1", unknown="for a test" if unknown else None)
        server.linker.follow_weights(live)
        assert server.serve(tokens) == Served(0, 0, 128, True)
        server.forget_device()
        assert server.serve(tokens).loaded == (0 if unknown else 128)
        server.forget_dram()
        assert server.serve(tokens).loaded == (0 if unknown else 128)
    server.close()
    server = serve()
    assert server.weights == weights and server.serve(tokens) == Served(0, 128, 0, True)


def test_memory_is_released_after_the_copies_out_of_it(serve, monkeypatch):
    """SGLang unmaps the pools first and flushes then."""
    server, order = serve(), []
    stream = SimpleNamespace(synchronize=lambda: order.append("copies have ended"))
    hook = weight_updates.around("release_memory_occupation")
    updater = SimpleNamespace(memory_saver_adapter=SimpleNamespace(enabled=True))
    with monkeypatch.context() as patch:
        patch.setattr(server.linker._door, "_transfers", SimpleNamespace(offload_stream=stream))
        hook(lambda self, request: order.append("unmapped"), updater, SimpleNamespace(tags=["kv_cache"]))
    assert order == ["copies have ended", "unmapped"]


def test_what_goes_wrong_in_the_store_is_a_miss(serve, caplog):
    tokens = prompt(1, 8)
    server = serve()
    server.serve(tokens)
    server.forget_dram()
    req = server.request()
    server.queue(tokens, req)
    server.linker._store._core.close()
    index = server.linker.start_layer_wise_loading()
    server.forward(index)
    assert not server.linker.finish_layer_wise_loading(index)
    assert server.serve(tokens).computed == 128
    assert server.serve(prompt(2, 4)).computed == 64
    state = server.linker.state()
    assert state["dram_pinned"] == state["dram_reserved"] == 0


def test_a_namespace_that_cannot_be_opened_fails_its_loads_alone(serve):
    """The engine keeps the loader that it has: its counters are read at every step, and old weights may come back."""
    tokens = prompt(1, 8)
    server = serve()
    server.serve(tokens)
    server.forget_dram()
    engine = server.linker._door.engine
    with pytest.raises(GioError):
        engine.use_namespace(SimpleNamespace(handle=77))
    assert server.linker.state()["loader_loads"] == 0
    assert server.serve(tokens) == Served(0, 128, 0, True)
    server.linker._store._core.close()
    with pytest.raises(GioError):
        engine.use_namespace(SimpleNamespace(handle=78))
    assert server.linker.state()["loads_under_way"] == 0


def test_a_namespace_that_is_lost_before_the_start_fails_the_batch_and_gives_its_pins_back(serve, monkeypatch):
    tokens = prompt(1, 8)
    server = serve()
    server.serve(tokens)
    server.forget_device()
    server.queue(tokens, server.request("r1"))
    assert server.linker.state()["dram_pinned"] == 8

    def refuse():
        raise OSError("for a test")

    with monkeypatch.context() as patch:
        patch.setattr(server.linker._live, "current", refuse)
        index = server.linker.start_layer_wise_loading()
    assert index >= 0
    server.forward(index)
    assert not server.linker.finish_layer_wise_loading(index)
    assert server.linker.state()["dram_pinned"] == 0


def test_what_is_asked_after_the_end_is_answered(serve):
    """SGLang ends the linker before the last requests are released."""
    tokens = prompt(1, 4)
    server = serve()
    server.serve(tokens)
    taken = server.allocator.alloc(64)
    linker = server.linker
    linker.load("queued", [_transfer(tokens, taken)])
    linker.close()
    assert linker.lookup("r", [_transfer(tokens)]) == [] and linker.start_layer_wise_loading() == -1
    assert linker.offload([_transfer(prompt(2, 4), taken)])
    assert linker.num_completed_offloads() == 1 and linker.pop_completed_offload() is False
    assert linker.counts["failed_offload_calls"] == 0
    linker.close()


def test_every_load_of_a_batch_is_ended_before_its_pages_are_given_up(serve, monkeypatch):
    tokens = prompt(1, 8)
    server = serve()
    server.serve(tokens)
    server.forget_device()
    engine = server.linker._door.engine
    monkeypatch.setattr(engine, "most_pinned_pages", 3)
    server.queue(tokens, server.request())
    index = server.linker.start_layer_wise_loading()
    first = server.linker._batches[index][1].loads[0]
    monkeypatch.setattr(first, "finish", lambda: Load.finish(first) and _fail())
    assert engine.under_way == 3 and not server.linker.finish_layer_wise_loading(index)
    assert engine.under_way == 0 and server.linker.state()["dram_pinned"] == 0


def test_queue_pairs_that_are_lost_are_not_made_anew_after_every_load(serve, monkeypatch, caplog):
    tokens = prompt(1, 8)
    server = serve()
    server.serve(tokens)
    engine, tried = server.linker._door.engine, []

    def renew(stream):
        tried.append(stream)
        raise GioError("for a test", "io")

    monkeypatch.setattr(server.linker._door.session, "renew", renew)
    engine._needs_renewal = True
    for _ in range(3):
        server.forget_device()
        assert server.serve(tokens) == Served(0, 128, 0, True), "from memory"
        engine.quiesce()
    assert len(tried) == 1 and not engine.sound


def _fail():
    raise RuntimeError("for a test")


def _hashes(tokens):
    return np.frombuffer(b"".join(corrupt.page_keys(list(tokens), 16)), np.uint8).reshape(-1, 32)


def _transfer(tokens, indices=None):
    keys = [one.tobytes().hex() for one in _hashes(tokens)]
    return PoolTransfer(name=PoolName.KV, keys=keys, device_indices=indices)
