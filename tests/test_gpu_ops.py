# SPDX-License-Identifier: Apache-2.0
"""The torch ops on CPU tensors: the ring that a GPU runs, by the calling thread, against the software controller."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the torch ops were not tested")

import torch_ops  # noqa: E402
from sglang_tardis import gpu  # noqa: E402
from sglang_tardis.gpu import GioError, GioSession, KvPools, ObjectIndex, PageLayout  # noqa: E402

OPS = torch.ops.tardis
POISON = 0xA5
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def ids(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def as_bytes(tensor):
    return tensor.view(torch.uint8)


class Rig:
    """Pools of random bytes with a copy of them, and a session."""

    def __init__(self, layers=3, page_tokens=16, pages=24, key=(2, 64), value=(2, 64), dtype=BF16, slots=40, **options):
        tokens = pages * page_tokens + 3  # some that belong to no page
        self.keys = [self.buffer(tokens, key, dtype) for _ in range(layers)]
        self.values = [self.buffer(tokens, value, dtype) for _ in range(layers)] if value else None
        self.pools = KvPools(self.keys, self.values, page_tokens=page_tokens)
        self.layout = self.pools.layout(options.pop("block_bytes", 4096))
        size = -(-slots * self.layout.object_bytes // 4096) * 4096
        self.session = GioSession(self.layout, **{"bytes": size, "queues": 2, "entries": 8, **options})
        self.tokens = page_tokens

    @staticmethod
    def buffer(tokens, shape, dtype):
        raw = torch.randint(0, 256, (tokens * shape[0] * shape[1] * dtype.itemsize,), dtype=torch.uint8)
        return raw.view(dtype).view(tokens, *shape)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.session.close()

    def every(self):
        return [*self.keys, *(self.values or [])]

    def copy(self):
        return [as_bytes(buffer).clone() for buffer in self.every()]

    def poison(self):
        for buffer in self.every():
            as_bytes(buffer).fill_(POISON)

    def page(self, buffer, number):
        return buffer[number * self.tokens : (number + 1) * self.tokens]

    def transfer(self, op, pages, slots, count=None, layers=None, **more):
        self.session.flags.zero_()
        count = ids(len(pages)) if count is None else count
        for layer in range(self.layout.layers) if layers is None else layers:
            op(self.session.handle, layer, self.pools.layer(layer), pages, slots, count, self.session.flags, **more)
            OPS.wait_layer(self.session.handle, layer, self.pools.layer(layer), self.session.flags)
        return self.session.flags.tolist()

    def expect(self, before, moved):
        """moved: {page of the pool now: page it was before}; everything else is poison."""
        for buffer, old in zip(self.every(), before, strict=True):
            wanted = torch.full_like(old, POISON)
            for now, was in moved.items():
                self.page(wanted, now).copy_(self.page(old, was))
            assert torch.equal(as_bytes(buffer), wanted)


SHAPES = {
    "GQA bf16": {},
    "GQA fp8": {"dtype": FP8},
    "K and V of different heads": {"key": (2, 128), "value": (1, 256), "dtype": FP8},
    "MLA bf16": {"key": (1, 576), "value": None, "page_tokens": 64, "pages": 10},
    "MLA bf16, page 16": {"key": (1, 576), "value": None, "block_bytes": 512, "slots": 48},
    "several commands a page": {"slot_bytes": 4096, "page_tokens": 32},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_pages_come_back_at_other_places(shape):
    with Rig(**SHAPES[shape]) as rig:
        done = [1] * rig.layout.layers
        before = rig.copy()
        assert rig.transfer(OPS.batch_put, ids(7, 0, 3, 9), ids(4, 0, 8, 2)) == done
        rig.poison()
        assert rig.transfer(OPS.batch_get, ids(1, 5, 9), ids(8, 4, 2)) == done
        rig.expect(before, {1: 3, 5: 7, 9: 9})
        report = rig.session.layer_report(rig.layout.layers - 1)
        assert report.pages_done == [True] * 3 and not report.needs_renew
        assert sum(ring.done for ring in report.rings) == len(report.ends) == 3 * rig.session.commands_per_page


def test_objects_are_layers_of_key_and_value():
    with Rig() as rig:
        rig.transfer(OPS.batch_put, ids(6), ids(5))
        found = torch.empty(rig.layout.object_bytes, dtype=torch.uint8)
        rig.session.flush()
        rig.session.read(5 * rig.layout.object_bytes, found)
        parts = [as_bytes(rig.page(side[layer], 6)).flatten() for layer in range(3) for side in (rig.keys, rig.values)]
        assert torch.equal(found, torch.cat(parts))
        assert rig.layout.layer_offset(1) == rig.layout.layer_bytes == parts[0].numel() + parts[1].numel()
        rig.poison()
        rig.session.write(5 * rig.layout.object_bytes, found.flip(0))
        rig.transfer(OPS.batch_get, ids(0), ids(5), layers=[0])
        assert torch.equal(as_bytes(rig.page(rig.keys[0], 0)).flatten(), found.flip(0)[: rig.layout.key_bytes])


def test_ids_and_counts_are_read_at_each_call():
    with Rig() as rig:
        before = rig.copy()
        pages, slots, count = torch.arange(24, dtype=torch.int32), torch.arange(24, dtype=torch.int32), ids(24)
        rig.transfer(OPS.batch_put, pages, slots, count)
        generator = torch.Generator().manual_seed(5)
        for wanted in (24, 0, 1, 7, 23):
            rig.poison()
            pages.copy_(torch.randperm(24, generator=generator))
            slots.copy_(torch.randperm(24, generator=generator))
            count.fill_(wanted)
            assert rig.transfer(OPS.batch_get, pages, slots, count) == [1, 1, 1]
            rig.expect(before, dict(zip(pages.tolist()[:wanted], slots.tolist()[:wanted], strict=True)))
            assert len(rig.session.layer_report(2).ends) == wanted


def test_one_call_into_the_library_for_each_layer():
    for pages in (1, 20):
        with Rig(layers=5) as rig:
            chosen = torch.arange(pages, dtype=torch.int32)
            rig.session.flags.zero_()
            for layer in range(5):
                OPS.batch_put(
                    rig.session.handle, layer, rig.pools.layer(layer), chosen, chosen, ids(pages), rig.session.flags
                )
            assert rig.session.host_calls == 5


def test_ids_outside_are_refused_and_the_others_land():
    with Rig() as rig:
        before = rig.copy()
        assert rig.transfer(OPS.batch_put, ids(0, 1), ids(0, 39)) == [1, 1, 1]
        rig.poison()
        pages, slots = ids(4, 24, -1, 5, 6, 2**31 - 1, 7), ids(0, 0, 39, 40, 39, 39, -1)
        assert rig.transfer(OPS.batch_get, pages, slots) == [2, 2, 2]
        rig.expect(before, {4: 0, 6: 1})
        report = rig.session.layer_report(1)
        assert report.ends == ("done", "refused", "refused", "refused", "done", "refused", "refused")
        assert report.flag == "error" and not report.needs_renew
        assert sorted(ring.error for ring in report.rings) == ["commands", "commands"]
        assert rig.transfer(OPS.batch_put, pages, slots) == [2, 2, 2]
        rig.poison()
        assert rig.transfer(OPS.batch_get, ids(3, 2), ids(0, 39)) == [1, 1, 1]


def test_a_count_above_the_ids_moves_nothing():
    with Rig() as rig:
        for count in (3, 2049, -1):
            rig.poison()
            before = rig.copy()
            assert rig.transfer(OPS.batch_get, ids(0, 1), ids(0, 1), ids(count)) == [2, 2, 2]
            report = rig.session.layer_report(0)
            assert report.ends == () and {ring.error for ring in report.rings} == {"too many"}
            assert all(torch.equal(as_bytes(now), old) for now, old in zip(rig.every(), before, strict=True))


def test_slots_where_a_table_says():
    with Rig() as rig:
        before = rig.copy()
        table = torch.tensor([90, 3, 11], dtype=torch.int64)
        assert rig.transfer(OPS.batch_put, ids(5, 6), ids(2, 0), blocks=table) == [1, 1, 1]
        rig.poison()
        assert rig.transfer(OPS.batch_get, ids(1, 2), ids(0, 2), blocks=table) == [1, 1, 1]
        rig.expect(before, {1: 6, 2: 5})
        found = torch.empty(4096, dtype=torch.uint8)
        rig.session.read(11 * 4096, found)
        assert torch.equal(found, rig.page(before[0], 5).flatten()[:4096])
        assert rig.transfer(OPS.batch_get, ids(1, 2), ids(3, 2), blocks=table) == [2, 2, 2]
        assert rig.session.layer_report(0).ends == ("refused", "done")


@pytest.mark.parametrize("shape", ["GQA bf16", "K and V of different heads", "several commands a page"])
def test_digests_are_written_by_put_and_expected_by_get(shape):
    xxhash = pytest.importorskip("xxhash", reason="xxhash is not installed: digests were not compared with it")
    options = {**SHAPES[shape], **({"slot_bytes": 16 << 10, "page_tokens": 128} if "several" in shape else {})}
    with Rig(**options) as rig:
        layout = rig.layout
        assert ("several" in shape) == (rig.session.commands_per_page > 1)
        digests = torch.zeros((4, 3, layout.digests), dtype=torch.int64)
        assert rig.transfer(OPS.batch_put, ids(1, 2, 3), ids(6, 7, 8), digests=digests) == [1, 1, 1]
        for layer in range(3):
            part = torch.cat([as_bytes(rig.page(side, 2)).flatten() for side in rig.pools.layer(layer)]).numpy()
            chunks = [part[at : at + (16 << 10)].tobytes() for at in range(0, len(part), 16 << 10)]
            wanted = [xxhash.xxh3_64_intdigest(chunk) for chunk in chunks]
            assert digests[1, layer].numpy().view(np.uint64).tolist() == wanted
        assert (digests[3] == 0).all()
        before = rig.copy()
        rig.poison()
        assert rig.transfer(OPS.batch_get, ids(1, 2, 3), ids(6, 7, 8), digests=digests) == [1, 1, 1]
        rig.expect(before, {1: 1, 2: 2, 3: 3})
        digests[1, 2, -1] ^= 1
        assert rig.transfer(OPS.batch_get, ids(1, 2, 3), ids(6, 7, 8), digests=digests) == [1, 1, 2]
        report = rig.session.layer_report(2)
        assert report.pages_done == [True, False, True] and "damaged" in report.ends
        assert sum(ring.damaged for ring in report.rings) == 1 and not report.needs_renew


def test_a_deadline_ends_the_queues_until_they_are_renewed():
    shape = {"layers": 1, "page_tokens": 256, "key": (8, 256), "value": (8, 256), "pages": 16, "slots": 16}
    with Rig(**shape, entries=64) as rig:
        before = rig.copy()
        every = torch.arange(16, dtype=torch.int32)
        assert rig.transfer(OPS.batch_put, every, every) == [1]
        rig.session.deadline_ms = 1  # for 32 MiB, twice copied
        rig.poison()
        assert rig.transfer(OPS.batch_get, every, every) == [2]
        report = rig.session.layer_report(0)
        assert report.needs_renew and {"timed out", "not sent"} & set(report.ends)
        rig.session.deadline_ms = 10_000
        assert rig.transfer(OPS.batch_get, every, every) == [2]
        assert {ring.error for ring in rig.session.layer_report(0).rings} <= {"queue down", "none"}
        rig.session.renew()
        rig.poison()
        assert rig.transfer(OPS.batch_get, every, every) == [1]
        rig.expect(before, {page: page for page in range(16)})


def test_a_file_keeps_pages_from_one_session_to_the_next(tmp_path):
    file = tmp_path / "namespace"
    with Rig(file=file) as rig:
        before = rig.copy()
        rig.transfer(OPS.batch_put, ids(1, 2, 3), ids(30, 20, 10))
        rig.session.flush()
        size = rig.layout.object_bytes * 40
    assert file.stat().st_size == size
    with Rig(file=file) as rig:
        rig.poison()
        assert rig.transfer(OPS.batch_get, ids(9, 8, 7), ids(10, 20, 30)) == [1, 1, 1]
        rig.expect(before, {9: 3, 8: 2, 7: 1})


def test_sessions_beside_each_other():
    with Rig() as one, Rig(layers=2, key=(1, 576), value=None, page_tokens=64) as other:
        both = [(rig, rig.copy(), []) for rig in (one, other)]

        def work(rig, before, wrong):
            for shift in range(6):
                pages = (torch.arange(8, dtype=torch.int32) + shift) % 24
                slots = (torch.arange(8, dtype=torch.int32) * 3 + shift) % 40
                for buffer, old in zip(rig.every(), before, strict=True):
                    as_bytes(buffer).copy_(old)
                wrong.append(set(rig.transfer(OPS.batch_put, pages, slots)) != {1})
                rig.poison()
                wrong.append(set(rig.transfer(OPS.batch_get, pages, slots)) != {1})
                rig.expect(before, {page: page for page in pages.tolist()})
            wrong.append(False)

        threads = [threading.Thread(target=work, args=one) for one in both]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [wrong for _, _, wrong in both] == [[False] * 13] * 2


# ---- what is refused, and what the message says
def test_pools_that_cannot_be_moved_are_refused():
    tokens = torch.zeros(64, 2, 2, 64, dtype=BF16)
    with pytest.raises(ValueError, match=r"contiguous tokens.*buffers of their own"):
        KvPools([tokens[:, 0]], [tokens[:, 1]], page_tokens=16)
    good = torch.zeros(64, 2, 64, dtype=BF16)
    with pytest.raises(ValueError, match="as many of V, found 1 and 2"):
        KvPools([good], [good, good], page_tokens=16)
    with pytest.raises(ValueError, match="K of layer 1: expected"):
        KvPools([good, good[:32]], page_tokens=16)
    with pytest.raises(ValueError, match="as many tokens of V"):
        KvPools([good], [good[:48]], page_tokens=16)
    with pytest.raises(ValueError, match="multiple of 16, found"):
        KvPools([torch.zeros(64 * 128 + 1, dtype=BF16)[1:].view(64, 2, 64)], page_tokens=16)
    with pytest.raises(ValueError, match="page of 65 tokens"):
        KvPools([good], page_tokens=65)
    with pytest.raises(NotImplementedError, match="MHATokenToKVPool or MLATokenToKVPool"):
        KvPools.of(object(), page_tokens=16)
    with pytest.raises(NotImplementedError, match=r"whole blocks of 4096.*larger pages, or block_bytes=512"):
        PageLayout(1, 1152, 1152)
    with pytest.raises(ValueError, match="multiple of 16"):
        PageLayout(1, 4088, 8)


def test_tensors_that_do_not_fit_are_refused():
    with Rig() as rig:
        handle, pools, flags = rig.session.handle, rig.pools.layer(0), rig.session.flags
        good = {"pools": pools, "pages": ids(0), "slots": ids(0), "count": ids(1), "flags": flags}
        refused = {
            "pages: expected contiguous torch.int32": {"pages": torch.zeros(1, dtype=torch.int64)},
            "slots: expected contiguous": {"slots": ids(0, 1)},
            "count: expected": {"count": ids(1, 1)},
            "flags: expected one for each of 3 layers": {"flags": flags[:2]},
            "expected 2 tensors": {"pools": pools[:1]},
            "K and V of a layer, or one buffer": {"pools": [*pools, *pools]},
            "pools: expected contiguous tokens": {"pools": [pools[0].transpose(1, 2), pools[1]]},
            "as many whole pages": {"pools": [pools[0], pools[1][:64]]},
            "pages: expected 1 to 2048 ids, found 2049": {
                "pages": torch.zeros(2049, dtype=torch.int32),
                "slots": torch.zeros(2049, dtype=torch.int32),
            },
            "digests: expected": {"digests": torch.zeros(1, 3, 2, dtype=torch.int64)},
            "blocks: expected": {"blocks": torch.zeros(4, dtype=torch.int32)},
        }
        for message, change in refused.items():
            with pytest.raises(ValueError, match=message):
                OPS.batch_get(handle, 0, **{**good, **change})
        with pytest.raises(ValueError, match="layer: expected 0 to 2, found 3"):
            OPS.batch_get(handle, 3, **good)
        assert flags.tolist() == [0, 0, 0] and rig.session.host_calls == 0
        with pytest.raises(GioError, match="expected a transfer of layer 0 before"):
            OPS.wait_layer(handle, 0, pools, flags)
        OPS.batch_get(handle, 0, **good)
        with pytest.raises(ValueError, match=r"flags\[0\]: expected 0 before a transfer, found 1"):
            OPS.batch_get(handle, 0, **good)


def test_a_closed_session_refuses_everything():
    rig = Rig()
    handle, pools, flags = rig.session.handle, rig.pools.layer(0), rig.session.flags
    rig.session.close()
    rig.session.close()
    assert rig.session.closed
    for call in (
        lambda: OPS.batch_get(handle, 0, pools, ids(0), ids(0), ids(1), flags),
        lambda: OPS.wait_layer(handle, 0, pools, flags),
        rig.session.renew,
        rig.session.report,
        rig.session.flush,
        lambda: rig.session.layer_report(0),
        lambda: rig.session.read(0, torch.zeros(4096, dtype=torch.uint8)),
    ):
        with pytest.raises(GioError, match="open") as refused:
            call()
        assert refused.value.code == "closed"


def test_a_session_that_nobody_holds_is_closed():
    rig = Rig()
    handle, threads = rig.session.handle, threading.active_count()
    assert gpu.find_session(handle) is rig.session
    del rig
    gc.collect()
    with pytest.raises(GioError, match="found none"):
        gpu.find_session(handle)
    assert threading.active_count() == threads


def test_options_that_make_no_sense_are_refused(tmp_path):
    layout = PageLayout(2, 4096, 4096)
    for options, message in (
        ({"bytes": 1 << 20, "queues": 17}, "1 to 16 queues"),
        ({"bytes": 1 << 20, "entries": 1}, "2 to 65536 entries"),
        ({"bytes": (1 << 20) + 1}, "whole pages of 4096"),
        ({"bytes": 4096}, "room for an object"),
        ({"bytes": 1 << 20, "deadline_ms": 0}, "deadline_ms"),
        ({"bytes": 1 << 20, "ctas": 5}, "ctas"),
        ({"bytes": 1 << 20, "slot_bytes": 3 << 20}, "2 MiB"),
    ):
        with pytest.raises(ValueError, match=message):
            GioSession(layout, **options)
    with pytest.raises(GioError):
        GioSession(layout, bytes=1 << 20, file=tmp_path / "no" / "such" / "folder")
    with pytest.raises(NotImplementedError, match="'cpu' or 'cuda'"):
        GioSession(layout, bytes=1 << 20, device="meta")
    if not torch.cuda.is_available():
        with pytest.raises(GioError, match="CUDA device, found none"):
            GioSession(layout, bytes=1 << 20, device="cuda")


# ---- what torch makes of the ops
def test_opcheck():
    with Rig(layers=1, pages=4, slots=10) as rig:
        handle, pools, flags = rig.session.handle, rig.pools.layer(0), rig.session.flags
        transfer = (handle, 0, pools, ids(0, 3), ids(1, 0), ids(2), flags)
        torch.library.opcheck(OPS.batch_put.default, transfer)
        torch.library.opcheck(OPS.batch_get.default, transfer, {"blocks": torch.tensor([5, 9], dtype=torch.int64)})
        torch.library.opcheck(OPS.wait_layer.default, (handle, 0, pools, ids(1)))
    index = ObjectIndex(100)
    keys = torch.zeros(4, 32, dtype=torch.uint8)
    torch.library.opcheck(OPS.lookup.default, (index.handle, keys, ids(4), index.new_answers(4)), {"space": 3})


def test_fake_tensors_reach_no_library():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        pools = [torch.empty(64, 2, 64, dtype=BF16), torch.empty(64, 2, 64, dtype=BF16)]
        flags, one = torch.empty(3, dtype=torch.int32), torch.empty(1, dtype=torch.int32)
        assert OPS.batch_get(12345, 0, pools, one, one, one, flags) is None
        assert OPS.batch_put(12345, 0, pools, one, one, one, flags) is None
        assert OPS.wait_layer(12345, 0, pools, flags) is None
        keys, answers = torch.empty(2, 32, dtype=torch.uint8), torch.empty(2, 4, dtype=torch.int64)
        assert OPS.lookup(12345, keys, one, answers) is None
        with pytest.raises(ValueError, match="count: expected"):
            OPS.batch_get(12345, 0, pools, one, one, torch.empty(2, dtype=torch.int32), flags)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_programs_restore_what_they_use(backend):
    with Rig() as rig:
        session = rig.session

        def attend(pages, slots, count, flags):
            flags.zero_()
            sums = []
            for layer in range(3):
                OPS.batch_get(session.handle, layer, rig.pools.layer(layer), pages, slots, count, flags)
            for layer in range(3):
                key, value = rig.pools.layer(layer)
                OPS.wait_layer(session.handle, layer, [key, value], flags)
                sums.append(as_bytes(key).long().sum() * 3 + as_bytes(value).long().sum())
            return torch.stack(sums)

        before = rig.copy()
        every = torch.arange(24, dtype=torch.int32)
        rig.transfer(OPS.batch_put, every, every)
        compiled = torch.compile(attend, fullgraph=True, backend=backend)
        for pages, slots in ((ids(1, 2, 3), ids(3, 2, 1)), (ids(0, 9, 4), ids(20, 8, 7))):
            rig.poison()
            wanted = [torch.full_like(old, POISON) for old in before]
            for now, was in zip(pages.tolist(), slots.tolist(), strict=True):
                for new, old in zip(wanted, before, strict=True):
                    rig.page(new, now).copy_(rig.page(old, was))
            found = compiled(pages, slots, ids(3), session.flags)
            expected = [wanted[i].long().sum() * 3 + wanted[3 + i].long().sum() for i in range(3)]
            assert found.tolist() == [int(number) for number in expected]
            rig.expect(before, dict(zip(pages.tolist(), slots.tolist(), strict=True)))
            assert session.flags.tolist() == [1, 1, 1]


# ---- lookups
def test_lookup_finds_what_was_put():
    index = ObjectIndex(1000)
    random = np.random.default_rng(3)
    changes = np.zeros(600, dtype=gpu.ENTRY_DTYPE)
    changes["key"] = random.integers(0, 256, (600, 32))
    changes["location"], changes["generation"], changes["space"] = np.arange(600) * 4096, 1, 9
    changes["root"] = random.integers(0, 2**63, 600)
    assert index.apply(changes[:500]) == ["inserted"] * 500
    keys = torch.from_numpy(changes["key"].copy())
    answers = index.new_answers(600)
    answers.fill_(-7)
    OPS.lookup(index.handle, keys, ids(590), answers, space=9)
    rows = answers.numpy().view(gpu.ANSWER_DTYPE)[:, 0]
    assert rows["status"][:590].tolist() == [1] * 500 + [0] * 90
    assert (rows["location"][:500] == changes["location"][:500]).all()
    assert (rows["root"][:500] == changes["root"][:500]).all()
    assert (answers[590:] == -7).all()
    OPS.lookup(index.handle, keys, ids(600), answers, space=8)
    assert (answers.numpy().view(gpu.ANSWER_DTYPE)["status"] == 0).all()
    changes["op"], changes["generation"] = 2, 2
    assert index.apply(changes[499:501]) == ["erased", "absent"]
    OPS.lookup(index.handle, keys, ids(600), answers, space=9)
    assert answers.numpy().view(gpu.ANSWER_DTYPE)["status"].sum() == 499
    assert index.host_calls == 3
    with pytest.raises(ValueError, match="answers: expected"):
        OPS.lookup(index.handle, keys, ids(1), answers[:5])
    with pytest.raises(GioError, match="ObjectIndex, found none"):
        OPS.lookup(99999, keys, ids(1), answers)


def test_a_restore_from_hashes_to_pages():
    with Rig() as rig:
        before = rig.copy()
        rig.transfer(OPS.batch_put, ids(0, 1, 2), ids(9, 4, 6))
        index = ObjectIndex(100)
        changes = np.zeros(3, dtype=gpu.ENTRY_DTYPE)
        changes["key"] = np.arange(3 * 32).reshape(3, 32)
        changes["location"] = np.array([9, 4, 6]) * rig.layout.object_blocks
        index.apply(changes)
        unknown = np.full((1, 32), 99, dtype=np.uint8)
        keys = torch.from_numpy(np.concatenate([changes["key"][[2, 0]], unknown]))
        answers = index.new_answers(3)
        OPS.lookup(index.handle, keys, ids(3), answers)
        rig.poison()
        places = answers[:, 0].contiguous()
        assert rig.transfer(OPS.batch_get, ids(20, 21, 22), ids(0, 1, 2), blocks=places) == [2, 2, 2]
        rig.expect(before, {20: 2, 21: 0})
        for layer in range(3):  # nowhere and a layer's offset is not a place
            assert rig.session.layer_report(layer).ends == ("done", "done", "refused")


# ---- the benchmark's own checks, on the CPU
def test_benchmark_checks_run_without_a_gpu(tmp_path, monkeypatch, capsys):
    arguments = ["torch_ops.py", "--quick", "--json", str(tmp_path / "rows.json")]
    monkeypatch.setattr(sys, "argv", [*arguments, "--device", "cpu"])
    status = torch_ops.main()
    printed = capsys.readouterr().out
    assert status == 0 and printed.endswith("right\n"), printed
    rows = json.loads((tmp_path / "rows.json").read_text("utf-8"))["rows"]
    assert len(rows) == 9 and {(row["unit"], row["value"]) for row in rows} == {("wrong", 0)}
    if not torch.cuda.is_available():
        monkeypatch.setattr(sys, "argv", arguments)
        assert torch_ops.main() == torch_ops.SKIPPED


def test_kept_results_have_nothing_wrong():
    file = Path(__file__).resolve().parents[1] / "bench" / "results" / "h200_torch_ops.json"
    content = json.loads(file.read_text("utf-8"))
    rows = {row["case"]: row for row in content["rows"]}
    assert sum(row["unit"] == "wrong" for row in rows.values()) == 15
    assert {row["value"] for row in rows.values() if row["unit"] == "wrong"} == {0}
    assert all(row["value"] > 0 for case, row in rows.items() if case.startswith("control"))
    assert torch_ops.waiting(content["cuda_calls_in_replays"]) == []
    assert rows["get, 32 layers, 512 pages"]["ratio"] > 0.8


# ---- without what it needs
def test_the_package_needs_neither_torch_nor_libraries():
    code = "import sglang_tardis, sys; sys.exit('torch' in sys.modules or 'sglang_tardis.gio_abi' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_missing_library_is_named(monkeypatch, tmp_path):
    from sglang_tardis import gio_abi

    monkeypatch.setattr(gio_abi, "_folders", lambda: [tmp_path])
    with pytest.raises(gio_abi.GpuLibraryMissingError, match=r"libtardis_gpu.so: expected it at .*TARDIS_CUDA=ON"):
        gio_abi.Gpu()
    with pytest.raises(GioError, match=r"libtardis.so: expected it at .*install sglang-tardis"):
        gio_abi.Core()
    (tmp_path / "libtardis_gpu.so").write_bytes(b"no library")
    with pytest.raises(gio_abi.GpuLibraryMissingError, match="expected a library of this release"):
        gio_abi.Gpu()
