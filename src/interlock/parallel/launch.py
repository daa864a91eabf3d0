"""Joining the world of ranks: rendezvous, the default process group, and the groups of this rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from interlock.errors import StartupError
from interlock.listening import listening_socket
from interlock.parallel.interface import interface_towards
from interlock.parallel.store_address import StoreAddress
from interlock.parallel.topology import Groups, build_groups
from interlock.parallel.torch_group import TorchGroup

JOIN_SECONDS = 300.0
LOAD_SECONDS = 4 * 3600.0
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""The only way to tell these libraries which interface to use; the default, what the host's own name
resolves to, is the loopback interface on many machines."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """A rank's place in the world and the store through which ranks find each other.

    ``store`` is None in a world of one. ``timeout`` in seconds is that of every collective. ``interface``
    is the network interface that collectives use, None for the library's choice.
    """

    rank: int
    size: int
    timeout: float
    store: Store | None
    interface: str | None = None

    @staticmethod
    def open(
        where: StoreAddress, *, rank: int, size: int, timeout: float, join_timeout: float = JOIN_SECONDS
    ) -> Rendezvous:
        """Connect to the store, or host it on rank 0, on no other address than the one that was given.

        Args:
            join_timeout: seconds to wait for the other ranks, which may be started by hand.

        Raises:
            StartupError: the address cannot be used, or ranks are missing after ``join_timeout``.
        """
        if size == 1:
            return Rendezvous(rank=rank, size=size, timeout=timeout, store=None)
        limit = timedelta(seconds=join_timeout)
        hosts = rank == 0 and not where.hosted_elsewhere
        listener = _listen(where) if hosts else None
        try:
            store: Store = TCPStore(
                where.host,
                where.port,
                None if where.hosted_elsewhere else size,
                is_master=hosts,
                timeout=limit,
                master_listen_fd=listener,
            )
        except RuntimeError as error:
            raise StartupError(_missing(where, hosts, size, join_timeout, error)) from error
        return Rendezvous(
            rank=rank,
            size=size,
            timeout=timeout,
            store=PrefixStore(where.prefix, store),
            interface=interface_towards(where.host, where.port),
        )

    def wait_for_all(self, what: str, timeout: float = LOAD_SECONDS) -> None:
        """Return when every rank has called this with the same ``what``, a name used once in a launch.

        For waits that may take far longer than a collective; who dies meanwhile must be noticed elsewhere.
        """
        if self.store is None:
            return
        self.store.set(f"{what}/{self.rank}", "1")
        everyone = [f"{what}/{rank}" for rank in range(self.size)]
        self.store.wait(everyone, timedelta(seconds=timeout))


def _listen(where: StoreAddress) -> int:
    """File descriptor of a socket that listens on the store's address."""
    try:
        return listening_socket(where.host, where.port).detach()
    except OSError as error:
        raise StartupError(
            f"--dist-init {where.address}: rank 0 cannot listen there: {error.strerror or error}; "
            "choose another port, or an address of this machine"
        ) from None


def _missing(where: StoreAddress, hosts: bool, size: int, seconds: float, error: RuntimeError) -> str:
    if hosts:
        return (
            f"not all of the {size} ranks joined at {where.address} within {seconds:.0f} s "
            f"({str(error).splitlines()[0]}); start every node, each with its own --node-rank"
        )
    return (
        f"--dist-init {where.address}: no answer for {seconds:.0f} s; "
        "is the first node (--node-rank 0) running there, and does a firewall let this port through?"
    )


@contextmanager
def joined_world(
    rendezvous: Rendezvous, *, attn_dp_size: int, ep_size: int, backend: str
) -> Iterator[Groups]:
    """Join the world and leave it at the end. ``backend`` is "gloo" or "nccl"."""
    if rendezvous.store is None:
        yield Groups.single()
        return
    limit = timedelta(seconds=rendezvous.timeout)
    if rendezvous.interface is not None:
        for name in INTERFACE_VARIABLES:
            os.environ.setdefault(name, rendezvous.interface)
    dist.init_process_group(
        backend, store=rendezvous.store, rank=rendezvous.rank, world_size=rendezvous.size, timeout=limit
    )
    world = tuple(range(rendezvous.size))

    def new_group(ranks: tuple[int, ...]) -> TorchGroup:
        if ranks == world:
            assert dist.group.WORLD is not None, "the world was joined"
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
