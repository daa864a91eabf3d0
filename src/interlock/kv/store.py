"""Both page spaces and the prefix tree over them, as the scheduler uses them."""

from __future__ import annotations

from dataclasses import dataclass

from interlock.errors import StartupError
from interlock.kv.pages import Int32s, PageAllocator
from interlock.kv.prefix_tree import NO_PAGE, Node, PrefixTree, first_visible_page, usable_pages
from interlock.plan.launch_plan import LaunchPlan


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the model's layers ask of the page spaces. ``window``: keys seen by the widest sliding-window
    layer including the token itself, None when the model has no such layer."""

    page_size: int
    has_full: bool
    window: int | None
    full_pages: int
    window_pages: int

    @classmethod
    def of(cls, plan: LaunchPlan) -> Geometry:
        windows = [layer.attention.window for layer in plan.card.layers]
        widest = max((w for w in windows if w is not None), default=None)
        return cls(
            page_size=plan.page_size,
            has_full=any(w is None for w in windows),
            window=None if widest is None else widest + plan.sliding_window_extra,
            full_pages=plan.full_pages,
            window_pages=plan.window_pages,
        )

    def pages(self, tokens: int) -> int:
        """Pages that ``tokens`` tokens fill."""
        return -(-tokens // self.page_size)

    def first_visible(self, position: int) -> int:
        """First window page that the query at ``position`` still reads."""
        return 0 if self.window is None else first_visible_page(position, self.window, self.page_size)

    def window_pages_for(self, tokens: int, step: int) -> int:
        """Most window pages that a sequence of ``tokens`` tokens holds when it computes ``step`` at once."""
        if self.window is None:
            return 0
        return min(self.pages(tokens), self.pages(self.window - 1 + step) + 1)

    def check(self) -> None:
        """Raises ``StartupError`` when not even one token could be computed in the given spaces."""
        if self.page_size < 1:
            raise StartupError(f"page_size is {self.page_size}; a page holds at least 1 token")
        if self.has_full and self.full_pages < 1:
            raise StartupError("the model has full-attention layers and full_pages is 0")
        if self.window is not None:
            least = self.pages(self.window) + 1
            if self.window_pages < least:
                raise StartupError(
                    f"window_pages is {self.window_pages}; a window of {self.window} keys in pages of "
                    f"{self.page_size} needs at least {least}"
                )


class PageStore:
    """Allocators of the spaces that the model has, and the prefix tree when the prefix cache is on."""

    def __init__(self, geometry: Geometry, *, prefix_cache: bool) -> None:
        geometry.check()
        self.geometry = geometry
        self.full = PageAllocator(geometry.full_pages) if geometry.has_full else None
        self.window = PageAllocator(geometry.window_pages) if geometry.window is not None else None
        self.tree = PrefixTree(geometry.page_size) if prefix_cache else None

    def full_available(self) -> int:
        """Full pages that are free or can be evicted; a large number when there is no full space."""
        if self.full is None:
            return 1 << 60
        return self.full.free + (self.tree.full_idle if self.tree else 0)

    def window_available(self) -> int:
        """Window pages that are free or can be evicted; a large number when there is no window space."""
        if self.window is None:
            return 1 << 60
        return self.window.free + (self.tree.window_idle if self.tree else 0)

    def available(self) -> int:
        """Pages that can be taken from every space the model has."""
        return min(self.full_available(), self.window_available())

    def take_full(self, count: int) -> Int32s:
        """Take pages, evicting cached prefixes as needed. The caller has checked ``full_available``."""
        assert self.full is not None
        while self.full.free < count and self.tree is not None and (leaf := self.tree.evict_leaf()):
            self._give_back(leaf)
        return self.full.take(count)

    def take_window(self, count: int) -> Int32s:
        """Take pages, evicting cached window pages as needed. The caller has checked ``window_available``."""
        assert self.window is not None
        while self.window.free < count and self.tree is not None:
            page = self.tree.evict_window()
            if page == NO_PAGE:
                break
            self.window.give_one(page)
        return self.window.take(count)

    def match(self, tokens: Int32s, limit_tokens: int) -> list[Node]:
        """Path of the longest prefix of ``tokens`` that can be reused, at most ``limit_tokens`` long."""
        if self.tree is None:
            return []
        path = self.tree.match(tokens, limit_tokens // self.geometry.page_size)
        if self.geometry.window is not None:
            del path[usable_pages(path, self.geometry.window, self.geometry.page_size) :]
        return path

    def flush(self) -> int:
        """Drop every cached prefix that no request uses; returns how many nodes are still in use."""
        if self.tree is None:
            return 0
        while leaf := self.tree.evict_leaf():
            self._give_back(leaf)
        while (page := self.tree.evict_window()) != NO_PAGE:
            assert self.window is not None
            self.window.give_one(page)
        return self.tree.nodes

    def forget(self, path: list[Node]) -> None:
        """Drop the unreferenced end of a path, so that a spoilt sequence is never served again."""
        assert self.tree is not None
        for node in reversed(path):
            if node.refs or node.children:
                return
            if self.tree.discard(node):
                self._give_back(node)

    def _give_back(self, node: Node) -> None:
        if node.full != NO_PAGE:
            assert self.full is not None
            self.full.give_one(node.full)
        if node.window != NO_PAGE:
            assert self.window is not None
            self.window.give_one(node.window)
