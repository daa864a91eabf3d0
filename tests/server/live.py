"""Runs the application on a real port, in a thread with its own event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import FastAPI

from interlock.server.serve import listen, make_server


@contextmanager
def live_server(app: FastAPI) -> Iterator[str]:
    """Yields the base URL, without /v1."""
    listener = listen("127.0.0.1", 0)
    server = make_server(app, cut_seconds=1)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
        app.state.context.grammars.close()
        assert not thread.is_alive()
