"""A listening socket and an HTTP server for an application."""

from __future__ import annotations

import socket
from collections.abc import Generator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from interlock.errors import StartupError

BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises:
        StartupError: the address cannot be bound.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartupError(f"--host {host}: {error.strerror or error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise StartupError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; "
            "choose another --port (0 takes a free one)"
        ) from None
    return listener


class Server(uvicorn.Server):
    """A uvicorn server that leaves signals to whoever runs it."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def make_server(app: ASGIApp, *, cut_seconds: float = 0.0) -> Server:
    """A server for ``app``; run ``serve(sockets=[listener])`` on the event loop of the engine client.

    Set ``should_exit`` to end it: it closes the socket, and cuts what is not answered after ``cut_seconds``.
    Log lines go to the loggers ``uvicorn.*`` without handlers of their own.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        loop="auto",
        http="httptools",
        ws="none",
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=round(cut_seconds),
    )
    return Server(config)
