"""Runs the proxy until a signal comes."""

from __future__ import annotations

import asyncio
import sys

import uvicorn
from starlette.types import ASGIApp

from interlock.server.serve import listen


def run(app: ASGIApp, host: str, port: int) -> int:
    """Serve ``app``; returns the exit code.

    Raises:
        StartupError: the address cannot be bound.
    """
    listener = listen(host, port)
    shown = f"[{host}]" if ":" in host else host
    config = uvicorn.Config(app, log_config=None, access_log=False, ws="none", server_header=False)
    print(f"ready: http://{shown}:{listener.getsockname()[1]}", file=sys.stderr, flush=True)
    asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))
    return 0
