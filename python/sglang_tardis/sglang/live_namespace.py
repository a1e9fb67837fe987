# SPDX-License-Identifier: Apache-2.0
"""The namespace of the weights in use, which both doors read and write, also when those are replaced."""

from __future__ import annotations

import threading
from typing import Any

import msgspec

from sglang_tardis.bridge.namespace import NamespaceIdentity
from sglang_tardis.bridge.pieces import PieceLayout
from sglang_tardis.log import logger
from sglang_tardis.sglang import weight_updates
from sglang_tardis.sglang.identity import identify_weights, replaces_all_weights
from sglang_tardis.sglang.ranks import common_name
from sglang_tardis.sglang.server_settings import ServerSettings

__all__ = ["LiveNamespace"]


class LiveNamespace:
    """Opens namespaces of one store as weights change. Thread-safe.

    Args:
        store: an open `sglang_tardis.store.Store`.
        identity: of the pages, with the weights that the server was started with.
        layout: of their objects.
        settings: SGLang's.
    """

    def __init__(self, store: Any, identity: NamespaceIdentity, layout: PieceLayout, settings: ServerSettings) -> None:
        self._store = store
        self._layout = layout
        self._settings = settings
        self._lock = threading.Lock()
        self._closed = False
        self._suspended: str | None = None
        self._namespace: Any = None
        self.identity = identity

    def current(self) -> Any:
        """The namespace in use, or None while closed or suspended. Opened at first use."""
        namespace = self._namespace
        if namespace is not None:
            return namespace
        with self._lock:
            if self._closed or self._suspended is not None:
                return None
            if self._namespace is None:
                self._namespace = self._store.namespace(
                    self.identity.fingerprint(), self.identity.description(), self._layout.object_layout()
                )
            return self._namespace

    def follow(self, live: weight_updates.LiveWeights) -> None:
        """Move to the namespace of new weights, or serve and store nothing while they are unknown.

        The pages of the old weights stay in the store for a server that uses them.
        """
        try:
            weights, reason = self._weights_after(live), None
        except Exception as error:
            weights, reason = None, f"the new weights cannot be identified ({error})"
        if weights is None:
            reason = reason or live.unknown
            with self._lock:
                self._suspended, self._namespace = reason, None
            logger.warning(
                "tardis: %s. Nothing is read from or written to storage until a weight update that flushes the cache.",
                reason,
            )
            return
        with self._lock:
            self.identity = msgspec.structs.replace(self.identity, weights=weights)
            self._suspended, self._namespace = None, None
        logger.info("tardis: weights changed (%s), namespace %s", weights, self.identity.fingerprint().hex())

    def close(self) -> None:
        """Have no namespace from now on."""
        with self._lock:
            self._closed, self._namespace = True, None

    def _weights_after(self, live: weight_updates.LiveWeights) -> str | None:
        if live.unknown is not None:
            return None
        if live.model_path is None:
            return f"revision:live:{common_name(live.update)}"
        weights = identify_weights(self._settings, None, live.model_path, load_format="auto", loaded_at=live.loaded_at)
        if replaces_all_weights(self._settings, live.model_path):
            return weights
        # A part of the model's tensors: the others are what they were, which no file says.
        return f"revision:live:{common_name(live.update)}"
