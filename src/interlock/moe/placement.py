"""Which expert lives on which rank: the one function that loader, dispatchers and planner share."""

from __future__ import annotations


def place(num_experts: int, ranks: int) -> tuple[range, ...]:
    """Contiguous split of ``num_experts`` over ``ranks``; sizes differ by at most one, larger ones first.

    >>> [len(part) for part in place(30, 8)]
    [4, 4, 4, 4, 4, 4, 3, 3]
    """
    if ranks < 1 or num_experts < ranks:
        raise ValueError(f"cannot place {num_experts} experts on {ranks} ranks: each rank needs at least one")
    small, extra = divmod(num_experts, ranks)
    parts = []
    start = 0
    for rank in range(ranks):
        size = small + (rank < extra)
        parts.append(range(start, start + size))
        start += size
    return tuple(parts)
