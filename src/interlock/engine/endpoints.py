"""Where the front end and the ranks find each other, and what a rank process is told when it starts."""

from __future__ import annotations

import ipaddress
import secrets
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from interlock.errors import StartupError
from interlock.parallel.store_address import StoreAddress, split_address
from interlock.plan.launch_plan import LaunchPlan


class Endpoints(msgspec.Struct, frozen=True, kw_only=True):
    """ZeroMQ addresses. The front end binds all of them; ranks and the launchers of other nodes connect.

    Attributes:
        inputs: one address for each attention replica; its leader reads requests there.
        outputs: one address that every rank writes to.
        news: where launchers of other ranks hear how the engine ended.
    """

    inputs: tuple[str, ...]
    outputs: str
    news: str


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank process reads from its standard input.

    Attributes:
        store: unused in a world of one.
        endpoints: known to ranks beside the front end; the others get them through the store.
        reports: address of the launcher, on nodes without the front end.
        ranks_on_node: ranks of this node, consecutive ones.
        stacks: file descriptor that takes the rank's Python stacks when it is asked for them; -1 for none.
        begun: when the process was started, on this machine's monotonic clock; None where nobody counts.
    """

    plan: LaunchPlan
    rank: int
    store: StoreAddress
    endpoints: Endpoints | None
    reports: str = ""
    ranks_on_node: int = 1
    stacks: int = -1
    begun: float | None = None


class Linked(msgspec.Struct, frozen=True, tag="linked"):
    """A rank tells its launcher where the front end is."""

    endpoints: Endpoints


@dataclass(frozen=True, slots=True)
class Place:
    """Which ranks this process starts, and how they find the others.

    Attributes:
        ranks: consecutive global ranks.
        ranks_on_node: ranks of this node, also those that other processes start.
        node_rank: this node's number.
        store: None takes a free port of this machine.
    """

    ranks: range
    ranks_on_node: int
    node_rank: int
    store: StoreAddress | None

    @staticmethod
    def of(plan: LaunchPlan) -> Place:
        """All ranks of this node: ``tp_size / nnodes`` consecutive ones."""
        each = plan.tp_size // plan.nnodes
        first = plan.node_rank * each
        return Place(
            ranks=range(first, first + each),
            ranks_on_node=each,
            node_rank=plan.node_rank,
            store=StoreAddress(address=plan.dist_init) if plan.dist_init else None,
        )

    @property
    def is_first(self) -> bool:
        """Whether the front end runs in this process."""
        return 0 in self.ranks

    def resolved_store(self) -> StoreAddress:
        """The store's address, with a free port of this machine where none was given."""
        return self.store or StoreAddress(address=f"127.0.0.1:{free_ports('127.0.0.1', 1)[0]}")


def local_endpoints(replicas: int, directory: Path) -> Endpoints:
    """Unix sockets in ``directory``, which only this user may enter."""
    return Endpoints(
        inputs=tuple(f"ipc://{directory}/in{replica}" for replica in range(replicas)),
        outputs=f"ipc://{directory}/out",
        news=f"ipc://{directory}/news",
    )


def network_endpoints(replicas: int, address: str) -> Endpoints:
    """TCP sockets on the host of ``address`` (host:port), for ranks on several nodes; free ports are chosen.

    Raises:
        StartupError: the host is not an address of this machine, or other machines cannot reach it.
    """
    host = own_address(address)
    shown = f"[{host}]" if ":" in host else host
    *inputs, outputs, news = (f"tcp://{shown}:{port}" for port in free_ports(host, replicas + 2))
    return Endpoints(inputs=tuple(inputs), outputs=outputs, news=news)


def own_address(address: str) -> str:
    """The numeric address of this machine that ``address`` (host:port) names.

    Raises:
        StartupError: it is not this machine's, or a name that other machines would resolve otherwise.
    """
    host, port = split_address(address)
    try:
        numeric = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise StartupError(
            f"--dist-init {address}: {host} has no address here: {error.strerror or error}"
        ) from None
    is_name = host not in (numeric, "localhost")
    if is_name and ipaddress.ip_address(numeric).is_loopback:
        raise StartupError(
            f"--dist-init {address}: {host} is {numeric} on this machine, which other machines cannot reach; "
            "give the address of its network interface"
        )
    try:
        free_ports(numeric, 1)
    except OSError as error:
        raise StartupError(
            f"--dist-init {address}: cannot listen on {numeric}, and this is the first node: "
            f"{error.strerror or error}; give an address of this machine, on every node the same"
        ) from None
    return numeric


def free_ports(host: str, count: int) -> list[int]:
    """``count`` distinct free TCP ports of ``host``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sockets = [socket.socket(family, socket.SOCK_STREAM) for _ in range(count)]
    try:
        for each in sockets:
            each.bind((host, 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def socket_directory() -> Path:
    """A fresh directory for Unix sockets, with a short name (their paths are limited to about 100 bytes)."""
    return Path(tempfile.mkdtemp(prefix=f"interlock-{secrets.token_hex(2)}-"))
