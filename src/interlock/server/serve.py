"""Serves an application over HTTP until a signal ends it."""

from __future__ import annotations

import socket

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


def make_server(app: ASGIApp, *, log_level: str = "warning", drain_seconds: float = 30.0) -> uvicorn.Server:
    """A uvicorn server for ``app``. Set ``should_exit`` to end it as a SIGTERM would.

    The first SIGINT or SIGTERM closes the listening socket and lets running requests go on for up to
    ``drain_seconds``; a second SIGINT ends at once.
    """
    config = uvicorn.Config(
        app,
        log_level=log_level,
        access_log=False,
        lifespan="off",
        loop="auto",
        http="httptools",
        ws="none",
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(drain_seconds)),
    )
    return uvicorn.Server(config)


async def serve(
    app: ASGIApp, host: str, port: int, *, log_level: str = "warning", drain_seconds: float = 30.0
) -> None:
    """Serve ``app`` on ``host``:``port`` until SIGINT or SIGTERM; see ``make_server``.

    Run it on the event loop on which the engine client lives.

    Raises:
        StartupError: the address cannot be bound.
    """
    listener = listen(host, port)
    try:
        await make_server(app, log_level=log_level, drain_seconds=drain_seconds).serve(sockets=[listener])
    finally:
        listener.close()
