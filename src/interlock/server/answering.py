"""From a checked request to its HTTP response, the same way for every endpoint that generates."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from interlock.server.chunks import DONE
from interlock.server.disconnect import until_disconnect
from interlock.server.event_stream import EventStream
from interlock.server.generation import Generation


class PreparedAnswer(Protocol):
    """A request of which everything that can be refused has been: it only has to run.

    Attributes:
        generation: its choices.
    """

    generation: Generation

    def whole(self) -> Coroutine[Any, Any, bytes]:
        """Run to the end; the answer as JSON."""

    def chunks(self) -> AsyncIterator[bytes]:
        """Run; the answer as server-sent events, without the last one of the stream."""


async def respond(
    request: Request, answer: PreparedAnswer, *, stream: bool | None, last: bytes = DONE
) -> Response:
    """Run ``answer``; a client that goes away ends it.

    Args:
        last: closes a stream.
    """
    abort = answer.generation.abort
    if stream:
        return EventStream(answer.chunks(), on_disconnect=abort, last=last)
    content = await until_disconnect(request.receive, answer.whole(), on_disconnect=abort)
    return Response(content, media_type="application/json")
