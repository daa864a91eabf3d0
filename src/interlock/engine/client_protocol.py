"""What a front end (HTTP server, offline class) needs from an engine, as a structural type.

``engine/client.py`` implements it over ZeroMQ; tests implement it with scripted tokens.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from interlock.engine.load_history import LoadHistory
from interlock.engine.messages import AddRequest, SchedulerStats, TokenDelta
from interlock.plan.launch_plan import LaunchPlan


class EngineClient(Protocol):
    """Handle on a running engine. All methods are called from one asyncio event loop.

    Attributes:
        plan: the launch plan that the engine was built from.
        receipts: rank -> plan item -> what that rank observed.
        history: load of the last minutes.
    """

    plan: LaunchPlan
    history: LoadHistory
    receipts: dict[int, dict[str, object]]

    def stream(self, request: AddRequest) -> AsyncIterator[TokenDelta]:
        """Submit ``request`` and yield its deltas until one carries a ``finish_reason``.

        ``request.request_id`` must be unique among live requests and ``request.sampling.n`` must be 1.
        The request is submitted at the first ``__anext__``. Leaving early does not abort: call ``abort``
        first, because a cancelled or closed stream may have forgotten the request already.

        Raises:
            EngineDeadError: the engine is dead, or dies before the last delta.
            RequestError: the engine refuses the request.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """Ask for the end of a request. Idempotent; unknown and finished ids are ignored."""
        ...

    async def flush_cache(self) -> None:
        """Drop every cached prefix no running request uses, before any request submitted later starts."""
        ...

    def health(self) -> str | None:
        """None while the engine steps or idles as it should, else why it does not. Never blocks."""
        ...

    def stats(self) -> tuple[SchedulerStats, ...]:
        """Latest counters of each replica's scheduler. Never blocks."""
        ...
