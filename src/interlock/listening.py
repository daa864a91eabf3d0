"""A listening TCP socket, for HTTP and for the store of the ranks."""

from __future__ import annotations

import socket

BACKLOG = 2048


def listening_socket(host: str, port: int) -> socket.socket:
    """Listens on ``host``, a name or an address of either family, and ``port``; 0 takes a free one.

    Raises:
        socket.gaierror: ``host`` cannot be resolved.
        OSError: the address is in use, or not one of this machine.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
