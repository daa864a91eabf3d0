"""Which ranks talk to which: the groups of one rank, from the sizes in the launch plan.

A world of ``tp_size`` ranks is cut twice. For attention: ``attn_dp_size`` replicas of consecutive ranks
(``attn_tp``), and the ranks that hold the same slice in every replica (``attn_dp``). For experts:
``ep`` joins the ranks that hold different experts, ``experts_tp`` the consecutive ranks that hold slices
of the same experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from interlock.parallel.group import Group, SingleGroup


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups that one rank belongs to."""

    world: Group
    attn_tp: Group
    attn_dp: Group
    ep: Group
    experts_tp: Group

    @staticmethod
    def single() -> Groups:
        """The groups of a world of one rank."""
        one = SingleGroup()
        return Groups(world=one, attn_tp=one, attn_dp=one, ep=one, experts_tp=one)


def consecutive(world: int, size: int) -> list[tuple[int, ...]]:
    """``[0, 1, 2, 3]`` cut into runs of ``size``: ``(0, 1), (2, 3)``."""
    return [tuple(range(start, start + size)) for start in range(0, world, size)]


def strided(world: int, stride: int) -> list[tuple[int, ...]]:
    """Ranks with the same remainder: for stride 2 of a world of 4, ``(0, 2), (1, 3)``."""
    return [tuple(range(first, world, stride)) for first in range(stride)]


def partitions(*, tp_size: int, attn_dp_size: int, ep_size: int) -> dict[str, list[tuple[int, ...]]]:
    """All groups of a world by the names of ``Groups``; the same on every rank."""
    attn_tp, experts_tp = tp_size // attn_dp_size, tp_size // ep_size
    return {
        "world": [tuple(range(tp_size))],
        "attn_tp": consecutive(tp_size, attn_tp),
        "attn_dp": strided(tp_size, attn_tp),
        "ep": strided(tp_size, experts_tp),
        "experts_tp": consecutive(tp_size, experts_tp),
    }


def build_groups(
    *, rank: int, tp_size: int, attn_dp_size: int, ep_size: int, new_group: Callable[[tuple[int, ...]], Group]
) -> Groups:
    """Create the groups of ``rank``.

    ``new_group`` is called for the same member tuples in the same order on every rank, as
    ``torch.distributed.new_group`` demands; groups with equal members are created once.
    """
    members = partitions(tp_size=tp_size, attn_dp_size=attn_dp_size, ep_size=ep_size)
    created: dict[tuple[int, ...], Group] = {}
    for groups in members.values():
        for ranks in groups:
            if len(ranks) > 1 and ranks not in created:
                created[ranks] = new_group(ranks)
    own = {
        name: next((created[ranks] for ranks in groups if rank in ranks and len(ranks) > 1), SingleGroup())
        for name, groups in members.items()
    }
    return Groups(**{field.name: own[field.name] for field in fields(Groups)})
