# SPDX-License-Identifier: Apache-2.0
"""SGLang's real tree and controller through the plugin: right split of cached tokens, never a foreign page."""

from __future__ import annotations

import pytest
from tree_server import Split, TreeServer, prompt, write_checkpoint

LAYOUTS = [
    ("page_first", "kernel"),
    ("page_first_direct", "direct"),
    ("layer_first", "kernel"),
    ("layer_first", "direct"),
    ("page_head", "kernel"),
]


@pytest.mark.parametrize("core", ["python", "rust"])
@pytest.mark.parametrize("mem_layout,io_backend", LAYOUTS)
def test_cold_warm_flush_restart(tmp_path, model, mem_layout, io_backend, core):
    tokens = prompt(1, 10)
    options = dict(mem_layout=mem_layout, io_backend=io_backend, core=core)
    with TreeServer(tmp_path / "store", model, **options) as server:
        assert server.controller.page_get_func == server.controller._page_get_zero_copy
        assert server.controller.page_set_func == server.controller._page_set_zero_copy
        assert server.prefill(tokens) == Split(0, 0, 0, 160)
        assert server.prefill(tokens) == Split(160, 0, 0, 0)
        server.flush()
        assert server.prefill(tokens) == Split(0, 0, 160, 0)
    with TreeServer(tmp_path / "store", model, **options) as server:
        assert server.prefill(tokens) == Split(0, 0, 160, 0)
        assert server.prefill(tokens) == Split(160, 0, 0, 0)
        assert server.prefill(prompt(2, 10)) == Split(0, 0, 0, 160)


@pytest.mark.parametrize("mem_layout,io_backend", LAYOUTS[:4])  # SGLang has no page_head layout for MLA
def test_mla(tmp_path, model, mem_layout, io_backend):
    tokens = prompt(1, 6)
    options = dict(mem_layout=mem_layout, io_backend=io_backend, mla=True)
    with TreeServer(tmp_path / "store", model, **options) as server:
        assert server.prefill(tokens) == Split(0, 0, 0, 96)
        server.flush()
        assert server.prefill(tokens) == Split(0, 0, 96, 0)
    with TreeServer(tmp_path / "store", model, **options) as server:
        assert server.prefill(tokens) == Split(0, 0, 96, 0)


def test_layouts_exchange_pages(tmp_path, model):
    """What one server wrote from layer_first, another reads into page_first_direct, and the other way round."""
    first, second = prompt(1, 5), prompt(2, 5)
    with TreeServer(tmp_path / "store", model, mem_layout="layer_first", io_backend="kernel") as server:
        assert server.prefill(first) == Split(0, 0, 0, 80)
    with TreeServer(tmp_path / "store", model, mem_layout="page_first_direct", io_backend="direct") as server:
        assert server.prefill(first) == Split(0, 0, 80, 0)
        assert server.prefill(second) == Split(0, 0, 0, 80)
    with TreeServer(tmp_path / "store", model, mem_layout="layer_first", io_backend="kernel") as server:
        assert server.prefill(second) == Split(0, 0, 80, 0)
    with TreeServer(tmp_path / "store", model, mem_layout="page_first") as server:
        assert server.prefill(first) == Split(0, 0, 0, 80)  # other bytes on disk, so another namespace
    with TreeServer(tmp_path / "store", model, mem_layout="page_head") as server:
        assert server.prefill(first) == Split(0, 0, 0, 80)


# ---- prefixes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("core", ["python", "rust"])
def test_splits(tmp_path, model, core):
    """Prompts that share a prefix: nodes split, and each prompt gets exactly the pages that it shares."""
    trunk = prompt(1, 6)
    left, right = trunk + prompt(2, 4), trunk + prompt(3, 4)
    with TreeServer(tmp_path / "store", model, core=core) as server:
        assert server.prefill(left) == Split(0, 0, 0, 160)
        assert server.prefill(right) == Split(96, 0, 0, 64)  # splits the node after six pages
        assert server.prefill(trunk[:48]) == Split(48, 0, 0, 0)
        server.flush()
        assert server.prefill(right) == Split(0, 0, 160, 0)
        assert server.prefill(left) == Split(96, 0, 64, 0)  # the device's part, then storage's
        server.flush()
        assert server.prefill(trunk[:48] + prompt(4, 2)) == Split(0, 0, 48, 32)
        assert server.prefill(left) == Split(48, 0, 112, 0)
    with TreeServer(tmp_path / "store", model, core=core) as server:
        assert server.prefill(trunk[:48] + prompt(4, 2)) == Split(0, 0, 80, 0)


@pytest.mark.parametrize("extra", [0, 1, 15])
def test_prompt_lengths_around_a_page(tmp_path, model, extra):
    tokens = prompt(1, 4, extra=extra)
    with TreeServer(tmp_path / "store", model) as server:
        assert server.prefill(tokens) == Split(0, 0, 0, 64)
        server.flush()
        assert server.prefill(tokens) == Split(0, 0, 64, 0)
        server.flush()
        assert server.prefill(tokens[:63]) == Split(0, 0, 48, 0)


def test_host_tier_between(tmp_path, model):
    """Pages that left the device come from the host tier, not from storage."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    tokens = prompt(1, 6)
    with TreeServer(tmp_path / "store", model) as server:
        server.prefill(tokens)
        server.cache.evict(EvictParams(num_tokens=1 << 20))
        longer = tokens + prompt(2, 2)
        assert server.prefill(longer) == Split(0, 96, 0, 32)


def test_long_prompt_is_written_and_read_in_batches(tmp_path, model):
    """More pages than SGLang hands over at once; parents link the whole prefix."""
    tokens = prompt(1, 300)
    with TreeServer(tmp_path / "store", model, tokens=8192, layers=1, heads=1, head_dim=16) as server:
        storage = server.storage
        namespace = storage._current()
        calls = []
        original = namespace.set
        namespace.set = lambda hashes, pieces, parent=None: (
            calls.append((hashes, parent)) or original(hashes, pieces, parent)
        )
        assert server.cache.hicache_storage_pass_prefix_keys
        assert server.prefill(tokens) == Split(0, 0, 0, 4800)
        assert server.prefill(tokens + prompt(2, 3)) == Split(4800, 0, 0, 48)
        assert [len(hashes) for hashes, _ in calls] == [128, 128, 44, 3]
        previous = None
        for hashes, parent in calls:
            assert parent == previous
            previous = hashes[-1].tobytes()
        server.flush()
        assert server.prefill(tokens + prompt(2, 3)) == Split(0, 0, 4848, 0)
        stats = storage._store.stats()
        assert stats["set_pages_written"] == 303 and stats["get_pages_hit"] == 303


# ---- nothing foreign ------------------------------------------------------------------------------------------------


def test_two_models_under_one_served_name(tmp_path):
    """The same architecture, sizes and served name; only the weights differ."""
    first, second = (write_checkpoint(tmp_path / f"model{seed}", seed=seed) for seed in (1, 2))
    tokens = prompt(1, 8)
    with TreeServer(tmp_path / "store", first) as server:
        assert server.prefill(tokens) == Split(0, 0, 0, 128)
    with TreeServer(tmp_path / "store", second) as server:
        assert server.prefill(tokens) == Split(0, 0, 0, 128)
        server.flush()
        assert server.prefill(tokens) == Split(0, 0, 128, 0)
    with TreeServer(tmp_path / "store", first) as server:
        assert server.prefill(tokens) == Split(0, 0, 128, 0)


def test_changed_weights_in_one_place(tmp_path, model):
    tokens = prompt(1, 8)
    with TreeServer(tmp_path / "store", model) as server:
        server.prefill(tokens)
    write_checkpoint(model, seed=99)
    with TreeServer(tmp_path / "store", model) as server:
        assert server.prefill(tokens) == Split(0, 0, 0, 128)


def test_weights_revision_setting(tmp_path, model):
    tokens = prompt(1, 8)
    with TreeServer(tmp_path / "store", model, extra={"weights_revision": "one"}) as server:
        server.prefill(tokens)
    with TreeServer(tmp_path / "store", model, extra={"weights_revision": "two"}) as server:
        assert server.prefill(tokens) == Split(0, 0, 0, 128)
    with TreeServer(tmp_path / "store", model, extra={"weights_revision": "one"}) as server:
        assert server.prefill(tokens) == Split(0, 0, 128, 0)


def test_kv_dtypes_are_apart(tmp_path, model):
    """bf16, and two fp8 types that SGLang keeps as the same bytes."""
    tokens = prompt(1, 8)
    for again in (False, True):
        for dtype in ("bf16", "fp8_e4m3", "fp8_e5m2"):
            with TreeServer(tmp_path / "store", model, dtype=dtype) as server:
                assert server.prefill(tokens) == (Split(0, 0, 128, 0) if again else Split(0, 0, 0, 128)), dtype


def test_page_sizes_are_apart(tmp_path, model):
    tokens = prompt(1, 8)
    for page_size in (16, 32, 64):
        with TreeServer(tmp_path / "store", model, page_size=page_size) as server:
            assert server.prefill(tokens) == Split(0, 0, 0, 128)
            server.flush()
            assert server.prefill(tokens) == Split(0, 0, 128, 0)


@pytest.mark.parametrize("core", ["python", "rust"])
def test_salts_and_adapters_are_apart(tmp_path, model, core):
    """One prompt under salts, adapters, both and neither: each finds its own pages only."""
    tokens = prompt(1, 6)
    kinds = [(None, None), (None, "A"), (None, "B"), ("X", None), ("X", "A"), ("XA", None), ("", "A")]
    with TreeServer(tmp_path / "store", model, core=core, tokens=4096) as server:
        for extra_key, salt in kinds:
            assert server.prefill(tokens, extra_key, salt) == Split(0, 0, 0, 96), (extra_key, salt)
    with TreeServer(tmp_path / "store", model, core=core, tokens=4096) as server:
        for extra_key, salt in kinds:
            assert server.prefill(tokens + prompt(2, 2), extra_key, salt) == Split(0, 0, 96, 32), (extra_key, salt)
        assert server.prefill(tokens, None, "C") == Split(0, 0, 0, 96)


@pytest.mark.parametrize("core", ["python", "rust"])
def test_bigram_keys(tmp_path, model, core):
    """An EAGLE tree hashes pairs of tokens; its pages depend on one token more, and are apart from plain ones."""
    tokens = prompt(1, 6, extra=1)
    with TreeServer(tmp_path / "store", model, core=core, eagle=True) as server:
        assert server.prefill(tokens) == Split(0, 0, 0, 96)
        server.flush()
        assert server.prefill(tokens) == Split(0, 0, 96, 0)
        server.flush()
        other_next = [*tokens[:96], tokens[96] + 1]
        assert server.prefill(other_next) == Split(0, 0, 80, 16)  # the last page saw another token
        assert server.prefill([*tokens, *prompt(3, 1)]) == Split(80, 0, 16, 16)
    with TreeServer(tmp_path / "store", model, core=core) as server:
        assert server.prefill(tokens) == Split(0, 0, 0, 96)


def test_other_extra_config_for_the_same_pages(tmp_path, model):
    """Settings that do not change bytes keep the pages."""
    tokens = prompt(1, 4)
    with TreeServer(tmp_path / "store", model) as server:
        server.prefill(tokens)
    with TreeServer(
        tmp_path / "store", model, extra={"engine": "sync", "direct_io": "off", "queue_depth": 4}
    ) as server:
        assert server.prefill(tokens) == Split(0, 0, 64, 0)


# ---- life cycle -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("core", ["python", "rust"])
def test_detach_attach_clear(tmp_path, model, core):
    tokens, later = prompt(1, 6), prompt(2, 6)
    with TreeServer(tmp_path / "store", model, core=core) as server:
        server.prefill(tokens)
        assert server.cache.detach_storage_backend()[0]
        server.flush()
        assert server.prefill(tokens) == Split(0, 0, 0, 96)  # nothing is read while detached
        assert server.prefill(later) == Split(0, 0, 0, 96)
        ok, message = server.attach()
        assert ok, message
        assert server.controller.page_set_func == server.controller._page_set_zero_copy
        assert server.prefill(tokens + prompt(3, 2)) == Split(96, 0, 0, 32)
        server.flush()
        assert server.prefill(tokens) == Split(0, 0, 96, 0)  # what was stored before is still there
        assert server.prefill(later) == Split(0, 0, 0, 96)  # what was computed while detached is not
        assert server.cache.clear_storage_backend() is True
        server.flush()
        assert server.prefill(tokens) == Split(0, 0, 0, 96)
        server.flush()
        assert server.prefill(tokens) == Split(0, 0, 96, 0)


def test_a_bad_attach_leaves_the_server_usable(tmp_path, model):
    tokens = prompt(1, 4)
    with TreeServer(tmp_path / "store", model) as server:
        server.prefill(tokens)
        server.cache.detach_storage_backend()
        ok, message = server.attach(capacity="lots")
        assert not ok and "capacity" in message
        ok, message = server.attach(nonsense=1)
        assert not ok and "nonsense" in message
        assert not server.controller.enable_storage
        ok, message = server.attach()
        assert ok, message
        server.flush()
        assert server.prefill(tokens) == Split(0, 0, 64, 0)


def test_a_refused_pool_undoes_the_attach(tmp_path, model, monkeypatch):
    """SGLang registers pools after the attach proper; a refusal there must not leave half of one."""
    tokens = prompt(1, 4)
    with TreeServer(tmp_path / "store", model) as server:
        server.prefill(tokens)
        server.cache.detach_storage_backend()
        entry = server.controller.mem_pool_host.entries[0]
        monkeypatch.setattr(entry, "name", "mamba")
        ok, message = server.attach()
        assert not ok and "'mamba'" in message
        assert not server.controller.enable_storage and server.controller.storage_backend is None
        monkeypatch.undo()
        ok, message = server.attach()
        assert ok, message
        server.flush()
        assert server.prefill(tokens) == Split(0, 0, 64, 0)


def test_pool_added_while_running_is_refused(tmp_path, model):
    from sglang.srt.mem_cache.hicache_storage import PoolName
    from sglang.srt.mem_cache.pool_host import PoolEntry
    from sglang_tardis.sglang.host_pool import UnsupportedPoolError

    with TreeServer(tmp_path / "store", model) as server:
        anchor = server.controller.mem_pool_host.anchor_entry
        draft = PoolEntry(PoolName.DRAFT, anchor.host_pool, anchor.device_pool, anchor.layer_mapper)
        with pytest.raises(UnsupportedPoolError, match="'draft'"):
            server.controller.register_host_pool_entry(draft)


def test_dynamic_route(tmp_path, model):
    """SGLang's own `dynamic` backend, without the name tardis on the command line."""
    tokens = prompt(1, 5)
    extra = {
        "backend_name": "tardis",
        "module_path": "sglang_tardis.sglang.storage",
        "class_name": "TardisStorage",
        "interface_v1": 1,
    }
    with TreeServer(tmp_path / "store", model, backend="dynamic", extra=extra) as server:
        assert server.cache.hicache_storage_pass_prefix_keys
        assert server.prefill(tokens) == Split(0, 0, 0, 80)
    with TreeServer(tmp_path / "store", model) as server:
        assert server.prefill(tokens) == Split(0, 0, 80, 0)


def test_copying_path_of_the_real_controller(tmp_path, model):
    """`dynamic` without interface_v1: SGLang copies pages through Python; slow, warned about, and right."""
    tokens = prompt(1, 5)
    extra = {"backend_name": "t", "module_path": "sglang_tardis.sglang.storage", "class_name": "TardisStorage"}
    with TreeServer(tmp_path / "store", model, backend="dynamic", extra=extra) as server:
        server.host_pool.pin_memory = False
        assert server.prefill(tokens) == Split(0, 0, 0, 80)
        server.flush()
        assert server.prefill(tokens) == Split(0, 0, 80, 0)
        assert server.storage._warned_generic
    with TreeServer(tmp_path / "store", model) as server:
        assert server.prefill(tokens) == Split(0, 0, 80, 0)


def test_page_lost_between_query_and_read(tmp_path, model):
    """Eviction, or an operator's clear, may win against a read: then the page is computed."""
    tokens = prompt(1, 6)
    with TreeServer(tmp_path / "store", model) as server:
        server.prefill(tokens)
        server.flush()
        storage = server.storage
        query = storage.batch_exists

        def query_then_clear(keys, extra_info=None):
            found = query(keys, extra_info)
            storage._store.clear()
            return found

        storage.batch_exists = query_then_clear
        assert server.prefill(tokens) == Split(0, 0, 0, 96)
        del storage.batch_exists
        server.flush()
        assert server.prefill(tokens) == Split(0, 0, 96, 0)


def test_without_tardis_nothing_changes(tmp_path, model, monkeypatch):
    """With the plugin loaded, SGLang's own file backend behaves as ever, and a server without storage too."""
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "files"))
    tokens = prompt(1, 4)
    with TreeServer(None, model) as server:
        assert server.prefill(tokens) == Split(0, 0, 0, 64)
        server.flush()
        assert server.prefill(tokens) == Split(0, 0, 0, 64)
    with TreeServer(None, model) as server:
        ok, message = server.cache.attach_storage_backend("file", '{"prefetch_threshold": 1}', served_model_name="m")
        assert ok, message
        server.host_pool.pin_memory = False
        assert server.controller.page_set_func == server.controller._generic_page_set
        assert not server.cache.hicache_storage_pass_prefix_keys
        assert server.prefill(tokens) == Split(0, 0, 0, 64)
        server.flush()
        assert server.prefill(tokens) == Split(0, 0, 64, 0)
