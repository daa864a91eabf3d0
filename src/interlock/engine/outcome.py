"""From sampled tokens to the deltas of their requests: appending, stopping, reporting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from interlock.engine.batch import Batch, Int64s
from interlock.engine.messages import TokenDelta, TokenLogprob
from interlock.engine.request import Request, State
from interlock.engine.sampled import SampledTokens
from interlock.engine.slots import SlotTable


def delta(
    request: Request,
    token_ids: tuple[int, ...],
    *,
    logprobs: tuple[TokenLogprob, ...] = (),
    finish_reason: str | None = None,
    stop_token_id: int | None = None,
    error: str | None = None,
    refused: bool = False,
) -> TokenDelta:
    """A delta of ``request``; the first one carries prompt logprobs (when complete) and time queued."""
    scores: tuple[TokenLogprob | None, ...] = ()
    queued = None
    first = not request.told
    if first:
        request.told = True
        queued = request.queue_seconds
        if request.prompt_logprobs is not None and len(request.prompt_logprobs) == request.prompt_len:
            scores = tuple(request.prompt_logprobs)
    return TokenDelta(
        request_id=request.id,
        token_ids=token_ids,
        logprobs=logprobs,
        prompt_logprobs=scores,
        finish_reason=finish_reason,
        stop_token_id=stop_token_id,
        prompt_tokens=request.prompt_len,
        cached_tokens=request.cached_tokens or 0,
        error=error,
        refused=refused,
        queue_seconds=queued,
        chunk_ends=tuple(request.chunk_ends) if first else (),
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """The sampled rows of a step, without those of requests that were aborted while it ran.

    Attributes:
        requests, slots, token_ids, rows: those that got a token; ``rows`` are row numbers in the batch.
        failed: requests whose row has an error, with its text.
    """

    requests: tuple[Request, ...]
    slots: Int64s
    token_ids: Int64s
    rows: npt.NDArray[np.int64]
    logprobs: dict[int, TokenLogprob]
    failed: tuple[tuple[Request, str], ...]

    @classmethod
    def of(cls, batch: Batch, sampled: SampledTokens) -> Outcome:
        requests, token_ids = batch.requests, sampled.token_ids
        rows = np.arange(len(requests), dtype=np.int64)
        if not sampled.errors and all(r.state is not State.FINISHED for r in requests):
            return cls(requests, batch.slots, token_ids, rows, sampled.logprobs, ())
        failed = tuple(
            (requests[row], text)
            for row, text in sampled.errors.items()
            if requests[row].state is not State.FINISHED
        )
        keep = [
            row
            for row, request in enumerate(requests)
            if request.state is not State.FINISHED and row not in sampled.errors
        ]
        return cls(
            requests=tuple(requests[row] for row in keep),
            slots=batch.slots[keep],
            token_ids=token_ids[keep],
            rows=rows[keep],
            logprobs=sampled.logprobs,
            failed=failed,
        )


class StopRules:
    """Appends tokens to the slot table and decides which requests end.

    A request ends with "stop" at an end-of-sequence id (unless ``ignore_eos``) or one of its
    ``stop_token_ids``, once it has ``min_tokens``; else with "length" at ``max_tokens``.
    """

    def __init__(self, table: SlotTable, eos_ids: tuple[int, ...]) -> None:
        self._table = table
        self._eos_ids = np.array(sorted(eos_ids), dtype=np.int64)

    def apply(self, outcome: Outcome) -> Iterator[tuple[Request, TokenDelta]]:
        """Append each token, then yield each request with its delta."""
        table, slots, token_ids = self._table, outcome.slots, outcome.token_ids
        length = table.length[slots]
        table.tokens[slots, length] = token_ids
        table.length[slots] = length + 1
        generated = length + 1 - table.prompt_len[slots]
        stopped = self._stopped(outcome, generated)
        reasons: list[str | None] = [None] * len(slots)
        for index in np.flatnonzero(generated >= table.max_tokens[slots]).tolist():
            reasons[index] = "length"
        for index in np.flatnonzero(stopped).tolist():
            reasons[index] = "stop"
        tokens = token_ids.tolist()
        if outcome.logprobs:
            chosen = [outcome.logprobs.get(row) for row in outcome.rows.tolist()]
        else:
            chosen = [None] * len(tokens)
        for request, token, reason, logprob in zip(outcome.requests, tokens, reasons, chosen, strict=True):
            yield (
                request,
                delta(
                    request,
                    (token,),
                    logprobs=() if logprob is None else (logprob,),
                    finish_reason=reason,
                    stop_token_id=token if reason == "stop" else None,
                ),
            )

    def _stopped(self, outcome: Outcome, generated: Int64s) -> npt.NDArray[np.bool_]:
        table, slots = self._table, outcome.slots
        ended = (outcome.token_ids[:, None] == self._eos_ids).any(axis=1) & ~table.ignore_eos[slots]
        for index in np.flatnonzero(table.has_stop_ids[slots]).tolist():
            ended[index] |= int(outcome.token_ids[index]) in outcome.requests[index].stop_ids
        stopped: npt.NDArray[np.bool_] = ended & (generated >= table.min_tokens[slots])
        return stopped
