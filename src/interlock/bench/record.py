"""Evidence of a benchmark run: the plan of every arm, its receipts, the machine, and each number.

Conditions of a measurement are of two kinds. Those in ``MATCHED`` say what was measured: ``compare`` pairs
measurements by them and refuses when one of ``DELIVERED`` differs. The others are there to be read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import httpx
import msgspec

from interlock.bench.decode import DecodeResult, Point, tokens_per_second
from interlock.bench.prefill import PrefillResult
from interlock.bench.routing import RoutingSpread
from interlock.bench.serving.run import ServeResult
from interlock.bench.statistics import percentile
from interlock.evidence.record import (
    device_facts,
    interlock_version,
    model_facts,
    now,
    recorded_arm,
    rehearsal_notes,
)
from interlock.evidence.schema import Arm, DeviceFacts, Evidence, Measurement, ModelFacts, Scalar
from interlock.plan.facts import MachineFacts

MATCHED: Final = (
    "tool", "batch", "chunk_asked", "tokens", "layout", "part", "ranks", "percentile", "arrivals", "rate",
    "concurrency", "input_tokens", "output_tokens", "statistic",
)  # fmt: skip
DELIVERED: Final = (
    "context", "steps", "chunk_delivered", "prompt_tokens", "settle", "hidden", "experts", "top_k",
    "expert_width", "dtype", "endpoint", "prompts", "prefix_cache", "working_set",
)  # fmt: skip


def evidence_of(
    *,
    model: ModelFacts,
    device: DeviceFacts,
    facts: MachineFacts,
    arms: Sequence[Arm],
    measurements: Sequence[Measurement],
    notes: Sequence[str],
    verdict: str = "measured",
) -> Evidence:
    """One evidence file of ``bench``."""
    return Evidence(
        kind="bench",
        created=now(),
        interlock=interlock_version(),
        model=model,
        device=device,
        packages=dict(facts.packages),
        arms=tuple(arms),
        verdict=verdict,
        measurements=tuple(measurements),
        notes=(*rehearsal_notes(arms), *notes),
    )


def decode_evidence(
    result: DecodeResult,
    options: Mapping[str, str],
    facts: MachineFacts,
    spreads: Mapping[str, RoutingSpread | None],
) -> Evidence:
    """Evidence of ``bench decode``. Invalid when an arm never ran at a batch that was asked for."""
    measurements, notes, verdict = [], [f"prompts of random tokens, seed {result.spec.seed}"], "measured"
    notes.append("arms stayed alive together" if result.kept_alive else "one arm was alive at a time")
    for arm, points in result.points.items():
        rates = tokens_per_second(result.figures(arm))
        for batch, point in points.items():
            if point.figure is None:
                verdict = "invalid"
                notes.append(f"{arm} never decoded {batch} sequences at once, but {_instead(point)}")
                continue
            measurements.append(_decode_point(result, arm, point, rates[batch], spreads.get(arm)))
        factor = result.growth(arm)
        if factor is not None:
            figures = result.figures(arm)
            span: dict[str, Scalar] = {"tool": "decode", "from": min(figures), "to": max(figures)}
            measurements.append(
                Measurement(name="decode_growth", arm=arm, value=factor, unit="ratio", conditions=span)
            )
        notes.append(
            f"{arm} generated {result.same_tokens(arm):.1%} of the tokens of {next(iter(result.points))}"
        )
    for cross in result.crossovers():
        certainty = "the spreads do not meet from there on" if cross.clear else "the spreads meet"
        notes.append(
            f"{cross.faster} is faster than {cross.slower} from batch {cross.batch} "
            f"(the lines meet near {cross.interpolated:.3g}; {certainty})"
        )
        measurements.append(
            Measurement(
                name="decode_crossover",
                arm=cross.faster,
                value=float(cross.batch),
                unit="sequences",
                conditions={
                    "tool": "decode",
                    "against": cross.slower,
                    "interpolated": cross.interpolated,
                    "clear": cross.clear,
                },
            )
        )
    first = next(iter(result.plans.values()))
    return evidence_of(
        model=model_facts(first),
        device=device_facts(first, facts),
        facts=facts,
        arms=[
            recorded_arm(name, options[name], plan, result.receipts[name])
            for name, plan in result.plans.items()
        ],
        measurements=measurements,
        notes=notes,
        verdict=verdict,
    )


def _decode_point(
    result: DecodeResult, arm: str, point: Point, rate: float, spread: RoutingSpread | None
) -> Measurement:
    spec, figure = result.spec, point.figure
    assert figure is not None
    routing: dict[str, Scalar] = {}
    if spread is not None:
        routing = {
            "routing_entropy": spread.entropy,
            "routing_busiest": spread.busiest,
            "routing_distinct_experts": spread.distinct[point.batch],
        }
    return Measurement(
        name="decode_ms_per_token",
        arm=arm,
        value=figure.median,
        unit="ms",
        samples=figure.samples,
        discarded=point.discarded,
        conditions={
            "tool": "decode",
            "batch": point.batch,
            "context": spec.context,
            "steps": spec.steps,
            "settle": spec.settle,
            "prefix_cache": result.plans[arm].prefix_cache,
            "steps_counted": len(point.steps),
            "context_first": min(first for first, _ in point.contexts),
            "context_last": max(last for _, last in point.contexts),
            "step_p10_ms": percentile(point.steps, 0.1),
            "step_p90_ms": percentile(point.steps, 0.9),
            "client_step_ms": percentile(point.client, 0.5),
            "output_tokens_per_second": rate,
            "cached_tokens": point.cached_tokens,
            "devices": result.plans[arm].gpus,
            **routing,
        },
    )


def _instead(point: Point) -> str:
    if not point.other_batches:
        return "nothing"
    counts = sorted(point.other_batches.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{batch} in {count} steps" for batch, count in counts)


def prefill_evidence(result: PrefillResult, options: Mapping[str, str], facts: MachineFacts) -> Evidence:
    """Evidence of ``bench prefill``; one arm of the file for each arm and asked chunk."""
    from interlock.bench.prefill import key_of

    spec = result.spec
    arms, measurements = [], []
    notes = [f"prompts of random tokens, seed {spec.seed}"]
    for arm, points in result.points.items():
        for chunk, point in points.items():
            key = key_of(arm, chunk)
            plan = result.plans[arm][chunk]
            arms.append(recorded_arm(key, options[arm], plan, result.receipts[key]))
            if point.reason:
                notes.append(
                    f"{arm}: asked for chunks of {chunk}, delivered {point.delivered}: {point.reason}"
                )
            if point.figure is None:
                continue
            measurements.append(
                Measurement(
                    name="prefill_input_tokens_computed_per_second",
                    arm=key,
                    value=point.figure.median,
                    unit="tokens/s",
                    samples=point.figure.samples,
                    discarded=point.discarded,
                    conditions={
                        "tool": "prefill",
                        "chunk_asked": chunk,
                        "chunk_delivered": point.delivered,
                        "prompt_tokens": spec.prompt_tokens,
                        "prompts": spec.count(chunk),
                        "prefix_cache": plan.prefix_cache,
                        "whole_run_tokens_per_second": percentile(point.whole, 0.5),
                        "steps_counted": point.steps,
                        "submitted_tokens": point.submitted_tokens,
                        "cached_tokens": point.cached_tokens,
                        "cut": point.reason,
                        "devices": plan.gpus,
                    },
                )
            )
    first = next(iter(next(iter(result.plans.values())).values()))
    return evidence_of(
        model=model_facts(first),
        device=device_facts(first, facts),
        facts=facts,
        arms=arms,
        measurements=measurements,
        notes=notes,
    )


def serve_evidence(result: ServeResult, facts: MachineFacts, name: str, max_failures: float) -> Evidence:
    """Evidence of ``bench serve``. The device is known of an Interlock server on this machine only."""
    spec, figures, plan = result.spec, result.figures, result.server.typed_plan()
    arm = Arm(
        name=name, plan=result.server.plan, receipts=result.server.receipts, url=spec.base_url, options=""
    )
    if plan is not None:
        receipts: dict[int, Mapping[str, object]] = {int(r): v for r, v in result.server.receipts.items()}
        clean = recorded_arm(name, "", plan, receipts)
        arm = Arm(name=name, plan=clean.plan, receipts=clean.receipts, url=spec.base_url)
    return evidence_of(
        model=model_facts(plan)
        if plan is not None
        else ModelFacts(
            name=result.server.model, family="", architecture="", config_hash="", weight_format=""
        ),
        device=device_facts(plan, facts)
        if plan is not None and _is_here(spec.base_url)
        else DeviceFacts(kind=plan.device if plan else "unknown", name="the server's", key="unknown"),
        facts=facts if plan is not None else msgspec.structs.replace(facts, packages={}),
        arms=[arm],
        measurements=_serve_measurements(result, name),
        notes=[
            f"{figures.completed} completed, {figures.failed} failed, {figures.incomplete} incomplete; "
            f"percentiles are of completed requests only",
            f"latencies count from when a request was due; seed {spec.seed}",
            *figures.errors[:5],
            *result.warnings,
        ],
        verdict="measured" if figures.failure_rate <= max_failures else "invalid",
    )


def _is_here(base_url: str) -> bool:
    return httpx.URL(base_url).host in ("localhost", "127.0.0.1", "::1")


def _serve_measurements(result: ServeResult, arm: str) -> list[Measurement]:
    spec, figures = result.spec, result.figures
    load: dict[str, Scalar] = {
        "tool": "serve",
        "arrivals": spec.arrivals.kind,
        "rate": spec.arrivals.rate or None,
        "concurrency": spec.arrivals.concurrency or None,
        "input_tokens": spec.input_tokens,
        "output_tokens": spec.output_tokens,
        "endpoint": spec.endpoint,
        "prompts": "file" if spec.prompts else "generated",
    }
    seen: dict[str, Scalar] = {
        "requests": figures.offered,
        "completed": figures.completed,
        "failed": figures.failed,
        "incomplete": figures.incomplete,
        "failure_rate": figures.failure_rate,
        "hit_rate": figures.hit_rate,
        "mean_output_tokens": figures.mean_output_tokens,
        "mean_prompt_tokens": figures.mean_prompt_tokens,
        "short_answers": figures.short,
        "wall_seconds": figures.wall,
        "lateness_p99_ms": _ms(figures.lateness_p99),
        "ttft_limit_ms": _ms(spec.limits.ttft),
        "tpot_limit_ms": _ms(spec.limits.tpot),
        "latency_limit_ms": _ms(spec.limits.latency),
    }
    found = [
        Measurement(
            name=f"serve_{name}_completed_only",
            arm=arm,
            value=value * 1e3,
            unit="ms",
            conditions={**load, "percentile": share, **seen},
        )
        for name, shares in figures.times.items()
        for share, value in shares.items()
        if value is not None
    ]
    found += [
        Measurement(name=f"serve_{name}", arm=arm, value=value, unit="1/s", conditions={**load, **seen})
        for name, value in figures.rates.items()
        if value is not None
    ]
    return found


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
