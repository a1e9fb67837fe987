# SPDX-License-Identifier: Apache-2.0
"""SGLang's HiCache storage backend ``tardis``: pinned host pages <-> the object store on disk.

SGLang calls from several threads: queries from one, reads from another, writes from a third, life-cycle calls from the
scheduler. A batch costs a few numpy expressions and one call into the store, which releases the GIL and keeps the whole
batch in flight. Nothing that goes wrong on these calls reaches SGLang as an exception: a page that cannot be read is a
miss, one that cannot be written is not stored, and both are counted.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from sglang_tardis.bridge.keys import block_hash, block_hashes
from sglang_tardis.bridge.namespace import NamespaceIdentity
from sglang_tardis.bridge.pieces import PieceMap
from sglang_tardis.config import ConfigError, load_config
from sglang_tardis.log import FolderLog, RateLimitedLog, logger
from sglang_tardis.metrics import StoreMetrics
from sglang_tardis.sglang import seams, weight_updates
from sglang_tardis.sglang.hashing import exercise_hashing
from sglang_tardis.sglang.host_pool import HostPoolShape, anchor_pool, inspect_pool
from sglang_tardis.sglang.identity import build_identity
from sglang_tardis.sglang.live_namespace import LiveNamespace
from sglang_tardis.sglang.pool_memory import PoolMemory
from sglang_tardis.sglang.ranks import rank_of, refuse_unsupported, together
from sglang_tardis.sglang.server_settings import ServerSettings

__all__ = ["TardisStorage"]

_KV = PoolName.KV
_MAX_SAMPLES = 4096  # of pages and bandwidths between two reads of get_stats


class TardisStorage(HiCacheStorage):
    """The backend, one per scheduler process; those of one host share the store (:mod:`sglang_tardis.sglang.ranks`).

    Opened through the plugin (``--hicache-storage-backend tardis``) or SGLang's ``dynamic`` backend; the settings are
    those of :class:`sglang_tardis.config.TardisConfig`, given in ``--hicache-storage-backend-extra-config``.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, pool_or_kwargs: Any = None) -> None:
        """Open the store.

        Args:
            storage_config: SGLang's description of this rank, with the extra config.
            pool_or_kwargs: the host pool (plugin), or the keyword arguments of the ``dynamic`` backend, in which case
                the pool arrives by :meth:`register_mem_pool_host` and the store is opened then.

        Raises:
            NotImplementedError: this release does not support the set-up (a pool kind, split heads, some ways of
                sharing KV between ranks).
            PeerError: another rank of this server could not open the store.
            ConfigError, TardisError, IdentityError, SeamError: see their messages.
        """
        self._lock = threading.Lock()
        self._closed = False
        self._store: Any = None
        self._live: LiveNamespace | None = None
        self._map: PieceMap | None = None
        self._shape: HostPoolShape | None = None
        self._pool_memory: PoolMemory | None = None
        self._storage_config = storage_config
        self._log = RateLimitedLog()
        self._warned_generic = False
        self._samples_lock = threading.Lock()
        self._samples: dict[str, collections.deque] = {}
        self._metrics: StoreMetrics | None = None
        self._failures = collections.Counter()
        self._folder_log = FolderLog()
        # The last set call's list of earlier keys and its last own hash; see _parent.
        self._last_set: tuple[list[str] | None, bytes | None] = (None, None)

        self._rank = rank_of(storage_config)
        self._controller = seams.attaching_controller.get()
        try:
            with together(self._controller):
                self._settings = ServerSettings()
                self._config = load_config(storage_config.extra_config)
                if self._config.mode == "direct":
                    raise ConfigError(
                        "setting 'mode' = \"direct\": it is chosen when the server starts, with "
                        '--hicache-storage-backend tardis; expected "host" for a storage that is attached later, or '
                        "through 'dynamic'"
                    )
                refuse_unsupported(storage_config, self._settings)
                seams.install_late()
                seams.require("weight updates", "extra keys")
                pool = None if isinstance(pool_or_kwargs, dict) else pool_or_kwargs
                if pool is not None:
                    self._open(pool)
            if pool is not None:
                self._controller = None
        except BaseException:
            self.close()
            raise

    # ---- life cycle -----------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the host pool whose pages are stored; opens the store if the constructor was not given the pool."""
        super().register_mem_pool_host(anchor_pool(mem_pool_host))
        if self._closed:
            return
        if self._store is None:
            try:
                with together(self._controller):
                    self._open(self.mem_pool_host)
                self._controller = None
            except BaseException:
                self.close()
                raise
        elif self.mem_pool_host is not self._pool:
            self._take_pool(self.mem_pool_host)
            self._register_pool()

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take one more host pool; every kind but the target model's KV is refused by name.

        Called for all pools at attach, and later for pools that are added while the server runs: a prefix restored
        without them would be wrong, so the refusal is not a warning.
        """
        inspect_pool(host_pool, str(host_pool_name))
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def refuse_pool(self, name: str) -> None:
        """Raise for a pool that SGLang would keep beside the tree's (draft KV in older releases)."""
        inspect_pool(None, name)

    def on_host_pools_registered(self) -> None:
        """All pools are known; each was checked when it came."""

    def _open(self, pool: Any) -> None:
        from sglang_tardis.store import Store

        pool = anchor_pool(pool)
        try:
            self._take_pool(pool)
            layout = self._map.layout
            identity = build_identity(
                self._storage_config,
                pool,
                self._shape,
                layout,
                weights_revision=self._config.weights_revision,
                device_pool=getattr(self._controller, "mem_pool_device", None),
                settings=self._settings,
                loaded_at=weight_updates.loaded_at() if weight_updates.current() is None else None,
            )
            exercise_hashing(self._shape.page_tokens)
            self._store = Store(self._config.folder, self._config.store_options(object_bytes_hint=layout.object_bytes))
            self._live = LiveNamespace(self._store, identity, layout, self._settings)
            live = weight_updates.current()
            if live is not None:  # updated before this backend was attached
                self.follow_weights(live)
            self._current()
            if self._storage_config.enable_storage_metrics:
                self._metrics = StoreMetrics()
                self._metrics.set_path(self._store.path_report(), layout.tag)
                self._metrics.update(self._store.stats())
            self._register_pool()
            self._say_start()
            weight_updates.register(self)
        except BaseException:
            self.close()
            raise

    def _take_pool(self, pool: Any) -> None:
        shape = inspect_pool(pool)
        piece_map = PieceMap.from_pool(pool, is_mla=shape.is_mla)
        stored, held = piece_map.layout.object_bytes, shape.bytes_per_token * pool.page_size
        if stored != held:
            raise NotImplementedError(
                f"The host pool {type(pool).__name__} says that a page takes {held} bytes but shows only {stored} of "
                "them to storage backends; restoring such a page would leave bytes out. Its kind is not stored by this "
                "release."
            )
        if self._map is not None and self._map.layout != piece_map.layout:
            raise NotImplementedError(
                "The host pool was replaced by one of another geometry; attach the backend again."
            )
        self._pool, self._shape, self._map = pool, shape, piece_map

    def _register_pool(self) -> None:
        before, self._pool_memory = self._pool_memory, None
        if before is not None:
            before.release()
        self._pool_memory = PoolMemory(self._store, self._pool)

    def _say_start(self) -> None:
        report, stats = self._store.path_report(), self._store.stats()
        logger.info(
            "tardis: store %s, rank %s, engine %s, direct I/O %s (%s), capacity %.1f GiB, %d pages recovered, "
            "namespace %s, layout %s (host %s%s), page of %d bytes in %d pieces%s",
            " + ".join((self._config.folder, *self._config.more_paths)),
            self._rank,
            report.get("engine"),
            "on" if report.get("direct_io") else "off",
            report.get("reason"),
            stats.get("capacity_bytes", 0) / 2**30,
            stats.get("recovered_pages", 0),
            self._identity.fingerprint().hex(),
            self._map.layout.tag,
            self._pool.layout,
            "" if self._map.affine else ", irregular addresses: slow",
            self._map.layout.object_bytes,
            self._map.layout.pieces,
            "" if self._config.verify_reads else "; VERIFICATION OF READS IS OFF",
        )
        self._folder_log.look(self._store, stats)

    def close(self) -> None:
        """Make everything durable and release the store. Idempotent; later calls answer miss or False."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            store, self._store = self._store, None
        if self._live is not None:
            self._live.close()
        weight_updates.unregister(self)
        if store is None:
            return
        steps = [store.close]
        if self._metrics is not None:
            steps.insert(0, lambda: self._metrics.update(store.stats()))
        if self._pool_memory is not None:
            steps.append(self._pool_memory.release)  # only now is no request under way
        for step in steps:  # whatever became of those before
            try:
                step()
            except Exception:
                logger.exception("tardis: closing the store %s failed", self._config.folder)

    def clear(self) -> bool:
        """Delete everything in the store, durably. Returns whether that worked.

        SGLang calls this on every rank; the pages of other ranks and of other servers on the store go as well.
        """
        store = self._store
        if store is None:
            return False
        try:
            pages = store.clear()
        except Exception:
            self._failures["clear"] += 1
            logger.exception("tardis: clearing the store %s failed", self._config.folder)
            return False
        logger.info("tardis: %d pages deleted from the store %s", pages, self._config.folder)
        return True

    # ---- weights that change while the server runs -----------------------------------------------------------------

    def follow_weights(self, live: weight_updates.LiveWeights) -> None:
        """Move to the namespace of new weights, or serve and store nothing while they are unknown."""
        if self._live is not None:
            self._live.follow(live)

    @property
    def _identity(self) -> NamespaceIdentity | None:
        return None if self._live is None else self._live.identity

    def _current(self) -> Any:
        """The namespace in use, or None while closed or suspended. Opened at first use."""
        return None if self._live is None else self._live.current()

    # ---- queries ---------------------------------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        """Whether a page is stored."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many of the leading keys are stored without a gap. No I/O."""
        try:
            namespace = self._current()
            if namespace is None or not keys:
                return 0
            return int(namespace.lookup(block_hashes(keys)))
        except Exception:
            self._failed("query", len(keys))
            return 0

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """The longest prefix that can be restored in every pool asked for.

        Pools other than KV hold nothing here: a pool that every page, or the last pages, must have makes the prefix
        zero; one with a verdict of its own (block groups) does not limit it.
        """
        pages = self.batch_exists(keys, extra_info)
        hits = {_KV: pages} if pages else {}
        never_limits = getattr(PoolHitPolicy, "BLOCK_GROUPS", None)
        usable = pages
        for transfer in pool_transfers or ():
            if transfer.name != _KV and transfer.hit_policy != never_limits:
                usable = 0
        return _transfer_result(usable, hits)

    # ---- reads and writes ------------------------------------------------------------------------------------------

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Read pages into the host pool.

        Args:
            keys: page keys, in prefix order.
            host_indices: int64 token slots of as many whole pages.
            extra_info: not used.

        Returns:
            For each key whether all its bytes arrived and were verified.
        """
        return self._get(keys, lambda: self._addresses(host_indices, len(keys)))

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Write pages of the host pool; the pool's memory may change once this returns.

        Args:
            keys: page keys, in prefix order.
            host_indices: int64 token slots of as many whole pages.
            extra_info: its ``prefix_keys`` are the keys before ``keys``; the last one becomes the first page's parent.

        Returns:
            For each key whether it is stored now (or was already). Always True on a rank whose pages another rank
            stores (MLA): nothing is written then.
        """
        return self._set(keys, lambda: self._addresses(host_indices, len(keys)), extra_info)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """:meth:`batch_get_v1` for each transfer; pools other than KV are misses."""
        return {
            transfer.name: self.batch_get_v1(transfer.keys or [], transfer.host_indices, extra_info)
            if transfer.name == _KV
            else [False] * len(transfer.keys or [])
            for transfer in transfers
        }

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """:meth:`batch_set_v1` for each transfer; pools other than KV are not stored."""
        return {
            transfer.name: self.batch_set_v1(transfer.keys or [], transfer.host_indices, extra_info)
            if transfer.name == _KV
            else [False] * len(transfer.keys or [])
            for transfer in transfers
        }

    def _addresses(self, host_indices: torch.Tensor, pages: int) -> np.ndarray:
        slots = host_indices.cpu() if host_indices.device.type != "cpu" else host_indices
        numbers = self._map.pages_of(slots.numpy())
        if len(numbers) != pages:
            raise ValueError(f"{pages} keys came with token slots of {len(numbers)} pages")
        return self._map.matrix(numbers)

    def _get(self, keys: Sequence[str], addresses: Any) -> list[bool]:
        try:
            namespace = self._current()
            if namespace is None or not keys:
                return [False] * len(keys)
            started = time.perf_counter()
            ok = namespace.get(block_hashes(keys), addresses())
            self._sample("prefetch", int(np.count_nonzero(ok)), time.perf_counter() - started)
            return self._answer(ok)
        except Exception:
            self._failed("read", len(keys))
            return [False] * len(keys)

    def _set(
        self, keys: Sequence[str], addresses: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        try:
            namespace = self._current()
            if namespace is None or not keys:
                return [False] * len(keys)
            if not self._rank.writes:
                # SGLang does not ask this of ranks whose pages another one stores; were it to, False would end its
                # operation.
                return [True] * len(keys)
            started = time.perf_counter()
            hashes = block_hashes(keys)
            ok = namespace.set(hashes, addresses(), self._parent(extra_info, hashes))
            self._sample("backup", int(np.count_nonzero(ok)), time.perf_counter() - started)
            return self._answer(ok)
        except Exception:
            self._failed("write", len(keys))
            return [False] * len(keys)

    def _answer(self, ok: np.ndarray) -> list[bool]:
        store = self._store
        if store is not None and not ok.all():  # seldom, and perhaps because a drive fails
            with contextlib.suppress(Exception):
                self._folder_log.look(store, store.stats())
        return ok.tolist()

    def _parent(self, extra_info: HiCacheStorageExtraInfo | None, hashes: np.ndarray) -> bytes | None:
        """Hash of the page before this batch, if SGLang says which it is.

        0.5.16 passes one and the same list for all batches of an operation, and does not extend it if it was empty;
        then the page before this batch is the last one of the batch before.
        """
        earlier = extra_info.prefix_keys if extra_info is not None else None
        last_list, last_hash = self._last_set
        self._last_set = (earlier, hashes[-1].tobytes())
        if earlier:
            return block_hash(earlier[-1])
        if earlier is not None and earlier is last_list:
            return last_hash
        return None

    # ---- SGLang's copying path ---------------------------------------------------------------------------------------

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Read one page into a flat tensor, or None."""
        return self._copy_in([key], None if target_location is None else [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: list[torch.Tensor] | None = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Read pages into flat tensors, None for a miss. SGLang calls this only where its zero-copy hook is missing."""
        self._warn_generic()
        return self._copy_in(keys, target_locations)

    def set(
        self, key: str, value: torch.Tensor | None = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Write one page given as a flat tensor."""
        return self._copy_out([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: list[torch.Tensor] | None = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Write pages given as flat tensors. SGLang calls this only where its zero-copy hook is missing."""
        self._warn_generic()
        return self._copy_out(keys, values)

    def _copy_in(self, keys: Sequence[str], tensors: Sequence[torch.Tensor] | None) -> list[torch.Tensor | None]:
        if tensors is None:
            try:
                tensors = [self._pool.get_dummy_flat_data_page() for _ in keys]
            except Exception:
                self._failed("read", len(keys))
                return [None] * len(keys)
        ok = self._get(keys, lambda: self._flat_addresses(tensors, len(keys)))
        return [tensor if good else None for tensor, good in zip(tensors, ok, strict=False)]

    def _copy_out(self, keys: Sequence[str], tensors: Sequence[torch.Tensor | None] | None) -> bool:
        if not keys:
            return True
        try:
            held = [tensor.contiguous() for tensor in tensors or ()]  # keeps copies alive during the call
        except Exception:
            self._failed("write", len(keys))
            return False
        return all(self._set(keys, lambda: self._flat_addresses(held, len(keys))))

    def _flat_addresses(self, tensors: Sequence[torch.Tensor], pages: int) -> np.ndarray:
        """Piece addresses of pages that lie in flat tensors: all of the first region, then all of the second."""
        layout = self._map.layout
        if len(tensors) != pages:
            raise ValueError(f"{pages} keys came with {len(tensors)} tensors")
        for tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            if size != layout.object_bytes or not tensor.is_contiguous() or tensor.device.type != "cpu":
                raise ValueError(f"expected contiguous CPU tensors of {layout.object_bytes} bytes, got one of {size}")
        bases = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.uint64)
        sizes = np.array(layout.region_bytes, dtype=np.uint64)
        starts = np.concatenate([[0], np.cumsum(sizes[:-1] * np.uint64(layout.parts))]).astype(np.uint64)
        offsets = (np.arange(layout.parts, dtype=np.uint64)[:, None] * sizes + starts).reshape(-1)
        return bases[:, None] + offsets

    def _warn_generic(self) -> None:
        if not self._warned_generic:
            self._warned_generic = True
            logger.warning(
                "tardis: SGLang %s uses its copying path (batch_get/batch_set): slow. The hook on "
                "HiCacheController.attach_storage_backend is missing; with the dynamic backend, set interface_v1 to 1.",
                seams.sglang_version(),
            )

    # ---- statistics --------------------------------------------------------------------------------------------------

    def get_stats(self) -> Any:
        """Pages and bandwidths (GB/s) since the last call as SGLang's StorageMetrics, or None without metrics.

        Called on the scheduler's thread at every step: no I/O, and never an exception.
        """
        if not self._storage_config.enable_storage_metrics:
            return None
        try:
            from sglang.srt.observability.metrics_collector import StorageMetrics

            store, metrics = self._store, self._metrics
            if store is not None and metrics is not None and metrics.due():
                stats = store.stats()
                metrics.update(stats, self._failures)
                self._folder_log.look(store, stats)
            with self._samples_lock:
                drained, self._samples = self._samples, {}
            result = StorageMetrics()
            for name, values in drained.items():
                getattr(result, name).extend(values)
            return result
        except Exception:
            self._log.warning("stats", "tardis: statistics could not be collected", exc_info=True)
            return None

    def _sample(self, kind: str, pages: int, seconds: float) -> None:
        if not self._storage_config.enable_storage_metrics:
            return
        rate = pages * self._map.layout.object_bytes / max(seconds, 1e-9) / 1e9
        with self._samples_lock:
            for name, value in ((f"{kind}_pgs", pages), (f"{kind}_bandwidth", rate)):
                self._samples.setdefault(name, collections.deque(maxlen=_MAX_SAMPLES)).append(value)

    def _failed(self, what: str, pages: int) -> None:
        self._failures[what] += pages
        if self._closed:  # a call that lost the race against close
            return
        with contextlib.suppress(Exception):
            self._log.warning(what, "tardis: a %s of %d pages failed and counts as a miss", what, pages, exc_info=True)


def _transfer_result(pages: int, hits: dict[str, int]) -> PoolTransferResult:
    if "restorable_prefix_pages" in PoolTransferResult.__dataclass_fields__:
        return PoolTransferResult(pages, hits, list(range(1, pages + 1)))
    return PoolTransferResult(pages, hits)
