"""Prefixes whose keys and values are kept: a tree with one full page of tokens for each node.

A node's key is the exact token ids of its page (their int32 bytes), so a match is never a hash collision.
A node holds a page of the full space, a page of the sliding-window space, or both; its window page may be
evicted earlier than the rest, which leaves a *tombstone* (``window == NO_PAGE``).

References: a request locks every node of its path (``lock``), and those window pages that its window still
covers (``lock_window``). A node with references has only ancestors with references, so every node without
references can be evicted, leaves first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from interlock.kv.pages import Int32s, PageError

NO_PAGE = -1


class Node:
    """One page of one prefix. ``refs``: requests on it; ``window_refs``: those whose window covers it."""

    __slots__ = ("children", "full", "key", "parent", "refs", "stamp", "window", "window_refs")

    def __init__(self, parent: Node | None, key: bytes, full: int, window: int) -> None:
        self.parent = parent
        self.key = key
        self.full = full
        self.window = window
        self.children: dict[bytes, Node] = {}
        self.refs = 0
        self.window_refs = 0
        self.stamp = 0


class PrefixTree:
    """Exact prefix lookup at page granularity, with least-recently-used eviction of both page spaces.

    The tree owns no allocator: whatever it evicts it returns, and the caller gives the pages back.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.root = Node(None, b"", NO_PAGE, NO_PAGE)
        self.root.refs = 1
        self.full_pages = 0
        self.full_idle = 0
        self.window_pages = 0
        self._idle_windows: dict[Node, None] = {}
        self._leaves: list[tuple[int, int, Node]] = []
        self._clock = 0
        self.nodes = 0

    @property
    def window_idle(self) -> int:
        """Window pages that no request's window covers; all of them can be evicted."""
        return len(self._idle_windows)

    def match(self, tokens: Int32s, limit: int) -> list[Node]:
        """The longest path whose pages equal the first pages of int32 ``tokens``, at most ``limit`` pages."""
        size = self.page_size
        pages = min(limit, len(tokens) // size)
        if pages <= 0:
            return []
        data = tokens[: pages * size].tobytes()
        width = size * tokens.itemsize
        node = self.root
        path: list[Node] = []
        for start in range(0, pages * width, width):
            child = node.children.get(data[start : start + width])
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def extend(self, parent: Node, key: bytes, full: int, window: int) -> tuple[Node, bool]:
        """The child of ``parent`` for ``key``, locked for the caller, and whether it was created with the
        given pages. When it existed, the given pages stay the caller's."""
        node = parent.children.get(key)
        created = node is None
        if node is None:
            if parent.refs == 0:
                raise PageError("a prefix may only be extended by a request that holds it")
            node = Node(parent, key, full, window)
            parent.children[key] = node
            self.nodes += 1
            if full != NO_PAGE:
                self.full_pages += 1
                self.full_idle += 1
            if window != NO_PAGE:
                self.window_pages += 1
                self._idle_windows[node] = None
        self.lock(node)
        return node, created

    def donate_window(self, node: Node, window: int) -> None:
        """Put a window page where a tombstone is."""
        if node.window != NO_PAGE:
            raise PageError("the node already has a window page")
        node.window = window
        self.window_pages += 1
        self._idle_windows[node] = None

    def lock(self, node: Node) -> None:
        node.refs += 1
        if node.refs == 1 and node.full != NO_PAGE:
            self.full_idle -= 1

    def unlock(self, node: Node) -> None:
        """Drop one reference. Paths are unlocked from their deepest node upwards."""
        if node.refs == 0:
            raise PageError("a prefix node is unlocked more often than it was locked")
        node.refs -= 1
        if node.refs:
            return
        self._clock += 1
        node.stamp = self._clock
        if node.full != NO_PAGE:
            self.full_idle += 1
        self._when_idle(node)

    def lock_window(self, node: Node) -> None:
        if node.window == NO_PAGE:
            raise PageError("the window page of a tombstone cannot be locked")
        node.window_refs += 1
        if node.window_refs == 1:
            del self._idle_windows[node]

    def unlock_window(self, node: Node) -> None:
        if node.window_refs == 0:
            raise PageError("a window page is unlocked more often than it was locked")
        node.window_refs -= 1
        if node.window_refs == 0:
            self._idle_windows[node] = None

    def evict_leaf(self) -> Node | None:
        """Remove the least recently used leaf without references; its pages become the caller's."""
        while self._leaves:
            stamp, _, node = heapq.heappop(self._leaves)
            if self._is_evictable(node) and node.stamp == stamp:
                self._remove(node)
                return node
        return None

    def evict_window(self) -> int:
        """Take the least recently used idle window page, leaving a tombstone; ``NO_PAGE`` if none is idle."""
        node = next(iter(self._idle_windows), None)
        if node is None:
            return NO_PAGE
        del self._idle_windows[node]
        page, node.window = node.window, NO_PAGE
        self.window_pages -= 1
        if node.full == NO_PAGE:
            self._when_idle(node)
        return page

    def discard(self, node: Node) -> bool:
        """Remove ``node`` now if it is an unreferenced leaf; its pages become the caller's."""
        if not self._is_evictable(node):
            return False
        self._remove(node)
        return True

    def walk(self) -> Iterator[Node]:
        """All nodes, in no order (for invariant checks)."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _is_evictable(self, node: Node) -> bool:
        return (
            node.refs == 0
            and not node.children
            and node.parent is not None
            and node.parent.children.get(node.key) is node
        )

    def _when_idle(self, node: Node) -> None:
        """Queue an idle leaf for eviction; remove it, and ancestors like it, when it holds no page at all."""
        while node.refs == 0 and not node.children and node.parent is not None:
            if node.full != NO_PAGE:
                self._queue(node)
                return
            if node.window != NO_PAGE:
                return
            parent = node.parent
            if parent.children.get(node.key) is not node:
                return
            del parent.children[node.key]
            self.nodes -= 1
            node = parent

    def _queue(self, node: Node) -> None:
        if len(self._leaves) > 2 * self.nodes + 64:
            self._leaves = [
                entry for entry in self._leaves if self._is_evictable(entry[2]) and entry[2].stamp == entry[0]
            ]
            heapq.heapify(self._leaves)
        heapq.heappush(self._leaves, (node.stamp, id(node), node))

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        self.nodes -= 1
        if node.full != NO_PAGE:
            self.full_pages -= 1
            self.full_idle -= 1
        if node.window != NO_PAGE:
            if node.window_refs:
                raise PageError("a window page in use is evicted")
            self.window_pages -= 1
            del self._idle_windows[node]
        self._when_idle(parent)


def first_visible_page(position: int, window: int, page_size: int) -> int:
    """First page that a query at ``position`` reads when it sees ``window`` keys including its own."""
    return max(0, position - window + 1) // page_size


def usable_pages(path: Sequence[Node], window: int, page_size: int) -> int:
    """How many pages of a matched path can be reused by a model whose widest window is ``window`` keys.

    The deepest boundary b such that every page that the query at position ``b * page_size`` sees through
    the window still has its window page. Recomputing only the last window tokens would not be exact: the
    receptive field of stacked window layers is wider than one window.
    """
    run = 0
    best = 0
    for index, node in enumerate(path):
        run = run + 1 if node.window != NO_PAGE else 0
        boundary = index + 1
        if run >= boundary - first_visible_page(boundary * page_size, window, page_size):
            best = boundary
    return best
