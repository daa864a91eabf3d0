"""OpenTelemetry traces: one span for each choice, with its time in queue, prefill and decode below it.

Optional: without ``--otlp-endpoint`` nothing of OpenTelemetry is imported. Names of attributes follow the
semantic conventions for generative AI; a client's ``traceparent`` header becomes the parent.
"""

from __future__ import annotations

import logging
import time
from contextvars import ContextVar
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from interlock.plan.launch_plan import LaunchPlan

if TYPE_CHECKING:
    from interlock.server.choice_times import ChoiceTimes

TRACE_PARENT: ContextVar[str] = ContextVar("interlock_trace_parent", default="")
"""``traceparent`` header of the HTTP request that the current task answers, "" without one."""

TRACES_PATH = "/v1/traces"
FLUSH_MS = 2000
_log = logging.getLogger("interlock.server")


class Tracer(Protocol):
    """Takes choices that ended."""

    def record(self, times: ChoiceTimes) -> None:
        """Never raises and never waits."""
        ...

    def close(self) -> None:
        """Send what is left, within ``FLUSH_MS``."""
        ...


class NoTracer:
    """Traces nothing."""

    def record(self, times: ChoiceTimes) -> None:
        return

    def close(self) -> None:
        return


def open_tracer(plan: LaunchPlan) -> Tracer:
    """The tracer of ``plan.otlp_endpoint``; spans are sent in batches from a thread of their own."""
    if not plan.otlp_endpoint:
        return NoTracer()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter = OTLPSpanExporter(endpoint=traces_url(plan.otlp_endpoint))
    return OtelTracer(plan, BatchSpanProcessor(exporter))


def traces_url(endpoint: str) -> str:
    """``http://host:4318`` -> ``http://host:4318/v1/traces``; an address with a path is taken as it is."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + TRACES_PATH


class OtelTracer:
    """Makes spans of ``ChoiceTimes`` with their true begin and end.

    Args:
        processor: an OpenTelemetry span processor, which gets every span.
    """

    def __init__(self, plan: LaunchPlan, processor: Any) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        resource = Resource.create({"service.name": "interlock", "service.version": version("interlock")})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("interlock.server")
        self._model = plan.served_model_name

    def record(self, times: ChoiceTimes) -> None:
        try:
            self._record(times)
        except Exception:
            _log.exception("traces: a span was not recorded")

    def close(self) -> None:
        self._provider.force_flush(FLUSH_MS)
        self._provider.shutdown()

    def _record(self, times: ChoiceTimes) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        shift = time.time() - time.perf_counter()

        def nanoseconds(moment: float) -> int:
            return int((moment + shift) * 1e9)

        parent = TraceContextTextMapPropagator().extract({"traceparent": times.traceparent})
        span = self._tracer.start_span(
            "interlock.request",
            context=parent,
            kind=trace.SpanKind.SERVER,
            start_time=nanoseconds(times.arrival),
            attributes=self._attributes(times),
        )
        if times.outcome == "error":
            span.set_status(trace.Status(trace.StatusCode.ERROR))
        inside = trace.set_span_in_context(span)
        queued_until = times.admitted if times.admitted is not None else times.ended
        phases = [("queue", times.submitted, queued_until)]
        if times.admitted is not None:
            phases.append(("prefill", times.admitted, times.first_token or times.ended))
        if times.first_token is not None and times.last_token is not None:
            phases.append(("decode", times.first_token, times.last_token))
        for name, begin, end in phases:
            part = self._tracer.start_span(name, context=inside, start_time=nanoseconds(begin))
            part.end(end_time=nanoseconds(max(begin, end)))
        span.end(end_time=nanoseconds(times.ended))

    def _attributes(self, times: ChoiceTimes) -> dict[str, str | int | float]:
        found: dict[str, str | int | float | None] = {
            "gen_ai.system": "interlock",
            "gen_ai.response.model": self._model,
            "gen_ai.request.id": times.request_id,
            "gen_ai.usage.input_tokens": times.prompt_tokens,
            "gen_ai.usage.output_tokens": times.completion_tokens,
            "gen_ai.usage.cached_tokens": times.cached_tokens,
            "gen_ai.response.finish_reason": times.outcome,
            "gen_ai.latency.time_in_queue": times.queue_seconds,
            "gen_ai.latency.time_to_first_token": times.first_token_seconds,
            "gen_ai.latency.e2e": times.ended - times.arrival,
        }
        return {name: value for name, value in found.items() if value is not None}
