"""When things happened to one choice, told to the metrics as they come, and to log and traces at its end."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from interlock.engine.messages import AddRequest, TokenDelta
from interlock.logs import fields
from interlock.server.metrics import Metrics
from interlock.server.tracing import TRACE_PARENT, Tracer

_log = logging.getLogger("interlock.requests")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceTimes:
    """One choice that ended. Moments are seconds of ``time.perf_counter``; None where it did not get there.

    Attributes:
        arrival: of the HTTP request.
        submitted: handed to the engine.
        admitted: the scheduler first gave it a place (clocks of two processes are joined by a duration).
        outcome: "stop", "length" and the like, "abort" or "error".
        traceparent: the client's W3C trace context, "" without one.
    """

    request_id: str
    outcome: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    arrival: float
    submitted: float
    admitted: float | None
    first_token: float | None
    last_token: float | None
    ended: float
    traceparent: str = ""

    @property
    def queue_seconds(self) -> float | None:
        return None if self.admitted is None else self.admitted - self.submitted

    @property
    def first_token_seconds(self) -> float | None:
        """From arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def prefill_seconds(self) -> float | None:
        """From admission to the first token."""
        if self.admitted is None or self.first_token is None:
            return None
        return max(0.0, self.first_token - self.admitted)

    @property
    def decode_seconds(self) -> float | None:
        """From the first token to the last."""
        if self.first_token is None or self.last_token is None:
            return None
        return self.last_token - self.first_token

    @property
    def seconds_per_token(self) -> float | None:
        """Of the tokens after the first."""
        decode = self.decode_seconds
        return None if decode is None or self.completion_tokens < 2 else decode / (self.completion_tokens - 1)


class ChoiceClock:
    """Watches the deltas of one choice. Exactly one of ``finished``, ``aborted``, ``failed`` ends it.

    Args:
        arrival: ``time.perf_counter()`` when the HTTP request came.
    """

    def __init__(self, metrics: Metrics, tracer: Tracer, request: AddRequest, arrival: float) -> None:
        self._metrics = metrics
        self._tracer = tracer
        self._request = request
        self._arrival = arrival
        self._submitted = time.perf_counter()
        self._admitted: float | None = None
        self._first: float | None = None
        self._last: float | None = None
        self._tokens = 0
        self._cached = 0
        metrics.started(len(request.token_ids))

    def saw(self, delta: TokenDelta) -> None:
        self._cached = delta.cached_tokens or self._cached
        if delta.queue_seconds is not None:
            self._admitted = self._submitted + delta.queue_seconds
            self._metrics.queued(delta.queue_seconds)
        if not delta.token_ids:
            return
        now = time.perf_counter()
        if self._last is None:
            self._first = now
            self._metrics.first_token(now - self._arrival)
        else:
            self._metrics.next_tokens(now - self._last, len(delta.token_ids))
        self._last = now
        self._tokens += len(delta.token_ids)

    def finished(self, reason: str, completion_tokens: int) -> None:
        times = self._times(reason, completion_tokens)
        self._metrics.finished(times)
        self._tell(times)

    def aborted(self) -> None:
        self._metrics.aborted()
        self._tell(self._times("abort", self._tokens))

    def failed(self) -> None:
        self._metrics.failed()
        self._tell(self._times("error", self._tokens))

    def _times(self, outcome: str, completion_tokens: int) -> ChoiceTimes:
        return ChoiceTimes(
            request_id=self._request.request_id,
            outcome=outcome,
            prompt_tokens=len(self._request.token_ids),
            cached_tokens=self._cached,
            completion_tokens=completion_tokens,
            arrival=self._arrival,
            submitted=self._submitted,
            admitted=self._admitted,
            first_token=self._first,
            last_token=self._last,
            ended=time.perf_counter(),
            traceparent=TRACE_PARENT.get(),
        )

    def _tell(self, times: ChoiceTimes) -> None:
        self._tracer.record(times)
        if _log.isEnabledFor(logging.INFO):
            told = fields(
                choice=times.request_id,
                outcome=times.outcome,
                prompt_tokens=times.prompt_tokens,
                cached_tokens=times.cached_tokens,
                completion_tokens=times.completion_tokens,
                queue_seconds=_rounded(times.queue_seconds),
                ttft_seconds=_rounded(times.first_token_seconds),
                seconds=_rounded(times.ended - times.arrival),
            )
            _log.info("finished" if times.outcome not in ("abort", "error") else "ended", extra=told)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
