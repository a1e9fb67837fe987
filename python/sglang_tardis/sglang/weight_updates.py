# SPDX-License-Identifier: Apache-2.0
"""Following weights that are replaced while the server runs.

SGLang flushes its own tree after an update (if the request says so), but storage keeps the pages of the old weights,
and they have the same keys. So a backend moves to another namespace once the flush has emptied the tree: until then,
what is read and written still belongs to the old weights. Where no flush happened, pages of both kinds are in the tree
and cannot be told apart; then nothing is served or stored until an update that flushes.

What is known about the weights belongs to the process, not to a backend: one that is attached after an update must not
believe that the model still has the weights it was started with.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import msgspec

from sglang_tardis.log import logger
from sglang_tardis.sglang.server_settings import ServerSettings

__all__ = ["LiveWeights", "around", "current", "forget", "loaded_at", "note_model", "register", "unregister"]


class LiveWeights(msgspec.Struct, frozen=True, kw_only=True):
    """What the last update left in the model.

    Attributes:
        update: which update of this process it was, such as ``weight-update/3``; every rank counts alike. Names the
            weights where no file does: they came from memory or another process.
        model_path: folder or hub name that the weights were loaded from, if they were.
        unknown: why it cannot be said which pages belong to the weights in use, if it cannot.
        loaded_at: when the update from model_path began (Unix seconds).
    """

    update: str
    model_path: str | None = None
    unknown: str | None = None
    loaded_at: float | None = None


_lock = threading.Lock()
_backends: weakref.WeakSet[Any] = weakref.WeakSet()
_current: LiveWeights | None = None
_loaded_at: float | None = None
_updates = 0
_hooks: dict[str, Callable[..., Any]] = {}


def register(backend: Any) -> None:
    """Have a backend told about weight updates in this process (its ``follow_weights`` is called)."""
    with _lock:
        _backends.add(backend)


def unregister(backend: Any) -> None:
    """Forget a backend that was closed."""
    with _lock:
        _backends.discard(backend)


def current() -> LiveWeights | None:
    """The outcome of the last update in this process; None while the model has the weights it was started with."""
    return _current


def loaded_at() -> float | None:
    """When the model was in place (Unix seconds); None while SGLang is still building its cache."""
    return _loaded_at


def forget() -> None:
    """Return to the state of a process that has just started (a new model was loaded in it)."""
    global _current, _loaded_at
    _current = _loaded_at = None


def note_model(original, self, *args, **kwargs):
    """HiCacheController.__init__: built once the model is loaded, whether or not storage is attached by then."""
    from sglang_tardis.sglang import seams

    global _loaded_at
    seams.install_late()  # the tree's modules are imported by now
    _loaded_at = None  # older releases attach storage in here
    original(self, *args, **kwargs)
    _loaded_at = time.time()


def around(method: str) -> Callable[..., Any]:
    """The hook for one method of SGLang's scheduler-side weight updater; the same object at every call."""
    if method not in _hooks:
        special = {"end_weight_update": _end_of_session, "release_memory_occupation": _release}
        _hooks[method] = special.get(method, _update)(method)
    return _hooks[method]


def _update(method: str) -> Callable[..., Any]:
    def hook(original, self, recv_req, *args, **kwargs):
        needs_session = method in ("update_weights_from_distributed", "update_weights_from_tensor")
        update = _next()
        refused = needs_session and hasattr(type(self), "_session") and self._session is None
        began = time.time()
        try:
            output = original(self, recv_req, *args, **kwargs)
        except BaseException:
            _became(update, unknown=f"{method} raised an error, so the weights in use are unknown")
            raise
        if refused and not getattr(output, "success", False):  # turned down before it touched any weight
            return output
        if not getattr(output, "success", False):
            _became(update, unknown=f"{method} did not succeed, so the weights in use are unknown")
        elif not getattr(recv_req, "flush_cache", False):
            _became(update, unknown=f"{method} did not flush the cache, which now mixes pages of both weights")
        elif method == "update_weights_from_disk" and getattr(recv_req, "load_format", None) != "dummy":
            _became(update, model_path=recv_req.model_path, loaded_at=began)
        else:
            _became(update)
        return output

    hook.__name__ = f"tardis_{method}"
    return hook


def _end_of_session(method: str) -> Callable[..., Any]:
    def hook(original, self, *args, **kwargs):
        session, update = getattr(self, "_session", None), _next()
        output = original(self, *args, **kwargs)
        # Weights written behind SGLang's back (RDMA) show only here: a session that loaded nothing itself.
        if session is not None and not getattr(session, "loaded_weights", False):
            _became(update, unknown="a weight-update session took its weights from outside SGLang, without a flush")
        return output

    hook.__name__ = f"tardis_{method}"
    return hook


def _release(method: str) -> Callable[..., Any]:
    def hook(original, self, recv_req, *args, **kwargs):
        update = _next()
        _end_transfers()
        output = original(self, recv_req, *args, **kwargs)
        # Without a copy in host memory, what is there after resuming is whatever the memory held.
        if (
            "weights" in (getattr(recv_req, "tags", None) or ("weights",))
            and getattr(self.memory_saver_adapter, "enabled", True)
            and not ServerSettings().get("enable_weights_cpu_backup")
        ):
            _became(update, unknown="the weights were released from GPU memory and not loaded again")
        return output

    hook.__name__ = f"tardis_{method}"
    return hook


def _end_transfers() -> None:
    """SGLang calls a server idle whose pages are still copied out of the pool that it is about to unmap."""
    with _lock:
        backends = [backend for backend in _backends if hasattr(backend, "end_transfers")]
    for backend in backends:
        backend.end_transfers()


def _next() -> str:
    """Name of the update that begins now. Taken in every call, whatever comes of it: all ranks must count alike."""
    global _updates
    with _lock:
        _updates += 1
        return f"weight-update/{_updates}"


def _became(update: str, **facts: Any) -> None:
    global _current
    weights = LiveWeights(update=update, **facts)
    with _lock:
        _current = weights
        backends = list(_backends)
    for backend in backends:
        try:
            backend.follow_weights(weights)
        except Exception:
            logger.exception("tardis: could not follow a weight update")
