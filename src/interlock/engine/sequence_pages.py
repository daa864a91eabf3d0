"""The pages of admitted sequences: reuse, growth, publishing to the prefix tree, the window's edge, release.

Ownership of a sequence's page i moves exactly once: it is the sequence's own until the step that filled it
is committed, then it belongs to prefix-tree node ``path[i]`` (when the prefix cache is on) and the sequence
holds references. So pages of index ``< len(path)`` are never freed by the sequence, the others always are.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from interlock.engine.request import Request, State
from interlock.engine.slots import SlotTable
from interlock.kv.pages import Int32s
from interlock.kv.prefix_tree import NO_PAGE, Node
from interlock.kv.store import PageStore

Int64s = npt.NDArray[np.int64]


class SequencePages:
    """Moves pages between a ``PageStore`` and the rows of a ``SlotTable``."""

    def __init__(self, store: PageStore, table: SlotTable) -> None:
        self.store = store
        self.table = table
        self.geometry = store.geometry

    def adopt(self, request: Request, path: list[Node]) -> None:
        """Start a sequence on a matched prefix: lock it and fill the page tables."""
        table, slot = self.table, request.slot
        tree = self.store.tree
        hit = len(path)
        first = self.geometry.first_visible(hit * self.geometry.page_size)
        if hit:
            assert tree is not None
            for node in path:
                tree.lock(node)
            if table.full is not None:
                table.full[slot, :hit] = [node.full for node in path]
            if table.window is not None:
                for index in range(first, hit):
                    tree.lock_window(path[index])
                    table.window[slot, index] = path[index].window
        request.path = path
        table.pages[slot] = hit
        table.computed[slot] = hit * self.geometry.page_size
        table.first_window[slot] = min(first, hit)

    def grow(self, slot: int, count: int) -> None:
        """Append ``count`` pages in every space; the caller has checked that they are available."""
        table = self.table
        start = int(table.pages[slot])
        if table.full is not None:
            table.full[slot, start : start + count] = self.store.take_full(count)
        if table.window is not None:
            table.window[slot, start : start + count] = self.store.take_window(count)
        table.pages[slot] = start + count

    def grow_to(self, slots: Int64s, page: Int64s) -> bool:
        """Append the page of index ``page``, int64 like ``slots``, where a slot lacks it; False, without a
        change, when pages are short."""
        table = self.table
        growing = page >= table.pages[slots]
        count = int(np.count_nonzero(growing))
        if count > self.store.available():
            return False
        if count:
            rows, pages = slots[growing], page[growing]
            if table.full is not None:
                table.full[rows, pages] = self.store.take_full(count)
            if table.window is not None:
                table.window[rows, pages] = self.store.take_window(count)
            table.pages[rows] += 1
        return True

    def reserve(self, slot: int, count: int, first_window: int) -> None:
        """Append ``count`` pages that another server will fill, in the window space only those of index
        ``first_window`` and later; the caller has checked that they are available."""
        table = self.table
        start = int(table.pages[slot])
        end = start + count
        if table.full is not None:
            table.full[slot, start:end] = self.store.take_full(count)
        if table.window is not None:
            seen = min(max(start, first_window), end)
            table.window[slot, seen:end] = self.store.take_window(end - seen)
            table.first_window[slot] = max(int(table.first_window[slot]), min(first_window, end))
        table.pages[slot] = end

    def publish(self, request: Request) -> None:
        """Give the pages that are now completely computed to the prefix tree.

        Where another request has published the same tokens meanwhile, the page table is turned to the
        canonical page first and the duplicate is freed afterwards.
        """
        tree, slot = self.store.tree, request.slot
        if tree is None:
            return
        size = self.geometry.page_size
        tokens = self.table.tokens
        for index in range(len(request.path), int(self.table.computed[slot]) // size):
            parent = request.path[-1] if request.path else tree.root
            full = NO_PAGE if self.table.full is None else int(self.table.full[slot, index])
            window = NO_PAGE if self.table.window is None else int(self.table.window[slot, index])
            key = tokens[slot, index * size : (index + 1) * size].tobytes()
            node, created = tree.extend(parent, key, full, window)
            if not created:
                self._use_canonical(slot, index, node)
            if window != NO_PAGE:
                tree.lock_window(node)
            request.path.append(node)

    def _use_canonical(self, slot: int, index: int, node: Node) -> None:
        table, store = self.table, self.store
        if table.full is not None:
            assert store.full is not None
            mine = int(table.full[slot, index])
            table.full[slot, index] = node.full
            store.full.give_one(mine)
        if table.window is not None and table.window[slot, index] != NO_PAGE:
            assert store.window is not None
            assert store.tree is not None
            mine = int(table.window[slot, index])
            if node.window == NO_PAGE:
                store.tree.donate_window(node, mine)
            else:
                table.window[slot, index] = node.window
                store.window.give_one(mine)

    def decoded(self, requests: tuple[Request, ...], slots: Int64s) -> None:
        """One more token of each of ``slots`` is in the cache: publish the pages that it filled, let go of
        those that its window left. Requests that ended meanwhile keep theirs for ``release``."""
        table = self.table
        computed = table.length[slots]
        table.computed[slots] = computed
        if self.store.tree is not None:
            for index in np.flatnonzero(computed % self.geometry.page_size == 0).tolist():
                if requests[index].state is State.DECODING:
                    self.publish(requests[index])
        if self.geometry.window is not None:
            first = np.maximum(0, computed - self.geometry.window + 1) // self.geometry.page_size
            for index in np.flatnonzero(first > table.first_window[slots]).tolist():
                if requests[index].state is State.DECODING:
                    self.drop_behind_window(requests[index])

    def drop_behind_window(self, request: Request) -> None:
        """Let go of the window pages that no later token of the sequence can see."""
        table, slot = self.table, request.slot
        if table.window is None:
            return
        self.drop_before(request, self.geometry.first_visible(int(table.computed[slot])))

    def drop_before(self, request: Request, first: int) -> None:
        """Let go of window pages of index below ``first``."""
        table, slot = self.table, request.slot
        start = int(table.first_window[slot])
        if table.window is None or first <= start:
            return
        self._let_go(request, start, first)
        table.window[slot, start:first] = NO_PAGE
        table.first_window[slot] = first

    def release(self, request: Request, *, spoilt: bool = False) -> None:
        """Let go of everything. ``spoilt``: what only this sequence has published is dropped too."""
        table, store, slot = self.table, self.store, request.slot
        pages, own = int(table.pages[slot]), len(request.path)
        if table.window is not None:
            self._let_go(request, int(table.first_window[slot]), pages)
        if table.full is not None:
            assert store.full is not None
            store.full.give(table.full[slot, own:pages])
        if store.tree is not None:
            for node in reversed(request.path):
                store.tree.unlock(node)
            if spoilt:
                store.forget(request.path)
        request.path = []

    def _let_go(self, request: Request, start: int, end: int) -> None:
        """Window pages ``start : end``: unlock published ones, free own ones."""
        assert self.table.window is not None
        assert self.store.window is not None
        own = min(max(start, len(request.path)), end)
        if self.store.tree is not None:
            for node in request.path[start:own]:
                self.store.tree.unlock_window(node)
        mine: Int32s = self.table.window[request.slot, own:end]
        self.store.window.give(mine)
