"""One run of ``verify``: both arms score all prompts, differences are diagnosed, a verdict is given.

The arms run one after the other, so that each has the machine for itself; where prompts differ, both are
started once more for the diagnosis.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from interlock.plan.launch_plan import LaunchPlan, Source
from interlock.plan.receipts import check, option_of
from interlock.verify.arm import Arm, ArmError, Ask, Scored
from interlock.verify.compare import Outcome, compare, tolerance_of
from interlock.verify.diagnose import Case, Diagnostician
from interlock.verify.findings import Cause, Diagnosis, Finding
from interlock.verify.prompts import Prompt

Note = Callable[[str], None]


class Verdict(StrEnum):
    """The answer of a run."""

    EQUAL = "equal"
    EXPLAINED = "explained"
    UNEXPLAINED = "unexplained"

    @property
    def exit_code(self) -> int:
        return 1 if self is Verdict.UNEXPLAINED else 0


@dataclass(frozen=True, slots=True)
class Side:
    """One arm, not yet running.

    Attributes:
        options: as given on the command line; the URL for a running server.
        plan: what ``start`` runs; None for a server of another make.
    """

    name: str
    options: str
    plan: LaunchPlan | None
    start: Callable[[], Arm]


@dataclass(frozen=True, slots=True)
class Settings:
    """How to compare. ``tolerance``: None takes what the dtypes of the plans suggest."""

    continuation: int = 16
    alternatives: int = 5
    tolerance: float | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What a run found, with the receipts that the arms showed."""

    control: Side
    candidate: Side
    receipts: tuple[dict[int, dict[str, object]], dict[int, dict[str, object]]]
    findings: tuple[Finding, ...]
    tolerance: float

    @property
    def verdict(self) -> Verdict:
        if not all(finding.passes for finding in self.findings):
            return Verdict.UNEXPLAINED
        if any(finding.outcome is Outcome.DIFFERENT for finding in self.findings):
            return Verdict.EXPLAINED
        return Verdict.EQUAL


@dataclass(frozen=True, slots=True)
class _Scores:
    """One arm's scorings of all prompts; ``warm`` on the prefix that the cold run left in its cache."""

    cold: tuple[Scored, ...]
    warm: tuple[Scored | None, ...]
    receipts: dict[int, dict[str, object]]


def verify(
    control: Side,
    candidate: Side,
    prompts: Sequence[Prompt],
    settings: Settings,
    note: Note = lambda text: None,
) -> Result:
    """Compare the arms on ``prompts``.

    Raises:
        ArmError: an arm could not run, or the candidate does not show that its options are in effect.
    """
    note("control: scoring")
    ours = _score_all(control, prompts, settings, forced=None)
    note("candidate: scoring")
    theirs = _score_all(candidate, prompts, settings, forced=[scored.continuation for scored in ours.cold])
    prove_in_effect(candidate.plan, theirs.receipts)
    tolerance = settings.tolerance
    if tolerance is None:
        tolerance = tolerance_of(control.plan, candidate.plan)
    findings = [_finding(index, prompt, ours, theirs, tolerance) for index, prompt in enumerate(prompts)]
    suspects = [finding for finding in findings if finding.outcome is not Outcome.IDENTICAL]
    if suspects:
        note(f"{len(suspects)} of {len(findings)} prompts are not bit-identical: looking for the cause")
        for finding, diagnosis in zip(
            suspects, _diagnose(control, candidate, suspects, ours, tolerance, note), strict=True
        ):
            findings[finding.index] = replace(finding, diagnosis=diagnosis)
    return Result(control, candidate, (ours.receipts, theirs.receipts), tuple(findings), tolerance)


def prove_in_effect(plan: LaunchPlan | None, receipts: dict[int, dict[str, object]]) -> None:
    """Raise ArmError unless ``receipts`` show every item of ``plan``, those that the user set above all."""
    if plan is None:
        return
    mismatches = check(plan, receipts)
    if not mismatches:
        return
    asked = {option_of(item) for item, why in plan.provenance.items() if why.source is Source.USER}
    first = sorted(mismatches, key=lambda mismatch: mismatch.option not in asked)[:3]
    raise ArmError("what was asked for is not in effect: " + "; ".join(map(str, first)))


def _score_all(
    side: Side, prompts: Sequence[Prompt], settings: Settings, forced: Sequence[tuple[int, ...]] | None
) -> _Scores:
    with closing(_started(side)) as arm:
        cold, warm = [], []
        for index, prompt in enumerate(prompts):
            ask = Ask(
                token_ids=prompt.token_ids,
                forced=forced[index] if forced else (),
                continuation=settings.continuation,
                alternatives=settings.alternatives,
                turn=index,
            )
            cold.append(_scored(side, arm, ask))
            again = None
            if side.plan is not None and side.plan.prefix_cache:
                text = cold[-1].continuation
                again = _scored(side, arm, replace(ask, forced=text, score_prompt=False, flush=False))
            warm.append(again)
        return _Scores(tuple(cold), tuple(warm), dict(arm.receipts))


def _started(side: Side) -> Arm:
    try:
        return side.start()
    except ArmError as error:
        raise ArmError(f"{side.name}: {error}") from None


def _scored(side: Side, arm: Arm, ask: Ask) -> Scored:
    try:
        return arm.score(ask)
    except ArmError as error:
        raise ArmError(f"{side.name}: {error}") from None


def _finding(index: int, prompt: Prompt, ours: _Scores, theirs: _Scores, tolerance: float) -> Finding:
    control, candidate = ours.cold[index], theirs.cold[index]
    warm_ours, warm_theirs = ours.warm[index] or control, theirs.warm[index]
    return Finding(
        index=index,
        label=prompt.label,
        tokens=len(prompt.token_ids),
        continuation=len(control.continuation),
        cold=compare(control, candidate, tolerance),
        warm=None if warm_theirs is None else compare(warm_ours, warm_theirs, tolerance),
        chunks=(control.chunk_ends, candidate.chunk_ends),
        cached=(warm_ours.cached_tokens, warm_theirs.cached_tokens if warm_theirs else 0),
    )


def _diagnose(
    control: Side,
    candidate: Side,
    suspects: Sequence[Finding],
    ours: _Scores,
    tolerance: float,
    note: Note,
) -> list[Diagnosis]:
    if control.plan is None or candidate.plan is None:
        return [_without_traces(finding) for finding in suspects]
    with tempfile.TemporaryDirectory(prefix="interlock-verify-") as name:
        folder = Path(name)
        cases = [
            Case.of(finding, ours.cold[finding.index], control.plan, candidate.plan) for finding in suspects
        ]
        note("control: tracing")
        with closing(_started(control)) as arm:
            reruns = [case.reruns(arm, folder / "control") for case in cases]
        note("candidate: tracing")
        judge = Diagnostician(control.plan, candidate.plan, tolerance, folder / "candidate")
        with closing(_started(candidate)) as arm:
            return [judge.diagnose(case, own, arm) for case, own in zip(cases, reruns, strict=True)]


def _without_traces(finding: Finding) -> Diagnosis:
    """A server of another make shows log-probabilities only."""
    if finding.outcome is Outcome.ROUNDING:
        return Diagnosis(Cause.ORDER, "another engine, within rounding of this one", True)
    worst = finding.comparison.worst
    where = f" at position {worst.position}" if worst else ""
    text = f"off by {finding.comparison.largest:.2g}{where}; the control's layers cannot be looked into"
    return Diagnosis(Cause.UNEXPLAINED, text, False)
