# SPDX-License-Identifier: Apache-2.0
"""Which pages of the KV pools SGLang takes and gives back, told to whoever keeps a table of them (docs/restore.md).

SGLang's allocators keep their free pages in tensors on the device: pages are taken from the front of ``free_pages``,
and freed ones are added to it or wait elsewhere. Only the lengths are known to the host, and they are all that is read
here: page ids are passed on as the tensors that SGLang has, and nothing waits for the device.

Supported are SGLang's two plain allocators, ``TokenToKVPoolAllocator`` and ``PagedTokenToKVPoolAllocator``, as they are
in 0.5.16 and 0.5.23, found by what they contain. Others (sliding windows, unified pools, hierarchical sparse) take
pages in other ways and are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from sglang_tardis.log import logger
from sglang_tardis.sglang.seams import SeamError, sglang_version

_TOKEN, _PAGED = "TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator"
_MODULE = "sglang.srt.mem_cache.allocator"


class PageListener(Protocol):
    """What is told, on SGLang's scheduler thread and in its order.

    Page ids are int64 tensors of shape ``[n]``, n > 0, on the pool's device; with a page size of 1 they are token
    slots. They are SGLang's own: not to be written to. They are valid in the order of the stream that is current in
    the call.
    """

    def allocated(self, pages: torch.Tensor) -> None:
        """These pages are in use from now on."""

    def freed(self, pages: torch.Tensor) -> None:
        """These pages are free from now on."""

    def reset(self, free: torch.Tensor) -> None:
        """Exactly these pages are free; whatever was told before does not hold any more."""


class PageEvents:
    """Tells a listener of every page that one allocator takes and gives back, from now until ``detach``.

    Args:
        allocator: an allocator of SGLang, as the scheduler has it (``token_to_kv_pool_allocator``).
        listener: told of its free pages at once (``reset``), then of changes. An exception that it raises ends the
            events, is logged, and is kept in ``failure``: SGLang itself goes on.

    Raises:
        SeamError: it is an allocator of another kind, or this SGLang's allocators are not as this module knows them.
    """

    def __init__(self, allocator: Any, listener: PageListener) -> None:
        self._allocator = allocator
        self._listener = listener
        self._taken_from: torch.Tensor | None = None  # free_pages, from which the running call takes
        self._wrappers: dict[str, Callable[..., Any]] = {}
        self.failure: BaseException | None = None
        self._kind = _kind_of(allocator)
        names = ["alloc", "merge_and_sort_free", "clear"]
        if self._kind == _PAGED:
            names += ["alloc_extend", "alloc_decode"]
        self._release = "_release_page_ids" if hasattr(allocator, "_release_page_ids") else "free"
        names.append(self._release)
        if hasattr(allocator, "restore_state"):
            names.append("restore_state")
        _require(allocator, names, self._kind)
        around = {
            "merge_and_sort_free": self._around_merge,
            "clear": self._around_clear,
            "restore_state": self._around_restore,
            "_release_page_ids": self._around_release,
            "free": self._around_free,
        }
        for name in names:
            self._wrap(name, around.get(name, self._around_alloc))
        self._tell(self._listener.reset, self._all_free())

    def detach(self) -> None:
        """End the events. Raises SeamError if somebody has wrapped the allocator again meanwhile: undo that first."""
        attributes = vars(self._allocator)
        foreign = [name for name, wrapper in self._wrappers.items() if attributes.get(name) is not wrapper]
        if foreign:
            raise SeamError(
                f"page events: {', '.join(foreign)} of the allocator was replaced after they were attached; detach "
                "what came later first"
            )
        for name in self._wrappers:
            delattr(self._allocator, name)
        self._wrappers = {}

    # ---- what SGLang calls

    def _wrap(self, name: str, around: Callable[..., Any]) -> None:
        original = getattr(self._allocator, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        self._wrappers[name] = wrapper
        setattr(self._allocator, name, wrapper)  # the class's own calls find it too

    def _around_alloc(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._taken_from = self._allocator.free_pages
        try:
            result = original(*args, **kwargs)
            before = self._taken_from
        finally:
            self._taken_from = None
        self._tell_some(self._listener.allocated, before[: len(before) - len(self._allocator.free_pages)])
        return result

    def _around_merge(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if self._taken_from is not None:
            self._taken_from = self._allocator.free_pages  # the call that runs takes from the sorted ones
        return result

    def _around_release(self, original: Callable[..., Any], *page_ids: torch.Tensor) -> Any:
        result = original(*page_ids)
        for pages in page_ids:  # of the type that the caller's slots had, int32 from the table of requests
            self._tell_some(self._listener.freed, pages.to(torch.int64).contiguous())
        return result

    def _around_free(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        allocator = self._allocator
        before = {name: len(getattr(allocator, name)) for name in ("free_pages", "release_pages")}
        result = original(*args, **kwargs)
        for name, length in before.items():  # none grows while frees are grouped
            pages = getattr(allocator, name)
            grown = len(pages) - length
            self._tell_some(self._listener.freed, pages[:grown] if self._kind == _PAGED else pages[length:])
        return result

    def _around_clear(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self._tell(self._listener.reset, self._all_free())
        return result

    def _around_restore(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before, waiting = self._allocator.free_pages, self._allocator.release_pages
        result = original(*args, **kwargs)
        now = self._allocator.free_pages
        returned = len(now) - len(before)
        # Only taken from since the state was saved: those come back, without being freed.
        same_memory = returned >= 0 and now.data_ptr() + returned * now.element_size() == before.data_ptr()
        if same_memory and waiting is self._allocator.release_pages:
            self._tell_some(self._listener.freed, now[:returned])
        else:
            self._tell(self._listener.reset, self._all_free())
        return result

    # ---- telling

    def _all_free(self) -> torch.Tensor:
        allocator = self._allocator
        waiting = getattr(allocator, "staged_pages", None)
        if waiting is None:
            waiting = [allocator.release_pages]
        return torch.cat((allocator.free_pages, *waiting))

    def _tell_some(self, tell: Callable[[torch.Tensor], None], pages: torch.Tensor) -> None:
        if len(pages) > 0:
            self._tell(tell, pages)

    def _tell(self, tell: Callable[[torch.Tensor], None], pages: torch.Tensor) -> None:
        if self.failure is not None:
            return
        try:
            tell(pages)
        except Exception as error:
            self.failure = error
            logger.exception("tardis: page events end: the listener failed; its table of pages is of no use any more")


def _kind_of(allocator: Any) -> str:
    kind = type(allocator).__name__
    if kind in (_TOKEN, _PAGED) and type(allocator).__module__.startswith(_MODULE):
        return kind
    raise SeamError(
        f"page events: expected SGLang's {_TOKEN} or {_PAGED}, found {type(allocator).__module__}.{kind} "
        f"(SGLang {sglang_version()}); models with sliding windows and unified or sparse pools are not supported"
    )


def _require(allocator: Any, names: list[str], kind: str) -> None:
    missing = [name for name in names if not callable(getattr(allocator, name, None))]
    if not isinstance(getattr(allocator, "free_pages", None), torch.Tensor):
        missing.append("free_pages")
    waits = "staged_pages" if hasattr(allocator, "staged_pages") else "release_pages"
    if waits == "release_pages" and not isinstance(getattr(allocator, waits, None), torch.Tensor):
        missing.append("release_pages or staged_pages")
    taken = [name for name in names if name in vars(allocator)]
    if missing or taken:
        what = f"has no {', '.join(missing)}" if missing else f"is wrapped already ({', '.join(taken)})"
        raise SeamError(
            f"page events: {kind} of SGLang {sglang_version()} {what}; use a supported release (0.5.16 or 0.5.23), and "
            "attach events once"
        )
