"""Where the front end and the ranks find each other, and what a rank process is told when it starts."""

from __future__ import annotations

import secrets
import socket
import tempfile
from pathlib import Path

import msgspec

from interlock.plan.launch_plan import LaunchPlan


class Endpoints(msgspec.Struct, frozen=True, kw_only=True):
    """ZeroMQ addresses. The front end binds all of them; ranks connect.

    Attributes:
        inputs: one address for each attention replica; its leader reads requests there.
        outputs: one address that every rank writes to.
    """

    inputs: tuple[str, ...]
    outputs: str


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank process reads from its standard input.

    Attributes:
        rendezvous: host:port of the store that rank 0 hosts; unused in a world of one.
        endpoints: known to ranks beside the front end; the others get them through the store.
        ranks_on_node: ranks that this launcher started, consecutive ones.
    """

    plan: LaunchPlan
    rank: int
    rendezvous: str
    endpoints: Endpoints | None
    ranks_on_node: int = 1


def local_endpoints(replicas: int, directory: Path) -> Endpoints:
    """Unix sockets in ``directory``, which only this user may enter."""
    return Endpoints(
        inputs=tuple(f"ipc://{directory}/in{replica}" for replica in range(replicas)),
        outputs=f"ipc://{directory}/out",
    )


def network_endpoints(replicas: int, host: str) -> Endpoints:
    """TCP sockets on ``host``, for ranks on several nodes; free ports are chosen here."""
    addresses = [f"tcp://{host}:{port}" for port in free_ports(host, replicas + 1)]
    return Endpoints(inputs=tuple(addresses[:-1]), outputs=addresses[-1])


def free_ports(host: str, count: int) -> list[int]:
    """``count`` distinct free TCP ports of ``host``."""
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(count)]
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
