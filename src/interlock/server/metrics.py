"""Prometheus metrics of requests. Names follow vLLM's where the meaning is the same, with the prefix
``interlock:``; ``metric_aliases.py`` repeats them under the names of other engines.

``METRIC_NAMES`` is the documented list; a test compares it with what ``/metrics`` exposes. An engine request
(one choice) is counted once as started and once as finished, aborted or failed, so that
started = finished + aborted + failed + live.
No method raises: a fault in the metrics is logged and never reaches a request.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ParamSpec

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric

from interlock.engine.client_protocol import EngineClient
from interlock.plan.launch_plan import LaunchPlan
from interlock.server.engine_metrics import ENGINE_METRIC_NAMES, EngineCollector
from interlock.server.metric_aliases import aliases_of

if TYPE_CHECKING:
    from interlock.server.choice_times import ChoiceTimes

_log = logging.getLogger("interlock.server")
_P = ParamSpec("_P")

_TTFT_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
_ITL_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
)
_E2E_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKEN_BUCKETS = tuple(2**power for power in range(18))

METRIC_NAMES = frozenset(
    {
        *ENGINE_METRIC_NAMES,
        "interlock:requests_started",
        "interlock:request_success",
        "interlock:requests_aborted",
        "interlock:requests_failed",
        "interlock:requests_rejected",
        "interlock:requests_live",
        "interlock:time_to_first_token_seconds",
        "interlock:inter_token_latency_seconds",
        "interlock:e2e_request_latency_seconds",
        "interlock:request_queue_time_seconds",
        "interlock:request_prefill_time_seconds",
        "interlock:request_decode_time_seconds",
        "interlock:request_inference_time_seconds",
        "interlock:request_time_per_output_token_seconds",
        "interlock:request_prompt_tokens",
        "interlock:request_generation_tokens",
    }
)


def plan_digest(plan: LaunchPlan) -> str:
    """Sixteen hex digits that name a plan's content."""
    return hashlib.sha256(msgspec.json.encode(plan)).hexdigest()[:16]


def _never_raises(method: Callable[_P, None]) -> Callable[_P, None]:
    @functools.wraps(method)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            method(*args, **kwargs)
        except Exception:
            _log.exception("metrics: %s failed", method.__name__)

    return guarded


class Metrics:
    """All metrics of one server, in a registry of their own.

    Attributes:
        live: choices that were submitted to the engine and have not ended.
    """

    def __init__(self, engine: EngineClient, model_name: str) -> None:
        self.registry = _Registry()
        labels = {"model_name": model_name}

        def counter(name: str, text: str, *extra: str) -> Counter:
            return Counter(name, text, ["model_name", *extra], registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, ["model_name"], registry=self.registry, buckets=buckets).labels(
                **labels
            )

        self._model_name = model_name
        self._started = counter("interlock:requests_started", "Choices submitted to the engine.").labels(
            **labels
        )
        self._success = counter("interlock:request_success", "Choices that ended.", "finished_reason")
        self._aborted = counter("interlock:requests_aborted", "Choices whose client went away.").labels(
            **labels
        )
        self._failed = counter("interlock:requests_failed", "Choices that the engine failed.").labels(
            **labels
        )
        self._rejected = counter("interlock:requests_rejected", "HTTP requests refused.", "status")
        self.live = 0
        live = Gauge(
            "interlock:requests_live",
            "Choices submitted and not ended.",
            ["model_name"],
            registry=self.registry,
        ).labels(**labels)
        live.set_function(lambda: self.live)
        self._ttft = histogram(
            "interlock:time_to_first_token_seconds", "Arrival to first token.", _TTFT_BUCKETS
        )
        self._itl = histogram(
            "interlock:inter_token_latency_seconds", "Between tokens of a choice.", _ITL_BUCKETS
        )
        self._e2e = histogram("interlock:e2e_request_latency_seconds", "Arrival to last token.", _E2E_BUCKETS)
        self._queue = histogram(
            "interlock:request_queue_time_seconds", "Arrival at the scheduler to admission.", _TTFT_BUCKETS
        )
        self._prefill = histogram(
            "interlock:request_prefill_time_seconds", "Admission to first token.", _TTFT_BUCKETS
        )
        self._decode = histogram(
            "interlock:request_decode_time_seconds", "First token to last token.", _E2E_BUCKETS
        )
        self._inference = histogram(
            "interlock:request_inference_time_seconds", "Admission to last token.", _E2E_BUCKETS
        )
        self._per_token = histogram(
            "interlock:request_time_per_output_token_seconds",
            "Mean time between tokens, of each choice.",
            _ITL_BUCKETS,
        )
        self._prompt = histogram("interlock:request_prompt_tokens", "Prompt length.", _TOKEN_BUCKETS)
        self._generated = histogram("interlock:request_generation_tokens", "Answer length.", _TOKEN_BUCKETS)
        self.registry.register(EngineCollector(engine, model_name, plan_digest(engine.plan)))

    def exposition(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)

    @_never_raises
    def started(self, prompt_tokens: int) -> None:
        self._started.inc()
        self.live += 1
        self._prompt.observe(prompt_tokens)

    @_never_raises
    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    @_never_raises
    def queued(self, seconds: float) -> None:
        self._queue.observe(seconds)

    @_never_raises
    def next_tokens(self, seconds: float, count: int) -> None:
        """``count`` tokens arrived together ``seconds`` after the last ones."""
        for _ in range(count):
            self._itl.observe(seconds / count)

    @_never_raises
    def finished(self, times: ChoiceTimes) -> None:
        self.live -= 1
        self._success.labels(model_name=self._model_name, finished_reason=times.outcome).inc()
        self._e2e.observe(times.ended - times.arrival)
        self._generated.observe(times.completion_tokens)
        for histogram, seconds in (
            (self._prefill, times.prefill_seconds),
            (self._decode, times.decode_seconds),
            (self._per_token, times.seconds_per_token),
        ):
            if seconds is not None:
                histogram.observe(seconds)
        if times.prefill_seconds is not None and times.decode_seconds is not None:
            self._inference.observe(times.prefill_seconds + times.decode_seconds)

    @_never_raises
    def aborted(self) -> None:
        self.live -= 1
        self._aborted.inc()

    @_never_raises
    def failed(self) -> None:
        self.live -= 1
        self._failed.inc()

    @_never_raises
    def rejected(self, status: int) -> None:
        self._rejected.labels(model_name=self._model_name, status=str(status)).inc()


class _Registry(CollectorRegistry):
    """Adds the names of other engines, and leaves out the ``_created`` samples, which no dashboard reads."""

    def collect(self) -> Iterator[Metric]:
        for family in super().collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
            yield from aliases_of(family)
