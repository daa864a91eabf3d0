"""The prefix tree: exact matching, locks, eviction order, tombstones and the window rule."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.kv.pages import PageError
from interlock.kv.prefix_tree import NO_PAGE, Node, PrefixTree, first_visible_page, usable_pages

PAGE = 4


def tokens(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def insert(
    tree: PrefixTree, sequence: np.ndarray, first_page: int = 0, *, full: bool = True, window: bool = False
) -> list[Node]:
    """Insert all whole pages of a sequence; the path stays locked."""
    path = []
    parent = tree.root
    for index in range(len(sequence) // tree.page_size):
        key = sequence[index * tree.page_size : (index + 1) * tree.page_size].tobytes()
        page = first_page + index
        parent, _ = tree.extend(parent, key, page if full else NO_PAGE, page if window else NO_PAGE)
        path.append(parent)
    return path


def unlock(tree: PrefixTree, path: list[Node]) -> None:
    for node in reversed(path):
        tree.unlock(node)


def test_locks_protect_a_node_and_its_ancestors() -> None:
    """F14: lock(c) protects a, b and c; evicting everything frees nothing; unlocking twice raises."""
    tree = PrefixTree(PAGE)
    path = insert(tree, np.arange(12, dtype=np.int32))
    assert [node.refs for node in path] == [1, 1, 1]
    assert tree.full_idle == 0
    assert tree.evict_leaf() is None
    tree.lock(path[0])
    unlock(tree, path)
    assert tree.full_idle == 2
    evicted = [tree.evict_leaf(), tree.evict_leaf()]
    assert evicted == [path[2], path[1]]
    assert tree.evict_leaf() is None
    tree.unlock(path[0])
    with pytest.raises(PageError, match="unlocked more often"):
        tree.unlock(path[0])
    assert tree.evict_leaf() is path[0]
    assert tree.full_pages == tree.full_idle == tree.nodes == 0


@pytest.mark.parametrize(("length", "pages"), [(1, 0), (15, 0), (16, 1), (17, 1), (32, 2)])
def test_less_than_a_page_is_a_no_op(length: int, pages: int) -> None:
    """F16: prompts of 1 and 15 tokens leave a tree of page 16 empty; 16 and 17 leave one page."""
    tree = PrefixTree(16)
    sequence = np.arange(length, dtype=np.int32)
    path = insert(tree, sequence)
    assert len(path) == tree.full_pages == pages
    assert tree.match(sequence, 100) == path
    assert tree.match(sequence, 0) == []


def test_match_is_by_exact_tokens_and_respects_the_limit() -> None:
    tree = PrefixTree(PAGE)
    path = insert(tree, tokens(1, 2, 3, 4, 5, 6, 7, 8))
    other = insert(tree, tokens(1, 2, 3, 4, 9, 9, 9, 9), 10)
    assert other[0] is path[0]
    assert tree.match(tokens(1, 2, 3, 4, 9, 9, 9, 9, 1), 9) == other
    assert tree.match(tokens(1, 2, 3, 4, 5, 6, 7, 9), 9) == path[:1]
    assert tree.match(tokens(1, 2, 3, 4, 5, 6, 7, 8), 1) == path[:1]
    assert tree.match(tokens(5, 6, 7, 8), 9) == []


def test_eviction_is_least_recently_used_first_and_leaves_first() -> None:
    tree = PrefixTree(PAGE)
    old = insert(tree, tokens(1, 1, 1, 1, 2, 2, 2, 2), 0)
    new = insert(tree, tokens(3, 3, 3, 3), 10)
    unlock(tree, old)
    unlock(tree, new)
    for node in old:
        tree.lock(node)
    unlock(tree, old)
    order = [tree.evict_leaf() for _ in range(3)]
    assert order == [new[0], old[1], old[0]]


def test_window_pages_are_evicted_alone_and_leave_tombstones() -> None:
    tree = PrefixTree(PAGE)
    path = insert(tree, np.arange(12, dtype=np.int32), window=True)
    tree.lock_window(path[2])
    assert tree.window_idle == 2
    assert [tree.evict_window(), tree.evict_window(), tree.evict_window()] == [0, 1, NO_PAGE]
    assert [node.window for node in path] == [NO_PAGE, NO_PAGE, 2]
    with pytest.raises(PageError, match="tombstone"):
        tree.lock_window(path[0])
    tree.donate_window(path[0], 7)
    with pytest.raises(PageError, match="already"):
        tree.donate_window(path[0], 8)
    tree.unlock_window(path[2])
    with pytest.raises(PageError, match="unlocked more often"):
        tree.unlock_window(path[2])
    assert tree.window_idle == tree.window_pages == 2


def test_a_window_only_tree_forgets_branches_without_pages() -> None:
    """Without a full space, a leaf whose window page is gone is removed, and so are its empty ancestors."""
    tree = PrefixTree(PAGE)
    path = insert(tree, np.arange(12, dtype=np.int32), full=False, window=True)
    unlock(tree, path)
    assert tree.evict_window() == 0
    assert tree.nodes == 3
    assert [tree.evict_window(), tree.evict_window()] == [1, 2]
    assert tree.nodes == 0
    path = insert(tree, np.arange(12, dtype=np.int32), full=False, window=True)
    while tree.evict_window() != NO_PAGE:
        pass
    assert tree.nodes == 3
    unlock(tree, path)
    assert tree.nodes == 0


@given(window=st.integers(1, 40), page=st.integers(1, 9), alive=st.lists(st.booleans(), max_size=24))
def test_usable_pages_is_the_deepest_boundary_with_a_whole_window(
    window: int, page: int, alive: list[bool]
) -> None:
    """E09, against brute force over positions."""
    path = [Node(None, b"", index, index if here else NO_PAGE) for index, here in enumerate(alive)]
    best = 0
    for boundary in range(1, len(path) + 1):
        query = boundary * page
        seen = range(max(0, query - window + 1), query)
        if all(alive[position // page] for position in seen):
            best = boundary
    assert usable_pages(path, window, page) == best


@given(position=st.integers(0, 300), window=st.integers(1, 130), page=st.sampled_from([1, 4, 16, 64]))
def test_frontier_frees_nothing_visible_and_keeps_no_page_too_many(
    position: int, window: int, page: int
) -> None:
    """E08: the first page kept holds the oldest key that the query at ``position`` sees."""
    first = first_visible_page(position, window, page)
    oldest = max(0, position - window + 1)
    assert first * page <= oldest < (first + 1) * page


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1 << 30))
def test_random_inserts_locks_and_evictions_match_a_plain_model(seed: int) -> None:
    """F25: a set of (path of keys) with counts, over random operations on a tree with two page spaces."""
    rng = random.Random(seed)
    tree = PrefixTree(2)
    held: list[list[Node]] = []
    next_page = 0
    for _ in range(150):
        match rng.choice(["insert", "insert", "hit", "release", "evict", "window"]):
            case "insert":
                sequence = tokens(*(rng.randrange(2) for _ in range(rng.randrange(12))))
                held.append(insert(tree, sequence, next_page, window=True))
                next_page += len(held[-1])
            case "hit":
                path = tree.match(tokens(*(rng.randrange(2) for _ in range(12))), rng.randrange(7))
                for node in path:
                    tree.lock(node)
                held.append(path)
            case "release" if held:
                unlock(tree, held.pop(rng.randrange(len(held))))
            case "evict":
                idle = tree.full_idle
                node = tree.evict_leaf()
                assert (node is None) == (idle == 0)
                assert node is None or not any(node in path for path in held)
            case "window":
                tree.evict_window()
        nodes = list(tree.walk())
        assert len({id(node) for node in nodes}) == len(nodes) == tree.nodes
        for node in nodes:
            assert node.refs == sum(node in path for path in held)
            assert node.parent is tree.root or node.parent in nodes
        assert tree.full_idle == sum(not node.refs for node in nodes)
        assert tree.window_pages == sum(node.window != NO_PAGE for node in nodes)
