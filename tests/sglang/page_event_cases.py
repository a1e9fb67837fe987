# SPDX-License-Identifier: Apache-2.0
"""What page events must tell of SGLang's real allocators, whichever release they are from."""

from __future__ import annotations

import random
from types import SimpleNamespace

import torch
from sglang_tardis.sglang.page_events import PageEvents
from sglang_tardis.sglang.seams import SeamError

PAGES = 64


class Table:
    """A listener that keeps what a block table would, and finds contradictions."""

    def __init__(self):
        self.free: set[int] = set()
        self.told = 0

    def allocated(self, pages):
        ids = pages.tolist()
        assert ids and pages.dtype == torch.int64 and len(set(ids)) == len(ids)
        assert self.free.issuperset(ids), "a page that was not free"
        self.free.difference_update(ids)
        self.told += 1

    def freed(self, pages):
        ids = pages.tolist()
        assert ids and pages.dtype == torch.int64 and pages.is_contiguous() and len(set(ids)) == len(ids)
        assert self.free.isdisjoint(ids), "a page that was free already"
        self.free.update(ids)
        self.told += 1

    def reset(self, free):
        assert free.dtype == torch.int64
        self.free = set(free.tolist())
        assert len(self.free) == len(free)
        self.told += 1


def make_allocator(page_size, need_sort):
    from sglang.srt.mem_cache import allocator

    arguments = dict(dtype=torch.float16, device="cpu", kvcache=None, need_sort=need_sort)
    if page_size == 1:
        return allocator.TokenToKVPoolAllocator(PAGES, **arguments)
    return allocator.PagedTokenToKVPoolAllocator(PAGES * page_size, page_size, **arguments)


def really_free(allocator):
    waiting = getattr(allocator, "staged_pages", None)
    waiting = [allocator.release_pages] if waiting is None else waiting
    return set(torch.cat((allocator.free_pages, *waiting)).tolist())


def random_use(page_size, need_sort, steps=400):
    """Requests that grow and end in any order; after every step the table says what the allocator knows."""
    allocator, table, source = make_allocator(page_size, need_sort), Table(), random.Random(page_size)
    before = set(vars(allocator))
    events = PageEvents(allocator, table)
    assert table.free == set(range(1, PAGES + 1))
    requests: list[torch.Tensor] = []  # token slots
    refused = 0
    for step in range(steps):
        kind = source.randrange(8)
        if kind < 3 and page_size > 1:
            new = source.randrange(1, 6 * page_size)
            grown = source.randrange(len(requests)) if requests and kind == 0 else None
            old = requests[grown] if grown is not None else torch.empty(0, dtype=torch.int64)
            last = old[-1:] if len(old) else torch.tensor([-1])
            lengths = torch.tensor([len(old)]), torch.tensor([len(old) + new])
            # 0.5.16 launches its kernel before it knows that there is not enough; so ask only for what there is.
            if -(-(len(old) + new) // page_size) - -(-len(old) // page_size) <= allocator.available_size() // page_size:
                out = allocator.alloc_extend(lengths[0], lengths[0], lengths[1], lengths[1], last, new)
                if out is not None and grown is not None:
                    requests[grown] = torch.cat((old, out))
                elif out is not None:
                    requests.append(out)
        elif kind == 3 and page_size > 1 and requests:
            lengths = torch.tensor([len(r) + 1 for r in requests])
            pages = sum(len(r) % page_size == 0 for r in requests)
            if pages <= allocator.available_size() // page_size:
                out = allocator.alloc_decode(lengths, lengths, torch.stack([r[-1] for r in requests]))
                if out is not None:
                    requests = [torch.cat((r, o[None])) for r, o in zip(requests, out, strict=True)]
        elif kind < 5:
            out = allocator.alloc(source.randrange(1, 24) * page_size)
            refused += out is None
            if out is not None:
                requests.append(out)
        elif kind == 5 and requests:
            slots = requests.pop(source.randrange(len(requests)))
            allocator.free(slots.to(torch.int32) if step % 2 else slots)  # SGLang's table of requests is int32
        elif kind == 6 and len(requests) > 1:
            told = table.told
            allocator.free_group_begin()
            for _ in range(2):
                allocator.free(requests.pop(source.randrange(len(requests))))
            assert table.told == told, "told before the pages were free"
            allocator.free_group_end()
        elif kind == 7 and step % 50 == 0:
            allocator.clear()
            requests = []
        assert table.free == really_free(allocator), step
    assert refused > 0 and table.told > 100
    events.detach()
    assert set(vars(allocator)) == before
    told = table.told
    allocator.alloc(page_size)
    assert table.told == told


def saved_states():
    """0.5.16 takes pages on trial and puts its lists back."""
    allocator, table = make_allocator(4, False), Table()
    if not hasattr(allocator, "backup_state"):
        return False
    PageEvents(allocator, table)
    first = allocator.alloc(8)
    state = allocator.backup_state()
    allocator.alloc(12)
    allocator.restore_state(state)
    assert table.free == really_free(allocator)
    state = allocator.backup_state()
    allocator.alloc(4)
    allocator.free(first)
    allocator.restore_state(state)  # not merely what was taken since
    assert table.free == really_free(allocator)
    return True


def refusals():
    """Allocators of other kinds, and seams that are gone, with a message that says what to do."""
    for allocator, words in (
        (SimpleNamespace(free_pages=torch.arange(3)), "not supported"),
        (_without("alloc_decode"), "has no alloc_decode"),
        (_attached(), "wrapped already"),
    ):
        try:
            PageEvents(allocator, Table())
        except SeamError as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"expected a refusal: {words}")


def _without(name):
    allocator = make_allocator(4, False)
    kind = type(allocator)
    cut = type(kind.__name__, (kind,), {name: None, "__module__": kind.__module__})
    allocator.__class__ = cut
    return allocator


def _attached():
    allocator = make_allocator(4, False)
    PageEvents(allocator, Table())
    return allocator


def listener_failures():
    """SGLang goes on; the events do not."""
    allocator, table = make_allocator(4, False), Table()
    events = PageEvents(allocator, table)
    table.free.clear()  # so that it contradicts what comes
    assert allocator.alloc(4) is not None
    assert isinstance(events.failure, AssertionError)
    told = table.told
    assert allocator.alloc(4) is not None and table.told == told
    events.detach()


def detaching_below_others():
    allocator = make_allocator(4, False)
    events = PageEvents(allocator, Table())
    ours, allocator.alloc = allocator.alloc, lambda size: None
    try:
        events.detach()
    except SeamError as error:
        assert "detach what came later first" in str(error)
    else:
        raise AssertionError("expected a refusal")
    allocator.alloc = ours
    events.detach()
