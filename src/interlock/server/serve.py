"""A listening socket and an HTTP server for an application."""

from __future__ import annotations

import socket
from collections.abc import Generator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from interlock.errors import StartupError
from interlock.listening import listening_socket


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises:
        StartupError: the address cannot be bound.
    """
    try:
        return listening_socket(host, port)
    except socket.gaierror as error:
        raise StartupError(f"--host {host}: {error.strerror or error}") from None
    except OSError as error:
        raise StartupError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; "
            "choose another --port (0 takes a free one)"
        ) from None


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
