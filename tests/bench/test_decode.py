"""Decode figures of an engine whose steps take known times."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from interlock.bench.decode import DecodeResult, DecodeSpec, Point, run_decode
from interlock.bench.pool import ArmPool, check_room, turns_of
from interlock.bench.record import decode_evidence
from interlock.errors import Refusal
from interlock.plan.facts import MachineFacts
from interlock.plan.launch_plan import LaunchPlan
from tests.bench.stub_session import StubSession, stub_plan

FACTS = MachineFacts(
    os="linux", architecture="x86_64", python="3.11", cores=2, memory_total=1, memory_available=1
)
SPEC = DecodeSpec(batches=(1, 4, 16), context=100, steps=12, rounds=3, seed=5)


def ep(batch: int) -> float:
    return 0.030 + 0.0005 * batch


def tp(batch: int) -> float:
    return 0.026 + 0.0010 * batch


def measured(
    spec: DecodeSpec, *, keep: bool = True, plan: LaunchPlan | None = None, **arms: Callable[..., StubSession]
) -> tuple[DecodeResult, list[StubSession]]:
    started = []
    plans = {name: plan or stub_plan(served_model_name=name) for name in arms}
    by_plan = {id(plans[name]): start for name, start in arms.items()} if plan is None else {}

    def start(each: LaunchPlan) -> StubSession:
        make = by_plan.get(id(each)) or next(iter(arms.values()))
        started.append(make(each))
        return started[-1]

    with ArmPool(plans, keep=keep, start=start) as pool:
        return run_decode(pool, spec, lambda _: None), started


@pytest.mark.parametrize("jitter", [0.0, 0.05])
@pytest.mark.parametrize("keep", [True, False])
def test_figures_are_the_known_delays(jitter: float, keep: bool) -> None:
    """Within 2 % of truth, with arms alive together or restarted for every round."""
    result, started = measured(
        SPEC,
        keep=keep,
        ep=lambda plan: StubSession(plan, ep, jitter=jitter),
        tp=lambda plan: StubSession(plan, tp, jitter=jitter),
    )
    for name, truth in (("ep", ep), ("tp", tp)):
        for batch, figure in result.figures(name).items():
            assert figure.median == pytest.approx(truth(batch) * 1e3, rel=0.02)
            assert len(result.points[name][batch].steps) == SPEC.steps * SPEC.rounds
            assert result.points[name][batch].client == pytest.approx([truth(batch) * 1e3] * 3, rel=0.04)
    assert result.growth("ep") == pytest.approx(ep(16) / ep(1), rel=0.03)
    (cross,) = result.crossovers()
    assert (cross.faster, cross.slower, cross.batch) == ("ep", "tp", 16)
    assert cross.interpolated == pytest.approx(8, rel=0.25)
    assert all(session.closed for session in started)
    assert len(started) == (2 if keep else 4)


def test_steps_at_another_batch_are_discarded_and_counted() -> None:
    """A batch that fills while others decode, and one that loses a sequence every fifth step."""
    spec = DecodeSpec(batches=(16,), context=100, steps=10, rounds=2, seed=5)
    small_chunks = stub_plan(chunked_prefill_size=200)
    result, _ = measured(spec, plan=small_chunks, only=lambda plan: StubSession(plan, ep, retract_every=5))
    point = result.points["only"][16]
    assert point.figure is not None
    assert point.figure.median == pytest.approx(ep(16) * 1e3, rel=0.02)
    filling = 7
    retracted = point.other_batches[15]
    assert retracted >= 2 * spec.rounds
    assert sum(point.other_batches.values()) >= spec.rounds * filling
    settling = spec.settle * spec.rounds
    assert point.discarded == settling + sum(point.other_batches.values())
    evidence = decode_evidence(result, {"only": ""}, FACTS, {})
    (measurement, *_) = evidence.measurements
    assert measurement.discarded == point.discarded
    assert measurement.conditions["steps_counted"] == 20


def test_a_batch_that_never_runs_is_invalid_not_a_number() -> None:
    """A08: asked for 16, the engine runs 8 at once: no figure labelled 16."""
    spec = DecodeSpec(batches=(16,), context=100, steps=4, rounds=1, seed=5)
    narrow = stub_plan(max_running_requests=8)
    result, _ = measured(spec, plan=narrow, only=lambda plan: StubSession(plan, ep))
    assert result.figures("only") == {}
    evidence = decode_evidence(result, {"only": ""}, FACTS, {})
    assert evidence.verdict == "invalid"
    assert any("never decoded 16 sequences at once, but 8 in" in note for note in evidence.notes)
    with pytest.raises(Refusal, match="arm only: --max-running-requests 8"):
        check_room("only", narrow, 16, 120)
    with pytest.raises(Refusal, match="--kv-memory"):
        check_room("only", stub_plan(full_pages=10), 4, 120)


def test_warm_up_is_outside_the_figures() -> None:
    """K05: two seconds at the first step of each shape change no figure, not even the first step's."""
    spec = DecodeSpec(batches=(1, 4, 16), context=100, steps=1, rounds=1, seed=5, settle=0)
    result, _ = measured(spec, only=lambda plan: StubSession(plan, ep, compile=2.0))
    for batch, figure in result.figures("only").items():
        assert figure.most == pytest.approx(ep(batch) * 1e3, rel=0.02)


def test_the_same_engine_twice_differs_within_the_printed_spread() -> None:
    """K05: A B, B A over rounds; |A - B| lies within the spreads that are printed."""
    order = [(number, arm) for number, arm, _ in turns_of(["a", "b"], [1], 4, keep=True)]
    assert order == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b"), (3, "b"), (3, "a")]
    result, _ = measured(
        SPEC,
        a=lambda plan: StubSession(plan, ep, jitter=0.1),
        b=lambda plan: StubSession(plan, ep, jitter=0.1),
    )
    for batch in SPEC.batches:
        assert result.figures("a")[batch].overlaps(result.figures("b")[batch])


def test_prompts_are_new_in_every_round_and_the_same_for_every_arm() -> None:
    """K01: no run finds the prompts of an earlier one in its prefix cache."""
    _, (first, second) = measured(
        SPEC, a=lambda plan: StubSession(plan, ep), b=lambda plan: StubSession(plan, ep)
    )
    prompts = [prompt for load in first.loads for prompt in load.prompts]
    assert len(set(prompts)) == len(prompts)
    timed = {load.prompts for load in first.loads if load.steps > SPEC.settle + 1}
    assert timed == {load.prompts for load in second.loads if load.steps > SPEC.settle + 1}


def test_replicas_are_one_global_batch() -> None:
    """A07: the batch is that of all attention replicas together, and so are the tokens per second."""
    spec = DecodeSpec(batches=(8,), context=64, steps=6, rounds=1, seed=1)
    plan = stub_plan(attn_dp_size=2, tp_size=2)
    assert spec.sequences(8, plan) == 4
    result, _ = measured(spec, plan=plan, dp2=lambda each: StubSession(each, ep))
    assert result.figures("dp2")[8].median == pytest.approx(ep(8) * 1e3)
    (measurement, *_) = decode_evidence(result, {"dp2": ""}, FACTS, {}).measurements
    assert measurement.conditions["output_tokens_per_second"] == pytest.approx(8 / ep(8))
    assert measurement.conditions["devices"] == 2
    assert measurement.conditions["context_first"] == pytest.approx(64 + spec.settle + 1, abs=1)


def test_arms_that_generate_other_tokens_are_told_apart() -> None:
    """K07: a faster arm that does other work shows in the agreement of its tokens."""
    points = {name: {1: Point(1)} for name in ("a", "b")}
    points["a"][1].outputs = ((1, 2, 3, 4),)
    points["b"][1].outputs = ((1, 2, 9, 9, 9),)
    result = DecodeResult(SPEC, {}, points, {}, kept_alive=True)
    assert (result.same_tokens("a"), result.same_tokens("b")) == (1.0, 0.5)
