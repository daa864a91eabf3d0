"""What a rank loop asks of the server's role: who takes requests, and what is told of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from interlock.engine.messages import AddRequest, TokenDelta, TransferStats
from interlock.engine.scheduler import Scheduler

if TYPE_CHECKING:
    from interlock.engine.grammar import GrammarState


class Role(Protocol):
    """One of ``PrefillRole``, ``DecodeRole``, ``AggregatedRole``."""

    def add(self, message: AddRequest, grammar: GrammarState | None = None) -> list[TokenDelta]:
        """Take a request."""

    def abort(self, request_id: str) -> list[TokenDelta] | None:
        """End a request; None when it is in the scheduler's hands, or unknown."""

    def collect(self, deltas: list[TokenDelta]) -> list[TokenDelta]:
        """What of a step's deltas is for the front end now."""

    def turn(self) -> list[TokenDelta]:
        """Once in every turn of the loop: what else there is to tell."""

    def stats(self) -> TransferStats | None:
        """The part in transfers, if this server has one."""


class AggregatedRole:
    """A server that does both phases."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def add(self, message: AddRequest, grammar: GrammarState | None = None) -> list[TokenDelta]:
        if message.meeting is not None:
            text = "bootstrap_room: this server is neither a prefill nor a decode server"
            return [
                TokenDelta(
                    request_id=message.request_id,
                    finish_reason="error",
                    error=text,
                    refused=True,
                    prompt_tokens=len(message.token_ids),
                )
            ]
        return self._scheduler.add(message, grammar=grammar)

    def abort(self, request_id: str) -> list[TokenDelta] | None:
        return None

    def collect(self, deltas: list[TokenDelta]) -> list[TokenDelta]:
        return deltas

    def turn(self) -> list[TokenDelta]:
        return []

    def stats(self) -> TransferStats | None:
        return None
