"""Requests on their way to one replica: those of one moment travel together.

Prompts that a client hands over at once (a list, several choices) are submitted in one turn of the event
loop. As one message they reach an idle scheduler together and share its first prefill step, where the first
of several messages would have had that step to itself. Nothing waits: the message leaves in the loop's next
turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from interlock.engine.messages import AddRequest, AddRequests

MOST_TOKENS = 1 << 17
"""Prompt tokens of one message; a rank reads a message of this size in a few milliseconds."""


class Outbox:
    """Collects requests for one replica. Belongs to the event loop that calls ``add``.

    Args:
        send: sends a message without waiting.
    """

    def __init__(self, send: Callable[[AddRequest | AddRequests], None]) -> None:
        self._send = send
        self._requests: list[AddRequest] = []
        self._tokens = 0

    def add(self, request: AddRequest) -> None:
        """Send ``request`` in the event loop's next turn, with all that are added until then."""
        if not self._requests:
            asyncio.get_running_loop().call_soon(self.flush)
        self._requests.append(request)
        self._tokens += len(request.token_ids)
        if self._tokens >= MOST_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Send what was added, before a message that must come after it."""
        requests, self._requests, self._tokens = self._requests, [], 0
        if len(requests) == 1:
            self._send(requests[0])
        elif requests:
            self._send(AddRequests(tuple(requests)))

    def discard(self) -> None:
        """Forget what was added: nobody is there to read it."""
        self._requests, self._tokens = [], 0
