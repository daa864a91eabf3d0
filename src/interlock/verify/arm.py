"""What ``verify`` compares: an arm scores a text that is given to it, token for token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from interlock.engine.messages import Inspection, TokenLogprob
from interlock.errors import InterlockError
from interlock.plan.launch_plan import LaunchPlan


class ArmError(InterlockError):
    """An arm that could not be started, died, or does not answer as asked (exit code 2)."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One text to score.

    Attributes:
        token_ids: the prompt.
        forced: tokens that follow it, whatever the model prefers; computed in decode steps.
        continuation: greedy tokens to generate when nothing is forced.
        alternatives: best tokens to report at each position beside the text's own.
        score_prompt: score the prompt's tokens too. Without it, a cached prefix may be reused.
        flush: empty the prefix cache first.
        inspection: chunk limit, trace, forced routes; engines started here only.
        turn: engines with several attention replicas take them in turn, so that all are compared.
    """

    token_ids: tuple[int, ...]
    forced: tuple[int, ...] = ()
    continuation: int = 0
    alternatives: int = 5
    score_prompt: bool = True
    flush: bool = True
    inspection: Inspection = field(default_factory=Inspection)
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Scored:
    """A text as one arm scored it.

    Attributes:
        token_ids: prompt and continuation.
        entries: one for each token: its log-probability given those before it; None where it was not scored
            (the first token, and a prompt that was not asked for).
        chunk_ends: where the prefill steps ended, as delivered; empty where the server does not tell.
        cached_tokens: prompt tokens that were found in the prefix cache.
    """

    token_ids: tuple[int, ...]
    prompt_len: int
    entries: tuple[TokenLogprob | None, ...]
    chunk_ends: tuple[int, ...] = ()
    cached_tokens: int = 0

    @property
    def continuation(self) -> tuple[int, ...]:
        return self.token_ids[self.prompt_len :]


class Arm(Protocol):
    """A running engine or server. ``close`` frees it; errors of its calls are ``ArmError``.

    Attributes:
        plan: None for a server of another make.
        receipts: rank -> plan item -> what was observed.
    """

    plan: LaunchPlan | None
    receipts: dict[int, dict[str, object]]

    def score(self, ask: Ask) -> Scored: ...

    def close(self) -> None: ...
