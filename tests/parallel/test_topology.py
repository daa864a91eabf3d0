"""The groups of a world partition it, and rank order inside each is ascending."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from interlock.parallel.group import SingleGroup
from interlock.parallel.topology import build_groups, partitions


@dataclass
class RecordedGroup(SingleGroup):
    ranks: tuple[int, ...] = ()


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, int, int]:
    tp_size = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]))
    divisors = [d for d in range(1, tp_size + 1) if tp_size % d == 0]
    return tp_size, draw(st.sampled_from(divisors)), draw(st.sampled_from(divisors))


@given(worlds())
def test_every_kind_of_group_partitions_the_world(world: tuple[int, int, int]) -> None:
    tp_size, attn_dp_size, ep_size = world
    kinds = partitions(tp_size=tp_size, attn_dp_size=attn_dp_size, ep_size=ep_size)
    for groups in kinds.values():
        assert sorted(rank for group in groups for rank in group) == list(range(tp_size))
        assert all(list(group) == sorted(group) for group in groups)
    assert {len(group) for group in kinds["attn_dp"]} == {attn_dp_size}
    assert {len(group) for group in kinds["ep"]} == {ep_size}


@given(worlds())
def test_all_ranks_create_the_same_groups_in_the_same_order(world: tuple[int, int, int]) -> None:
    tp_size, attn_dp_size, ep_size = world
    orders = []
    for rank in range(tp_size):
        created: list[tuple[int, ...]] = []

        def new_group(ranks: tuple[int, ...], created: list[tuple[int, ...]] = created) -> RecordedGroup:
            created.append(ranks)
            return RecordedGroup(ranks)

        groups = build_groups(
            rank=rank, tp_size=tp_size, attn_dp_size=attn_dp_size, ep_size=ep_size, new_group=new_group
        )
        orders.append(tuple(created))
        for kind in ("world", "attn_tp", "attn_dp", "ep", "experts_tp"):
            group = getattr(groups, kind)
            assert not isinstance(group, RecordedGroup) or rank in group.ranks
    assert len(set(orders)) == 1
    assert len(set(orders[0])) == len(orders[0])
