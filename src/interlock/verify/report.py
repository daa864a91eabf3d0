"""What a run of ``verify`` leaves behind: an evidence file, and a report that adds the curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from interlock.evidence.record import (
    device_facts,
    interlock_version,
    model_facts,
    now,
    recorded_arm,
    rehearsal_notes,
)
from interlock.evidence.schema import Arm, Evidence, Measurement, PromptOutcome
from interlock.plan.facts import MachineFacts
from interlock.verify.attribute import Flip, LayerDifference
from interlock.verify.findings import Finding
from interlock.verify.run import Result, Side


class PromptReport(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt: its outcome, the difference at each scored position, and by layer where it was traced."""

    outcome: PromptOutcome
    label: str
    positions: tuple[int, ...]
    differences: tuple[float, ...]
    mean_kl: float
    chunk_ends: tuple[tuple[int, ...], tuple[int, ...]]
    cached_tokens: tuple[int, int]
    layers: tuple[LayerDifference, ...] = ()
    flips: tuple[Flip, ...] = ()


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """``report.json``: the evidence and what is too large or too fine for it."""

    evidence: Evidence
    tolerance: float
    prompts: tuple[PromptReport, ...]


def make_report(result: Result, facts: MachineFacts, notes: Sequence[str] = ()) -> Report:
    """Put a run into words and numbers. The candidate runs on this machine, which ``facts`` describe."""
    plan = result.candidate.plan
    assert plan is not None, "the candidate is always an engine of this package"
    prompts = tuple(_prompt(finding) for finding in result.findings)
    arms = (_arm(result.control, result.receipts[0]), _arm(result.candidate, result.receipts[1]))
    evidence = Evidence(
        kind="verify",
        created=now(),
        interlock=interlock_version(),
        model=model_facts(plan),
        device=device_facts(plan, facts),
        packages=dict(facts.packages),
        arms=arms,
        verdict=str(result.verdict),
        prompts=tuple(prompt.outcome for prompt in prompts),
        measurements=_measurements(result),
        notes=(
            *rehearsal_notes(arms),
            f"log-probabilities within {result.tolerance:g} count as rounding",
            *notes,
        ),
    )
    return Report(evidence=evidence.sealed(), tolerance=result.tolerance, prompts=prompts)


def write_json(report: Report, path: Path) -> None:
    """``report.json``, indented; enums as their text."""
    content = msgspec.json.encode(msgspec.to_builtins(report, enc_hook=str))
    path.write_bytes(msgspec.json.format(content, indent=1) + b"\n")


def summary(report: Report) -> str:
    """The run in one or two sentences."""
    outcomes = [prompt.outcome for prompt in report.prompts]
    same = sum(outcome.outcome == "bit-identical" for outcome in outcomes)
    text = f"{same} of {len(outcomes)} prompts are bit-identical"
    others = [outcome for outcome in outcomes if outcome.outcome != "bit-identical"]
    for cause in dict.fromkeys(outcome.cause for outcome in others):
        members = [outcome for outcome in others if outcome.cause == cause]
        if len(members) == len(outcomes):
            text += f"; {cause}: all"
            continue
        numbers = ", ".join(f"#{outcome.index + 1} ({outcome.tokens} tokens)" for outcome in members)
        text += f"; {cause}: {numbers}"
    return text + f". Verdict: {report.evidence.verdict}."


def _arm(side: Side, receipts: dict[int, dict[str, object]]) -> Arm:
    if side.plan is None:
        return Arm(name=side.name, url=side.options)
    return recorded_arm(side.name, side.options, side.plan, receipts)


def _prompt(finding: Finding) -> PromptReport:
    comparison, diagnosis = finding.comparison, finding.diagnosis
    found = diagnosis.attribution if diagnosis else None
    worst = comparison.worst
    differs = bool(comparison.largest)
    return PromptReport(
        outcome=PromptOutcome(
            index=finding.index,
            tokens=finding.tokens,
            continuation=finding.continuation,
            outcome=str(finding.outcome),
            largest=comparison.largest,
            position=worst.position if worst and differs else None,
            cause=str(diagnosis.cause) if diagnosis else "",
            details=diagnosis.details if diagnosis else "",
            explained=finding.passes,
        ),
        label=finding.label,
        positions=tuple(point.position for point in comparison.points),
        differences=tuple(point.difference for point in comparison.points),
        mean_kl=comparison.mean_kl,
        chunk_ends=finding.chunks,
        cached_tokens=finding.cached,
        layers=found.layers if found else (),
        flips=found.flips if found else (),
    )


def _measurements(result: Result) -> tuple[Measurement, ...]:
    points = [point for finding in result.findings for point in finding.cold.points]
    if not points:
        return ()
    values = {
        "largest_logprob_difference": (max(point.difference for point in points), "nats"),
        "mean_kl": (sum(point.kl for point in points) / len(points), "nats"),
        "top1_agreement": (sum(not point.flip_margin for point in points) / len(points), "share"),
        "largest_flip_margin": (max(point.flip_margin for point in points), "nats"),
        "identical_positions": (sum(point.identical for point in points) / len(points), "share"),
        "positions": (float(len(points)), "positions"),
    }
    return tuple(
        Measurement(name=name, arm=result.candidate.name, value=value, unit=unit)
        for name, (value, unit) in values.items()
    )
