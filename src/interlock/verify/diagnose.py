"""Finds the cause of a difference: the prompt again with chunk boundaries aligned, with both arms' layers
written down, and with routing forced to the control's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from interlock.engine.messages import Inspection
from interlock.plan.launch_plan import LaunchPlan
from interlock.verify.arm import Arm, Ask, Scored
from interlock.verify.attribute import Attribution, Origin, attribute, precision_of
from interlock.verify.compare import Comparison, Outcome, compare, promises_same_bits
from interlock.verify.describe import differing_items, fault_text, flip_text, order_text
from interlock.verify.findings import Cause, Diagnosis, Finding
from interlock.verify.trace import Trace, read_trace, write_routes

TRACED_POSITIONS = 256
TRACED_BEFORE = 32
GRAPHS_ASIDE = "--cuda-graph-max-batch 0 in both arms compares all else"


@dataclass(frozen=True, slots=True)
class Rerun:
    """A text scored again, with what the layers computed."""

    scored: Scored
    trace: Trace


@dataclass(frozen=True, slots=True)
class Reruns:
    """One arm's reruns of one prompt; ``aligned`` where the arms' own chunk boundaries differ."""

    natural: Rerun
    aligned: Rerun | None


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt whose outcome is not identical, ready to be run again.

    Attributes:
        chunk_limit: cuts the prefill of both arms at the same places; 0 where they are the same already.
        first, last: positions to trace, around the first that differs.
    """

    finding: Finding
    token_ids: tuple[int, ...]
    prompt_len: int
    chunk_limit: int
    first: int
    last: int

    @classmethod
    def of(cls, finding: Finding, scored: Scored, control: LaunchPlan, candidate: LaunchPlan) -> Case:
        same = finding.chunks[0] == finding.chunks[1]
        start = max(0, (finding.comparison.first_difference or 1) - 1 - TRACED_BEFORE)
        limit = min(control.chunked_prefill_size, candidate.chunked_prefill_size)
        return cls(
            finding=finding,
            token_ids=scored.token_ids,
            prompt_len=scored.prompt_len,
            chunk_limit=0 if same else limit,
            first=start,
            last=start + TRACED_POSITIONS,
        )

    @property
    def name(self) -> str:
        return f"prompt{self.finding.index}"

    def rerun(self, arm: Arm, folder: Path, *, chunk_limit: int = 0, routes: str = "") -> Rerun:
        """Score the text once more in ``arm``, with the prefix cache emptied and a trace in ``folder``."""
        folder.mkdir(parents=True)
        inspection = Inspection(
            trace=str(folder), chunk_limit=chunk_limit, routes=routes, first=self.first, last=self.last
        )
        scored = arm.score(
            Ask(
                token_ids=self.token_ids[: self.prompt_len],
                forced=self.token_ids[self.prompt_len :],
                inspection=inspection,
                turn=self.finding.index,
            )
        )
        return Rerun(scored, read_trace(folder))

    def reruns(self, arm: Arm, folder: Path) -> Reruns:
        natural = self.rerun(arm, folder / self.name / "natural")
        if not self.chunk_limit:
            return Reruns(natural, None)
        return Reruns(natural, self.rerun(arm, folder / self.name / "aligned", chunk_limit=self.chunk_limit))


@dataclass(frozen=True, slots=True)
class Diagnostician:
    """Judges cases with the control's reruns at hand and the candidate running.

    Attributes:
        folder: for the candidate's traces.
        tolerance: what counts as rounding of a log-probability.
    """

    control: LaunchPlan
    candidate: LaunchPlan
    tolerance: float
    folder: Path

    @property
    def _precision(self) -> str:
        plans = (self.control, self.candidate)
        return precision_of(*(dtype for plan in plans for dtype in (plan.dtype, plan.kv_cache_dtype)))

    @property
    def _promised(self) -> bool:
        return promises_same_bits(self.control, self.candidate)

    def diagnose(self, case: Case, control: Reruns, arm: Arm) -> Diagnosis:
        """The cause of the difference on one prompt."""
        if case.finding.cold.outcome is Outcome.IDENTICAL:
            return self._prefix(case.finding)
        candidate = case.reruns(arm, self.folder)
        if control.aligned is not None and candidate.aligned is not None:
            return self._chunked(case, control, candidate, arm)
        return self._same_chunks(case, control.natural, candidate.natural, arm)

    def _compare(self, control: Rerun, candidate: Rerun) -> Comparison:
        return compare(control.scored, candidate.scored, self.tolerance)

    def _attribute(self, control: Rerun, candidate: Rerun) -> Attribution:
        return attribute(control.trace, candidate.trace, self._precision)

    def _prefix(self, finding: Finding) -> Diagnosis:
        """Cold runs agree to the last bit; only the run on a cached prefix differs."""
        ours, theirs = finding.cached
        if ours == theirs:
            text = f"agrees when nothing is cached, differs when both reuse {theirs} cached tokens"
            return Diagnosis(Cause.UNEXPLAINED, text, False)
        text = f"the control reused {ours} cached prompt tokens, the candidate {theirs}"
        small = finding.outcome is Outcome.ROUNDING
        text += "" if small else ", which changes the answer by more than rounding"
        return Diagnosis(Cause.PREFIX if small else Cause.UNEXPLAINED, text, small)

    def _chunked(self, case: Case, control: Reruns, candidate: Reruns, arm: Arm) -> Diagnosis:
        """The arms cut the prompt differently: does the difference vanish when they cut alike?"""
        assert control.aligned is not None
        assert candidate.aligned is not None
        if self._compare(control.aligned, candidate.aligned).outcome is not Outcome.IDENTICAL:
            return self._same_chunks(case, control.aligned, candidate.aligned, arm)
        ours, theirs = (_boundaries(chunks) for chunks in case.finding.chunks)
        found = self._attribute(control.natural, candidate.natural)
        text = (
            f"the control cut the prompt at {ours}, the candidate at {theirs}; with both cut every "
            f"{case.chunk_limit} tokens all bits agree"
        )
        if found.is_fault and case.finding.outcome is Outcome.DIFFERENT:
            text += f"; but {fault_text(found, self.control)}"
            return Diagnosis(Cause.UNEXPLAINED, text, False, found)
        if found.flips:
            text += f"; rounding led to a {flip_text(found.flips[0])}"
        if self._promised:
            text += "; both arms promise bits that do not depend on chunks"
        return Diagnosis(Cause.CHUNKS, text, not self._promised, found)

    def _same_chunks(self, case: Case, control: Rerun, candidate: Rerun, arm: Arm) -> Diagnosis:
        again = self._compare(control, candidate)
        if again.outcome is Outcome.IDENTICAL:
            return self._gone_in_the_trace(case)
        found = self._attribute(control, candidate)
        if found.is_fault:
            return Diagnosis(Cause.UNEXPLAINED, fault_text(found, self.control), False, found)
        if found.origin is Origin.FLIP:
            return self._flipped(case, control, found, arm)
        if again.outcome is Outcome.DIFFERENT and not self._promised:
            text = f"the layers agree within rounding, the log-probabilities do not: look at {Origin.HEAD}"
            return Diagnosis(Cause.UNEXPLAINED, text, False, found)
        return self._order(found)

    def _gone_in_the_trace(self, case: Case) -> Diagnosis:
        """Traced steps run eagerly, so they do not show what replayed graphs compute."""
        first = case.finding.comparison.first_difference
        replaying = self._replaying
        if not replaying or first is None or first <= case.prompt_len:
            text = "the same text scored again agrees to the last bit, so an arm does not repeat itself"
            return Diagnosis(Cause.UNEXPLAINED, text, False)
        text = (
            "only decode steps differ, and run eagerly they agree to the last bit: the difference comes from "
            f"the CUDA graphs that {replaying}; "
        )
        if self.control.cuda_graph_sizes == self.candidate.cuda_graph_sizes:
            return Diagnosis(Cause.UNEXPLAINED, text + GRAPHS_ASIDE, False)
        text += "kernels are chosen by the size of the graph, so sums may have another order"
        if case.finding.outcome is Outcome.ROUNDING:
            return Diagnosis(Cause.GRAPHS, text, not self._promised)
        return Diagnosis(Cause.UNEXPLAINED, f"{text}, but this is more than rounding; {GRAPHS_ASIDE}", False)

    @property
    def _replaying(self) -> str:
        """Who replays decode steps as CUDA graphs; "" for nobody."""
        arms = [("the control", self.control), ("the candidate", self.candidate)]
        names = [name for name, plan in arms if plan.cuda_graph_sizes]
        return "" if not names else "both arms replay" if len(names) == 2 else f"{names[0]} replays"

    def _order(self, found: Attribution) -> Diagnosis:
        text = order_text(found, self.control, self.candidate)
        if self._promised:
            text += "; both arms promise the same bits"
        reasons = differing_items(self.control, self.candidate)
        return Diagnosis(Cause.ORDER, text, bool(reasons) and not self._promised, found)

    def _flipped(self, case: Case, control: Rerun, found: Attribution, arm: Arm) -> Diagnosis:
        """Confirm near ties as the cause: with the control's experts forced, only rounding may be left."""
        routes = self.folder / case.name / "control-routes.safetensors"
        write_routes(control.trace, routes)
        forced = case.rerun(
            arm, self.folder / case.name / "forced", chunk_limit=case.chunk_limit, routes=str(routes)
        )
        left = compare(control.scored, forced.scored, self.tolerance or 5e-4)
        text = flip_text(found.flips[0])
        if len(found.flips) > 1:
            text += f" (and {len(found.flips) - 1} more)"
        if left.outcome is Outcome.DIFFERENT:
            text += f"; but with the control's experts forced {left.largest:.1e} of difference remains"
            return Diagnosis(Cause.UNEXPLAINED, text, False, found)
        text += f"; with the control's experts forced {left.largest:.1e} of difference remains"
        return Diagnosis(Cause.FLIP, text, not self._promised, found)


def _boundaries(chunks: tuple[int, ...]) -> str:
    """Where prefill steps ended, without the end of the prompt."""
    inner = chunks[:-1]
    if not inner:
        return "nowhere"
    text = ", ".join(map(str, inner[:6]))
    return text + (", ..." if len(inner) > 6 else "")
