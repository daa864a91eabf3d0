"""The page allocator against a plain set."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.kv.pages import PageAllocator, PageError


@given(total=st.integers(0, 30), sizes=st.lists(st.integers(-10, 10), max_size=60))
def test_taking_and_giving_matches_a_set(total: int, sizes: list[int]) -> None:
    pages = PageAllocator(total)
    held: list[int] = []
    for size in sizes:
        if size >= 0 and size <= pages.free:
            taken = pages.take(size).tolist()
            assert len(taken) == size
            assert not set(taken) & set(held)
            held += taken
        elif size < 0 and held:
            back, held = held[:-size], held[-size:]
            if len(back) == 1:
                pages.give_one(back[0])
            else:
                pages.give(np.array(back, dtype=np.int32))
        assert pages.free_pages() == set(range(total)) - set(held)
        assert pages.free == total - len(held)
        assert pages.used == len(held)


def test_more_than_free_is_refused_and_changes_nothing() -> None:
    pages = PageAllocator(3)
    pages.take(2)
    with pytest.raises(PageError, match=r"2 pages were asked for and 1 of 3"):
        pages.take(2)
    assert pages.free == 1


@pytest.mark.parametrize("bad", [[0, 0], [0, 5], [-1], [1]])
def test_double_free_is_detected(bad: list[int]) -> None:
    """F25: a page that is not in use, or twice in one call, cannot be given back."""
    pages = PageAllocator(4)
    assert pages.take(1).tolist() == [0]
    with pytest.raises(PageError):
        pages.give(np.array(bad, dtype=np.int32))
    assert pages.free == 3
    if len(bad) == 1:
        with pytest.raises(PageError):
            pages.give_one(bad[0])


def test_negative_total_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 pages"):
        PageAllocator(-1)
