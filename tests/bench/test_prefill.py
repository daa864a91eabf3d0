"""Prefill figures of an engine whose steps take known times, and the chunk that was really run."""

from __future__ import annotations

import pytest

from interlock.bench.pool import ArmPool
from interlock.bench.prefill import ChunkPoint, PrefillResult, PrefillSpec, key_of, run_prefill, take
from interlock.bench.record import prefill_evidence
from interlock.bench.session import Observation, Turn
from interlock.moe.terms import Phase
from interlock.plan.launch_plan import LaunchPlan, Provenance, Source
from tests.bench.stub_session import StubSession, stub_plan
from tests.bench.test_decode import FACTS

SPEC = PrefillSpec(chunks=(256,), prompt_tokens=300, prompts=5, rounds=3, seed=2)


def cost(tokens: int) -> float:
    return 0.002 + tokens * 1e-5


def measured(spec: PrefillSpec, **arms: LaunchPlan) -> PrefillResult:
    plans = {name: dict.fromkeys(spec.chunks, plan) for name, plan in arms.items()}
    flat = {key_of(name, chunk): plan for name, by in plans.items() for chunk, plan in by.items()}

    def start(plan: LaunchPlan) -> StubSession:
        return StubSession(plan, lambda batch: 0.03, prefill=cost)

    with ArmPool(flat, keep=True, start=start) as pool:
        return run_prefill(pool, plans, spec, lambda _: None)


def capped(chunk: int) -> LaunchPlan:
    """A plan in which the user's T allows only ``chunk`` tokens."""
    source = Provenance(Source.USER, "flag --moe-prefill-capacity")
    return stub_plan(
        chunked_prefill_size=chunk, moe_prefill_capacity=chunk, provenance={"moe_prefill_capacity": source}
    )


def test_the_figure_is_that_of_the_delivered_chunk() -> None:
    """K06: tokens that were computed, over the time of the steps that computed them; submitted apart."""
    result = measured(SPEC, full=stub_plan(chunked_prefill_size=256))
    point = result.points["full"][256]
    assert point.delivered == 256
    assert point.figure is not None
    assert point.figure.median == pytest.approx(256 / cost(256), rel=0.02)
    tail = 1500 % 256
    assert point.steps == 5 * SPEC.rounds
    assert point.discarded == SPEC.rounds
    whole = 1500 / (5 * cost(256) + cost(tail))
    assert point.whole == pytest.approx([whole] * 3, rel=0.02)
    assert point.submitted_tokens == 1500 * SPEC.rounds
    assert point.reason == ""


def test_a_small_capacity_is_named_and_not_compared() -> None:
    """K08: T cuts the chunk to a half, which is slower; that is reported, not blamed on the arm."""
    result = measured(SPEC, full=stub_plan(chunked_prefill_size=256), cut=capped(128))
    point = result.points["cut"][256]
    assert (point.asked, point.delivered) == (256, 128)
    assert "--moe-prefill-capacity 128" in point.reason
    assert "from 256 to 128" in point.reason
    assert result.ratio("cut", 256) == "not compared: chunk 128 against 256"
    assert result.ratio("full", 256) == 1.0
    evidence = prefill_evidence(result, {"full": "", "cut": "--moe-prefill-capacity 128"}, FACTS)
    assert any("asked for chunks of 256, delivered 128" in note for note in evidence.notes)
    delivered = {m.arm: m.conditions["chunk_delivered"] for m in evidence.measurements}
    assert delivered == {"full@256": 256, "cut@256": 128}


def test_replicas_deliver_one_chunk_together() -> None:
    """A07: a chunk is counted over all attention replicas."""
    result = measured(SPEC, dp2=stub_plan(chunked_prefill_size=128, attn_dp_size=2, tp_size=2))
    assert result.points["dp2"][256].delivered == 256


def test_too_few_tokens_for_a_chunk_are_the_reason() -> None:
    spec = PrefillSpec(chunks=(256,), prompt_tokens=100, prompts=2, rounds=1, seed=2)
    point = measured(spec, small=stub_plan(chunked_prefill_size=256)).points["small"][256]
    assert point.delivered == 200
    assert point.reason == "only 200 tokens were submitted at once"


def test_cached_tokens_are_not_computed_ones() -> None:
    """K06: tokens that were found in the prefix cache do not count as computed."""
    point = ChunkPoint(asked=256)
    turns = (Turn(Phase.PREFILL, tokens=100, sequences=1, kv_tokens=256, seconds=0.01),)
    take(point, Observation(turns, ((1,),), cached_tokens=156), SPEC, stub_plan())
    assert point.rounds == [pytest.approx(10_000)]
    assert point.cached_tokens == 156
