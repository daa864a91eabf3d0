"""Causes that are no faults: chunk boundaries, prefix cache, near ties, the order of sums."""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import msgspec
import pytest
import torch

from interlock.checkpoint import reader
from interlock.engine.messages import TokenLogprob
from interlock.engine.model_runner import ModelRunner
from interlock.evidence.check import problems
from interlock.moe.routing import Routes, scaled_weights
from interlock.plan.facts import probe
from interlock.plan.launch_plan import LaunchPlan
from interlock.tokenizer import load_tokenizer
from interlock.verify.arm import ArmError, Ask, Scored
from interlock.verify.attribute import Origin
from interlock.verify.compare import Outcome
from interlock.verify.findings import Cause
from interlock.verify.html import page
from interlock.verify.prompts import Prompt, built_in_prompts
from interlock.verify.report import make_report, summary
from interlock.verify.run import Result, Settings, Side, Verdict, verify
from tests.verify.in_process import InProcessArm, make_plan, side

SETTINGS = Settings(continuation=4)


@pytest.fixture(scope="module")
def published(tiny: Path) -> Result:
    """The form of the published example: an established arm, and one whose prefill chunk is smaller. Kernels
    whose rounding depends on the shape of a step make the chunk visible."""
    sides = [
        side(name, tiny, kernels="torch", chunked_prefill_size=chunk)
        for name, chunk in (("control", 128), ("candidate", 64))
    ]
    prompts = built_in_prompts([s.plan for s in sides if s.plan], load_tokenizer(tiny), 4)
    return verify(*sides, prompts, SETTINGS)


def test_published_example_ten_identical_two_cut_by_the_smaller_chunk(published: Result) -> None:
    outcomes = [finding.outcome for finding in published.findings]
    assert len(outcomes) == 12
    assert outcomes.count(Outcome.IDENTICAL) == 10
    longer = {finding.index for finding in published.findings if finding.tokens > 64}
    assert {f.index for f in published.findings if f.outcome is not Outcome.IDENTICAL} == longer
    for index in longer:
        diagnosis = published.findings[index].diagnosis
        assert diagnosis is not None
        assert diagnosis.cause is Cause.CHUNKS
        assert "the candidate at 64" in diagnosis.details
        assert "with both cut every 64 tokens all bits agree" in diagnosis.details
    assert published.verdict.exit_code == 0


def test_the_report_says_so_in_one_sentence_and_its_evidence_holds(published: Result) -> None:
    report = make_report(published, probe())
    words = "10 of 12 prompts are bit-identical; chunk boundaries: #11 (65 tokens), #12 ("
    assert summary(report).startswith(words)
    assert problems(report.evidence) == []


def test_the_page_draws_every_prompt_and_escapes_what_it_is_given(published: Result) -> None:
    report = make_report(published, probe())
    control, candidate = report.evidence.arms
    sly = msgspec.structs.replace(candidate, options="<script>alert(1)</script>")
    evidence = msgspec.structs.replace(report.evidence, arms=(control, sly))
    text = page(msgspec.structs.replace(report, evidence=evidence))
    assert "<script" not in text
    drawings = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    assert len(drawings) == 12 + 2
    layers = drawings[-1]
    assert len(layers.findall("rect[@class='a']")) <= 3
    assert "cut the prompt at" in text


def test_chunks_alone_change_nothing_with_row_invariant_kernels(tiny: Path, prompts: list[Prompt]) -> None:
    result = verify(
        side("control", tiny), side("candidate", tiny, chunked_prefill_size=16), prompts, SETTINGS
    )
    assert [finding.outcome for finding in result.findings] == [Outcome.IDENTICAL] * 3
    assert result.verdict is Verdict.EQUAL
    assert result.findings[2].chunks == ((50,), (16, 32, 48, 50))


def test_a_prefix_hit_of_one_arm_is_named(tiny: Path, prompts: list[Prompt]) -> None:
    result = verify(
        side("control", tiny, kernels="torch", prefix_cache=False),
        side("candidate", tiny, kernels="torch"),
        prompts,
        SETTINGS,
    )
    differing = [finding for finding in result.findings if finding.outcome is not Outcome.IDENTICAL]
    assert differing
    for finding in differing:
        assert finding.cold.outcome is Outcome.IDENTICAL
        assert finding.diagnosis is not None
        assert finding.diagnosis.cause is Cause.PREFIX
        assert f"the candidate {finding.cached[1]}" in finding.diagnosis.details
    assert result.verdict is Verdict.EQUAL


def near_tie(runner: ModelRunner) -> None:
    """Change the second MoE layer's choice where two experts are nearly equal, as rounding might."""
    layer: Any = runner.model.layers[2].experts
    original = layer._router.route

    def route(hidden: torch.Tensor, live_tokens: int, live_count: torch.Tensor | None) -> Routes:
        routes = original(hidden, live_tokens, live_count)
        scores = layer._router.scores(hidden)[1]
        ranked = scores.sort(-1, descending=True)
        tied = ranked.values[:, 3] - ranked.values[:, 4] < layer.near
        ids = routes.ids.clone()
        for row in tied.nonzero().flatten().tolist():
            out, new = (ranked.indices[row, place] for place in (3, 4))
            ids[row][ids[row] == out] = new
        ids = ids.sort(-1).values
        weights = layer._router.scores(hidden)[0].gather(1, ids.clamp_min(0)).masked_fill(ids < 0, 0.0)
        return Routes(ids, scaled_weights(weights, layer.card))

    layer._router.route = route


def test_a_routing_flip_at_a_near_tie_is_confirmed_by_forcing_the_routes(
    tiny: Path, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("interlock.verify.attribute.SCORE_ROUNDING", {"float32": 0.01})

    def change(runner: ModelRunner) -> None:
        runner.model.layers[2].experts.near = 0.01
        near_tie(runner)

    result = verify(side("control", tiny), side("candidate", tiny, change), prompts[1:], SETTINGS)
    flipped = [finding for finding in result.findings if finding.outcome is not Outcome.IDENTICAL]
    assert flipped, "no token of the prompts is at a near tie"
    for finding in flipped:
        assert finding.diagnosis is not None
        assert finding.diagnosis.cause is Cause.FLIP, finding.diagnosis.details
        assert "routing flip at layer 2" in finding.diagnosis.details
        assert "0.0e+00 of difference remains" in finding.diagnosis.details
    assert result.verdict is Verdict.EXPLAINED


def test_a_flip_far_from_a_tie_is_a_fault(tiny: Path, prompts: list[Prompt]) -> None:
    def change(runner: ModelRunner) -> None:
        runner.model.layers[2].experts.near = 0.01
        near_tie(runner)

    result = verify(side("control", tiny), side("candidate", tiny, change), prompts[1:], SETTINGS)
    diagnosis = next(f.diagnosis for f in result.findings if f.diagnosis is not None)
    assert diagnosis.attribution is not None
    assert (diagnosis.attribution.origin, diagnosis.attribution.layer) == (Origin.CHOICE, 2)
    assert result.verdict is Verdict.UNEXPLAINED


def test_another_kernel_set_differs_by_the_order_of_sums(tiny: Path, prompts: list[Prompt]) -> None:
    result = verify(side("control", tiny), side("candidate", tiny, kernels="torch"), prompts, SETTINGS)
    for finding in result.findings:
        assert finding.outcome is Outcome.ROUNDING
        assert finding.diagnosis is not None
        assert finding.diagnosis.cause is Cause.ORDER
        assert "the plans differ in kernels" in finding.diagnosis.details


def test_an_expert_scaled_by_two_percent_is_found_over_a_long_text(tiny: Path) -> None:
    """B30: a fault too small for greedy samples shows in teacher-forced log-probabilities."""

    def change(runner: ModelRunner) -> None:
        layer: Any = runner.model.layers[1].experts
        original = layer._runner.run

        def run(rows: Any) -> torch.Tensor:
            return original(rows) * torch.where(rows.ids == 3, 1.02, 1.0).unsqueeze(-1)

        layer._runner.run = run

    text = [Prompt(tuple((11 * i) % 480 + 8 for i in range(128)), "long")]
    settings = Settings(continuation=16)
    result = verify(side("control", tiny), side("candidate", tiny, change), text, settings)
    (finding,) = result.findings
    assert finding.outcome is Outcome.DIFFERENT
    assert finding.diagnosis is not None
    assert finding.diagnosis.attribution is not None
    assert (finding.diagnosis.attribution.origin, finding.diagnosis.attribution.layer) == (Origin.EXPERTS, 1)
    clean = verify(side("control", tiny), side("candidate", tiny, kernels="torch"), text, settings)
    assert clean.findings[0].cold.mean_kl < 1e-3
    assert clean.verdict is Verdict.EQUAL


def test_a_candidate_whose_receipts_do_not_show_the_backend_never_passes(
    tiny: Path, prompts: list[Prompt]
) -> None:
    """A08: what runs is read from receipts, not from what was asked for."""
    plan = make_plan(tiny, moe_runner_backend="torch")

    def start() -> InProcessArm:
        arm = InProcessArm(plan)
        for layer in arm.receipts[0]["moe_layers"]:  # type: ignore[attr-defined]
            layer["runner_backend"] = "cpu"
        return arm

    candidate = Side("candidate", "--moe-runner-backend torch", plan, start)
    with pytest.raises(ArmError, match=r"not in effect: --moe-runner-backend.*torch.*cpu"):
        verify(side("control", tiny), candidate, prompts, SETTINGS)


def test_block_scales_rounded_to_powers_of_two_are_seen(tiny: Path, prompts: list[Prompt]) -> None:
    """D05: a change of scales that keeps outputs plausible, and its cost, in numbers."""
    original = reader.dequantise

    def rounded(weight: torch.Tensor, scale: torch.Tensor, block_columns: int) -> torch.Tensor:
        return original(weight, scale.log2().ceil().exp2(), block_columns)

    def patches() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(mock.patch.object(reader, "dequantise", rounded))
        return stack

    candidate = side("candidate", tiny, patches=patches)
    result = verify(side("control", tiny), candidate, prompts, SETTINGS)
    assert result.verdict is Verdict.UNEXPLAINED
    worst = result.findings[-1]
    assert worst.cold.mean_kl > 1e-3
    assert worst.diagnosis is not None
    assert "the projections' weights" in worst.diagnosis.details


class Moody(InProcessArm):
    """Log-probabilities from position ``first`` on are off by ``much``, but not in a trace."""

    def __init__(self, plan: LaunchPlan, first: int, much: float) -> None:
        super().__init__(plan)
        self._first, self._much = first, much

    def score(self, ask: Ask) -> Scored:
        scored = super().score(ask)
        if ask.inspection.trace:
            return scored
        entries = tuple(
            entry and replace_logprob(entry, entry.logprob + (self._much if position >= self._first else 0.0))
            for position, entry in enumerate(scored.entries)
        )
        return replace(scored, entries=entries)


def replace_logprob(entry: TokenLogprob, logprob: float) -> TokenLogprob:
    return TokenLogprob(entry.token_id, logprob, entry.top)


def moody(tiny: Path, prompt: Prompt, graphs: tuple[int, ...] = (), *, first: int, much: float) -> Result:
    """A control whose plan has ``graphs``, against a candidate that is moody."""
    control, candidate = side("control", tiny), side("candidate", tiny)
    assert control.plan is not None
    assert candidate.plan is not None
    plan = candidate.plan
    control = replace(control, plan=msgspec.structs.replace(control.plan, cuda_graph_sizes=graphs))
    candidate = replace(candidate, start=lambda: Moody(plan, first, much))
    return verify(control, candidate, [prompt], SETTINGS)


@pytest.mark.parametrize("graphs", [(), (1, 2)])
def test_an_arm_that_does_not_repeat_itself_is_unexplained(
    tiny: Path, prompts: list[Prompt], graphs: tuple[int, ...]
) -> None:
    """Graphs are no excuse for what differs in the prompt."""
    result = moody(tiny, prompts[0], graphs, first=0, much=0.5)
    assert result.findings[0].diagnosis is not None
    assert "does not repeat itself" in result.findings[0].diagnosis.details
    assert result.verdict is Verdict.UNEXPLAINED


@pytest.mark.parametrize(
    ("much", "cause", "verdict"),
    [(1e-5, Cause.GRAPHS, Verdict.EQUAL), (0.5, Cause.UNEXPLAINED, Verdict.UNEXPLAINED)],
)
def test_what_only_replayed_graphs_show_is_laid_at_their_door(
    tiny: Path, prompts: list[Prompt], much: float, cause: Cause, verdict: Verdict
) -> None:
    """A trace runs eagerly: an arm with graphs repeats itself, though its trace agrees with the other arm."""
    after_the_prompt = len(prompts[0].token_ids) + 1
    result = moody(tiny, prompts[0], (1, 2), first=after_the_prompt, much=much)
    diagnosis = result.findings[0].diagnosis
    assert diagnosis is not None
    assert diagnosis.cause is cause
    assert "the CUDA graphs that the control replays" in diagnosis.details
    assert ("--cuda-graph-max-batch 0 in both arms" in diagnosis.details) == (cause is Cause.UNEXPLAINED)
    assert result.verdict is verdict
