# SPDX-License-Identifier: Apache-2.0
"""Several ranks, each a process of its own, on one store: own bytes for own shards, shared pages for equal ones."""

from __future__ import annotations

import hashlib
import time
from types import SimpleNamespace

import pytest
from rank_processes import RankError, each
from sglang_tardis.sglang.ranks import UnsupportedRanksError, rank_of, refuse_unsupported
from sglang_tardis.sglang.server_settings import ServerSettings
from tree_server import prompt

KEYS = [hashlib.sha256(bytes([i])).hexdigest() for i in range(48)]
FEW = KEYS[:6]
GOOD, MISSED = ["good"] * len(FEW), ["missed"] * len(FEW)


@pytest.fixture
def make(processes, tmp_path, model):
    """Ranks with their backends open on one store, opened all at the same time."""
    made = []

    def open_ranks(own, **common):
        ranks = processes.make(len(own))
        made.extend(ranks)
        common = dict(folder=str(tmp_path / "store"), model=str(model)) | common
        opened = each(ranks, "open_rank", own, **common)
        return ranks, opened

    yield open_ranks
    for rank in made:
        rank.close()


def tp(size, **more):
    """Ranks of MHA under tensor parallelism: every one has other bytes."""
    return [dict(tp_rank=rank, tp_size=size, shard=f"tp{rank}", **more) for rank in range(size)]


def restart(make, ranks, own, **common):
    each(ranks, "close")
    return make(own, **common)


# ---- ranks with different bytes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "own,common",
    [
        (tp(2), {}),
        ([dict(pp_rank=rank, pp_size=2, shard=f"pp{rank}", layers=3 - rank) for rank in range(2)], {}),
        (
            [
                dict(tp_rank=rank, tp_size=2, attn_cp_rank=rank, attn_cp_size=2, shard=f"cp{rank}", layers=2)
                for rank in range(2)
            ],
            {},
        ),
        # under DP attention, tp_rank is the same on both context-parallel ranks: only cp_rank tells them apart
        ([dict(attn_cp_rank=rank, attn_cp_size=2, shard=f"cp{rank}") for rank in range(2)], {}),
        (
            [
                dict(tp_rank=tp_, tp_size=2, pp_rank=pp, pp_size=2, shard=f"{tp_}{pp}")
                for tp_ in range(2)
                for pp in range(2)
            ],
            {},
        ),
    ],
    ids=["tp2", "pp2-uneven", "cp2", "cp2-dp-attention", "tp2-pp2"],
)
def test_every_rank_reads_its_own_bytes(make, own, common):
    """Same keys, same time, other bytes; after a restart too."""
    ranks, opened = make(own, **common)
    assert len({one["fingerprint"] for one in opened}) == len(own)
    assert all(one["writes"] for one in opened)
    assert each(ranks, "write", keys=FEW) == [[True] * len(FEW)] * len(own)
    assert each(ranks, "read", keys=FEW) == [GOOD] * len(own)
    ranks, again = restart(make, ranks, own, **common)
    assert again == opened
    assert each(ranks, "exists", keys=KEYS) == [len(FEW)] * len(own)
    assert each(ranks, "read", keys=FEW) == [GOOD] * len(own)


def test_ranks_of_another_size_find_nothing(make):
    """TP 1 and TP 2, and pages of another size in a second server: no rank meets bytes of another geometry."""
    ranks, _ = make(tp(2))
    each(ranks, "write", keys=FEW)
    others, _ = make([dict(shard="whole", heads=4), dict(shard="larger", page_size=32)])
    assert each(others, "read", keys=FEW) == [MISSED] * 2
    each(others, "write", keys=FEW)
    assert each([*ranks, *others], "read", keys=FEW) == [GOOD] * 4


def test_one_rank_is_killed_and_the_others_go_on(make):
    ranks, _ = make(tp(3))
    each(ranks, "write", keys=FEW)
    ranks[1].call("start_writing", keys=KEYS)
    time.sleep(0.3)
    ranks[1].kill()
    left = [ranks[0], ranks[2]]
    assert each(left, "read", keys=FEW) == [GOOD] * 2
    assert each(left, "write", keys=KEYS) == [[True] * len(KEYS)] * 2
    assert each(left, "read", keys=KEYS) == [["good"] * len(KEYS)] * 2
    # the same rank of the restarted server: its bytes or misses, never another's
    (again,), _ = make([tp(3)[1]])
    assert "WRONG" not in again.call("read", keys=KEYS)
    assert all(again.call("write", keys=KEYS))
    assert again.call("read", keys=KEYS) == ["good"] * len(KEYS)


def test_clear_reaches_every_rank(make):
    """SGLang asks every rank to clear, one after another or at once."""
    ranks, _ = make(tp(2))
    each(ranks, "write", keys=FEW)
    assert each(ranks, "clear") == [True, True]
    assert each(ranks, "exists", keys=FEW) == [0, 0]
    each(ranks, "write", keys=FEW)
    assert each(ranks, "read", keys=FEW) == [GOOD] * 2


# ---- ranks with equal bytes -----------------------------------------------------------------------------------------


def mla(size):
    return [dict(tp_rank=rank, tp_size=size, mla=True, shard="latent") for rank in range(size)]


def test_mla_ranks_share_what_one_of_them_writes(make):
    ranks, opened = make(mla(4))
    assert len({one["fingerprint"] for one in opened}) == 1
    assert [one["writes"] for one in opened] == [True, False, False, False]
    assert "reads only" in opened[3]["rank"] and "reads only" not in opened[0]["rank"]
    # SGLang does not ask the others to write; were it to, they must not fail its operation, and must not write
    assert each(ranks[1:], "write", keys=FEW) == [[True] * len(FEW)] * 3
    assert each(ranks, "exists", keys=FEW) == [0] * 4
    assert all(ranks[0].call("write", keys=FEW))
    assert each(ranks, "exists", keys=KEYS) == [len(FEW)] * 4
    assert each(ranks, "read", keys=FEW) == [GOOD] * 4
    ranks[0].kill()  # the writer; pages that were flushed stay, for the readers and for the next server
    assert each(ranks[1:], "read", keys=FEW) == [GOOD] * 3
    ranks, _ = make(mla(4))
    assert each(ranks[1:], "read", keys=FEW) == [GOOD] * 3


def test_mla_readers_while_the_writer_evicts(make):
    """A store a third of the size of what is written: readers get the writer's bytes or a miss."""
    many = [hashlib.sha256(f"m{i}".encode()).hexdigest() for i in range(600)]
    own = mla(2)
    # a large latent row, so that 600 pages are 24 MiB
    ranks, _ = make(own, capacity="8MiB", layers=20)
    ranks[0].start("write_and_read_for", seconds=2.0, keys=many, shards=["latent"], seed=1)
    ranks[1].start("read_for", seconds=2.0, keys=many, seed=2)
    written, read = ranks[0].finish(), ranks[1].finish()
    assert written["WRONG"] == read["WRONG"] == 0
    assert written["written"] > 0 and read["good"] > 0
    assert ranks[0].call("stats")["evicted_pages"] > 0


@pytest.mark.parametrize("own", [[{}, {}], [dict(dp_rank=0), dict(dp_rank=1)]], ids=["plain", "dp-attention"])
def test_data_parallel_replicas_share_pages(make, own):
    """Every replica says tp_rank 0 of 1, writes the same keys at the same time, and reads what others wrote."""
    own = [one | dict(shard="whole") for one in own]
    ranks, opened = make(own)
    assert len({one["fingerprint"] for one in opened}) == 1 and all(one["writes"] for one in opened)
    ranks[0].call("write", keys=FEW)
    assert ranks[1].call("read", keys=FEW) == GOOD
    assert each(ranks, "write", keys=KEYS) == [[True] * len(KEYS)] * 2
    assert each(ranks, "read", keys=KEYS) == [["good"] * len(KEYS)] * 2


def test_replicas_that_rounded_differently(make):
    """Equal keys whose bytes differ in the last bits: any reader gets one writer's page, whole."""
    ranks, _ = make([dict(shard="a"), dict(shard="b")])
    for rank, seed in zip(ranks, (1, 2), strict=True):
        rank.start("write_and_read_for", seconds=1.5, keys=KEYS, shards=["a", "b"], seed=seed)
    counts = [rank.finish() for rank in ranks]
    assert [count["WRONG"] for count in counts] == [0, 0]
    assert all(count["good"] > 100 for count in counts)


def test_replicas_with_other_weights_are_apart(make):
    """Identical ranks and keys, other weights (one replica was updated): distinct regions of the store."""
    ranks, opened = make([dict(shard="one", revision="one"), dict(shard="two", revision="two")])
    assert opened[0]["fingerprint"] != opened[1]["fingerprint"]
    each(ranks, "write", keys=FEW)
    assert each(ranks, "read", keys=FEW) == [GOOD] * 2


# ---- one host, one store --------------------------------------------------------------------------------------------


def test_one_capacity_over_all_ranks(make, tmp_path):
    """Four ranks that each would fill the store: blocks on disk stay below the one number in the settings."""
    ranks, _ = make(tp(4), capacity="16MiB", layers=24)
    for rank, seed in zip(ranks, range(4), strict=True):
        rank.start("write_and_read_for", seconds=1.5, keys=KEYS, shards=[f"tp{seed}"], seed=seed)
    counts = [rank.finish() for rank in ranks]
    assert [count["WRONG"] for count in counts] == [0] * 4
    page_bytes = 2 * 24 * 16 * 2 * 32 * 2
    assert sum(count["written"] for count in counts) * page_bytes > 2 * (16 << 20)
    allocated = sum(file.stat().st_blocks * 512 for file in (tmp_path / "store").rglob("*") if file.is_file())
    assert allocated <= 16 << 20


def test_ranks_may_race_to_make_the_store(make, tmp_path):
    """The folder does not exist, and four processes make it at once, several times over."""
    for attempt in range(3):
        folder = str(tmp_path / f"store-{attempt}")
        ranks, opened = make(tp(4), folder=folder)
        assert len({one["fingerprint"] for one in opened}) == 4
        assert each(ranks, "write", keys=FEW) == [[True] * len(FEW)] * 4
        assert each(ranks, "read", keys=FEW) == [GOOD] * 4
        each(ranks, "close")


def test_two_settings_for_one_store(make):
    """A second server that asks for another capacity is told both numbers."""
    ranks, _ = make([dict(shard="first")])
    with pytest.raises(RankError) as error:
        make([dict(shard="second")], capacity="32MiB")
    assert "capacity" in error.value.message
    assert ranks[0].call("write", keys=FEW) == [True] * len(FEW)


# ---- a server's ranks, joined ---------------------------------------------------------------------------------------


@pytest.fixture
def world(processes, tmp_path):
    """Makes ranks that are joined by gloo, as a server's are."""
    made = []

    def join(size):
        ranks = processes.make(size)
        made.extend(ranks)
        own = [dict(rank=rank) for rank in range(size)]
        each(ranks, "join", own, rendezvous=str(tmp_path / f"rendezvous-{len(made)}"), size=size)
        return ranks

    yield join
    for rank in made:
        rank.close()


def test_ranks_attach_together_or_not_at_all(world):
    """Where one rank's store cannot be opened, the others must not go on to make process groups without it."""
    ranks = world(3)
    assert each(ranks, "attach_together", fails=False) == ["attached"] * 3
    said = each(ranks, "attach_together", [dict(fails=False), dict(fails=True), dict(fails=False)])
    assert said[1] == "OSError: no room for the index"
    for other in (said[0], said[2]):
        assert other.startswith("PeerError") and "rank 1: OSError: no room for the index" in other


def test_made_up_names_agree(world):
    """Ranks that share pages must give weights from memory the same name, whoever asks first; servers never do."""
    first, second = world(2), world(2)
    names = [each(ranks, "common_name", what=f"weight-update/{n}") for ranks in (first, second) for n in (1, 2, 1)]
    assert all(name[0] == name[1] for name in names)
    assert names[0] == names[2] and names[3] == names[5]
    assert len({name[0] for name in names}) == 4


@pytest.mark.parametrize("is_mla", [False, True], ids=["mha", "mla"])
def test_real_trees_of_two_ranks(world, tmp_path, model, is_mla):
    """SGLang's tree, controller and threads on two TP ranks: same answer on both, restored byte for byte."""
    size, folder = 2, str(tmp_path / "store")
    own = [dict(rank=rank, shard="" if is_mla else f"tp{rank}") for rank in range(size)]
    common = dict(folder=folder, model=str(model), mla=is_mla, size=size)
    ranks = world(size)
    each(ranks, "open_tree", own, **common)
    tokens, other = prompt(1, 8), prompt(2, 4)
    assert each(ranks, "prefill", tokens=tokens) == [(0, 0, 0, 128)] * size
    assert each(ranks, "tree_writes") == ([8, 0] if is_mla else [8, 8])
    each(ranks, "flush")
    assert each(ranks, "prefill", tokens=tokens) == [(0, 0, 128, 0)] * size
    assert each(ranks, "prefill", tokens=tokens[:64] + other) == [(64, 0, 0, 64)] * size
    # an attach that fails on one rank (its settings are wrong) leaves both usable
    each(ranks, "detach_tree")
    said = each(ranks, "attach_tree", [dict(), dict(capacity="lots")])
    assert [ok for ok, _ in said] == [False, False]
    assert "capacity" in said[1][1] and "rank 1" in said[0][1]
    assert [ok for ok, _ in each(ranks, "attach_tree")] == [True, True]
    each(ranks, "flush")
    assert each(ranks, "prefill", tokens=tokens) == [(0, 0, 128, 0)] * size
    each(ranks, "close_tree")
    ranks = world(size)
    each(ranks, "open_tree", own, **common)
    assert each(ranks, "prefill", tokens=tokens) == [(0, 0, 128, 0)] * size
    each(ranks, "close_tree")


def test_ranks_agree_when_one_of_them_cannot_read(world, tmp_path, model):
    """One rank's pages are gone or slow: both report the shorter prefix, and nobody waits for ever."""
    size, folder = 2, str(tmp_path / "store")
    own = [dict(rank=rank, shard=f"tp{rank}") for rank in range(size)]
    ranks = world(size)
    each(ranks, "open_tree", own, folder=folder, model=str(model), mla=False, size=size)
    tokens = prompt(1, 8)
    each(ranks, "prefill", tokens=tokens)
    for fault in (dict(exists_at_most=5), dict(get_at_most=3), dict(set_fails=True), dict(get_raises=True)):
        each(ranks, "flush")
        ranks[1].call("break_storage", **fault)
        splits = each(ranks, "prefill", tokens=tokens)
        assert splits[0] == splits[1], fault
        each(ranks, "break_storage")
    each(ranks, "flush")
    assert each(ranks, "prefill", tokens=tokens) == [(0, 0, 128, 0)] * size
    each(ranks, "close_tree")


# ---- what is refused, and said --------------------------------------------------------------------------------------


def config(**values):
    return SimpleNamespace(**dict(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, is_mla_model=False) | values)


@pytest.mark.parametrize(
    "values,settings,word",
    [
        (dict(tp_lcm_size=4), {}, "tp_lcm_size"),
        (dict(should_split_heads=True), {}, "tp_lcm_size"),
        (dict(tp_size=2, dcp_size=2, is_mla_model=True), {}, "--dcp-size 2"),
        (dict(tp_size=2, is_mla_model=True), dict(dcp_size=2), "--dcp-size 2"),  # 0.5.16 says it nowhere else
        (dict(tp_size=2, attn_cp_size=2, is_mla_model=True), {}, "context parallelism (size 2)"),
        (dict(tp_size=8, is_mla_model=True), dict(nnodes=2, tp_size=8), "4 TP ranks a node, TP groups of 8"),
    ],
)
def test_refusals(values, settings, word):
    with pytest.raises(UnsupportedRanksError) as error:
        refuse_unsupported(config(**values), ServerSettings(SimpleNamespace(**settings)))
    assert word in str(error.value)


@pytest.mark.parametrize(
    "values,settings",
    [
        (dict(tp_size=8), dict(nnodes=2, tp_size=8)),  # MHA: every rank has a shard and a disk of its own
        (dict(tp_size=4, is_mla_model=True), dict(nnodes=2, tp_size=8, enable_dp_attention=True)),
        (dict(tp_size=4, pp_size=2, is_mla_model=True), dict(nnodes=2, tp_size=4)),  # a stage a node
        (dict(tp_size=2, attn_cp_size=2), {}),
        (dict(tp_size=2), dict(dp_size=2)),
    ],
)
def test_what_is_not_refused(values, settings):
    refuse_unsupported(config(**values), ServerSettings(SimpleNamespace(**settings)))


def test_who_writes():
    """As SGLang says it; where a release's configuration does not, as its controller decides it."""
    assert rank_of(config(tp_rank=1, tp_size=2)).writes
    assert rank_of(config(is_mla_model=True, tp_size=2)).writes
    assert not rank_of(config(is_mla_model=True, tp_rank=1, tp_size=2)).writes
    assert not rank_of(config(is_storage_writer=False)).writes
    assert str(rank_of(config())) == "the only one"
    assert str(rank_of(config(tp_rank=1, tp_size=4, pp_rank=1, pp_size=2))) == "tp 1 of 4, pp 1 of 2"
