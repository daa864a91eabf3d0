"""The pages of one page space: which are free, which are in use. Knows nothing of tokens or tensors."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]


class PageError(RuntimeError):
    """A broken invariant of the page bookkeeping: an engine bug, never a user's mistake."""


class PageAllocator:
    """A stack of free page ids ``0 .. total-1`` with double-free detection.

    Taking and giving back one page is O(1); n pages cost one numpy slice.
    """

    def __init__(self, total: int) -> None:
        if total < 0:
            raise ValueError(f"a page space cannot have {total} pages")
        self.total = total
        self._stack: Int32s = np.arange(total - 1, -1, -1, dtype=np.int32)
        self._free = total
        self._used = np.zeros(total, dtype=np.bool_)

    @property
    def free(self) -> int:
        return self._free

    @property
    def used(self) -> int:
        return self.total - self._free

    def take(self, count: int) -> Int32s:
        """``count`` page ids, int32 [count]. Raises ``PageError`` when fewer are free."""
        if count > self._free:
            raise PageError(f"{count} pages were asked for and {self._free} of {self.total} are free")
        pages = self._stack[self._free - count : self._free].copy()
        self._free -= count
        self._used[pages] = True
        return pages

    def give(self, pages: Int32s) -> None:
        """Give back distinct pages. Raises ``PageError`` for a page that is not in use."""
        count = len(pages)
        if not count:
            return
        if (
            pages.min() < 0
            or pages.max() >= self.total
            or not self._used[pages].all()
            or len(np.unique(pages)) != count
        ):
            raise PageError(f"pages {pages.tolist()} are not all distinct and in use")
        self._used[pages] = False
        self._stack[self._free : self._free + count] = pages
        self._free += count

    def give_one(self, page: int) -> None:
        """Give back one page. Raises ``PageError`` when it is not in use."""
        if page < 0 or not self._used[page]:
            raise PageError(f"page {page} is given back but is not in use")
        self._used[page] = False
        self._stack[self._free] = page
        self._free += 1

    def free_pages(self) -> set[int]:
        """The free page ids (for invariant checks; O(total))."""
        return set(self._stack[: self._free].tolist())
