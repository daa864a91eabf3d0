"""The verb ``route``."""

from __future__ import annotations

from typing import Annotated

import typer


def route(
    prefill: Annotated[
        list[str], typer.Option(metavar="URL[,PORT]", help="A prefill server and its bootstrap port (8998).")
    ],
    decode: Annotated[list[str], typer.Option(metavar="URL", help="A decode server.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 is any free port.", min=0)] = 8000,
) -> int:
    """Send requests to pairs of prefill and decode servers: a small proxy for development."""
    from interlock.router.app import create_router
    from interlock.router.pool import Pool, parse_backend
    from interlock.router.serve import run

    pools = (
        Pool("prefill", tuple(parse_backend(text, "--prefill") for text in prefill)),
        Pool("decode", tuple(parse_backend(text, "--decode") for text in decode)),
    )
    return run(create_router(*pools), host, port)
