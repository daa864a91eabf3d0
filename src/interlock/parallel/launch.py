"""Joining the world of ranks: rendezvous, the default process group, and the groups of this rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from interlock.parallel.topology import Groups, build_groups
from interlock.parallel.torch_group import TorchGroup


@contextmanager
def joined_world(
    *,
    rank: int,
    tp_size: int,
    attn_dp_size: int,
    ep_size: int,
    init_method: str,
    backend: str,
    timeout: float,
) -> Iterator[Groups]:
    """Join the world and leave it at the end.

    Args:
        init_method: torch's rendezvous, such as ``tcp://127.0.0.1:29500``.
        backend: "gloo" or "nccl".
        timeout: seconds that a collective may take before it raises.
    """
    if tp_size == 1:
        yield Groups.single()
        return
    limit = timedelta(seconds=timeout)
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=tp_size, timeout=limit)
    world = tuple(range(tp_size))

    def new_group(ranks: tuple[int, ...]) -> TorchGroup:
        if ranks == world:
            return TorchGroup(dist.group.WORLD)
        return TorchGroup(dist.new_group(list(ranks), timeout=limit))

    try:
        yield build_groups(
            rank=rank, tp_size=tp_size, attn_dp_size=attn_dp_size, ep_size=ep_size, new_group=new_group
        )
    finally:
        dist.destroy_process_group()
