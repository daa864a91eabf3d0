"""Joining the world of ranks: rendezvous, the default process group, and the groups of this rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from interlock.parallel.topology import Groups, build_groups
from interlock.parallel.torch_group import TorchGroup


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """A rank's place in the world and the store through which ranks find each other.

    ``store`` is None in a world of one. ``timeout`` in seconds is also that of every collective.
    """

    rank: int
    size: int
    timeout: float
    store: dist.Store | None

    @staticmethod
    def open(address: str, *, rank: int, size: int, timeout: float) -> Rendezvous:
        """Connect to the store at ``address`` (host:port), which rank 0 hosts."""
        if size == 1:
            return Rendezvous(rank=rank, size=size, timeout=timeout, store=None)
        host, _, port = address.rpartition(":")
        store = dist.TCPStore(host, int(port), size, is_master=rank == 0, timeout=timedelta(seconds=timeout))
        return Rendezvous(rank=rank, size=size, timeout=timeout, store=store)


@contextmanager
def joined_world(
    rendezvous: Rendezvous, *, attn_dp_size: int, ep_size: int, backend: str
) -> Iterator[Groups]:
    """Join the world and leave it at the end. ``backend`` is "gloo" or "nccl"."""
    if rendezvous.store is None:
        yield Groups.single()
        return
    limit = timedelta(seconds=rendezvous.timeout)
    dist.init_process_group(
        backend, store=rendezvous.store, rank=rendezvous.rank, world_size=rendezvous.size, timeout=limit
    )
    world = tuple(range(rendezvous.size))

    def new_group(ranks: tuple[int, ...]) -> TorchGroup:
        if ranks == world:
            return TorchGroup(dist.group.WORLD)
        return TorchGroup(dist.new_group(list(ranks), timeout=limit))

    try:
        yield build_groups(
            rank=rendezvous.rank,
            tp_size=rendezvous.size,
            attn_dp_size=attn_dp_size,
            ep_size=ep_size,
            new_group=new_group,
        )
    finally:
        dist.destroy_process_group()
