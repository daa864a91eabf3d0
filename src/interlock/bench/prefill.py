"""Prefill: input tokens a second at the chunk that was really run.

A chunk size that is asked for is a wish: a capacity T, a page pool or short prompts may cut it. So the figure
is taken from the steps as they ran, and arms whose chunks differ are not compared.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from interlock.bench.arms import ArmSpec, plan_arm
from interlock.bench.pool import ArmPool, turns_of
from interlock.bench.prompts import token_prompts
from interlock.bench.session import Load, Observation, Session, Turn
from interlock.bench.statistics import Figure
from interlock.errors import Refusal
from interlock.moe.terms import Phase
from interlock.plan.facts import MachineFacts
from interlock.plan.launch_plan import LaunchPlan, Source

Tick = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PrefillSpec:
    """What is pinned for all arms.

    Attributes:
        chunks: tokens of one prefill step that are asked for, of all replicas together.
        prompt_tokens: tokens of every prompt.
        prompts: prompts of one run; 0 takes enough for ``MIN_STEPS`` full chunks.
    """

    chunks: tuple[int, ...]
    prompt_tokens: int
    prompts: int
    rounds: int
    seed: int

    def count(self, chunk: int) -> int:
        """Prompts of one run."""
        return self.prompts or max(1, -(-chunk * MIN_STEPS // self.prompt_tokens))


MIN_STEPS = 4


@dataclass(slots=True)
class ChunkPoint:
    """One arm at one asked chunk.

    Attributes:
        delivered: tokens of most steps' chunk (weighted by tokens), all replicas together; 0 before any.
        rounds: input tokens computed a second, for each round, over the steps at the delivered chunk.
        whole: input tokens computed a second over all prefill steps of a round.
        discarded: prefill steps at another chunk: the last of a run, or before all prompts had arrived.
        reason: why less was delivered than asked; "" when it was not.
    """

    asked: int
    delivered: int = 0
    rounds: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    steps: int = 0
    discarded: int = 0
    submitted_tokens: int = 0
    cached_tokens: int = 0
    reason: str = ""

    @property
    def figure(self) -> Figure | None:
        return Figure(tuple(self.rounds)) if self.rounds else None


@dataclass(slots=True)
class PrefillResult:
    """All points by arm and asked chunk."""

    spec: PrefillSpec
    plans: dict[str, dict[int, LaunchPlan]]
    points: dict[str, dict[int, ChunkPoint]]
    receipts: dict[str, dict[int, dict[str, object]]]
    kept_alive: bool

    def ratio(self, arm: str, chunk: int) -> float | str:
        """Speed of ``arm`` over the first arm's at the same asked chunk, or why they are not compared."""
        first = next(iter(self.points))
        mine, theirs = self.points[arm][chunk], self.points[first][chunk]
        if mine.figure is None or theirs.figure is None:
            return "not measured"
        if mine.delivered != theirs.delivered:
            return f"not compared: chunk {mine.delivered} against {theirs.delivered}"
        return mine.figure.median / theirs.figure.median


def plan_arms(
    arms: Sequence[ArmSpec], model: str, spec: PrefillSpec, facts: MachineFacts
) -> dict[str, dict[int, LaunchPlan]]:
    """arm -> asked chunk -> plan. A capacity that an arm sets itself may cut the chunk; that is the point."""
    plans: dict[str, dict[int, LaunchPlan]] = {}
    for arm in arms:
        plans[arm.name] = {}
        for chunk in spec.chunks:
            draft = plan_arm(arm, model, {"prefix_cache": False}, facts)
            per_replica = max(1, chunk // draft.attn_dp_size)
            pinned = {
                "prefix_cache": False,
                "chunked_prefill_size": per_replica,
                "max_running_requests": -(-spec.count(chunk) // draft.attn_dp_size),
                "max_model_len": spec.prompt_tokens + 2,
            }
            cuts = {"chunked_prefill_size": "moe_prefill_capacity"}
            plans[arm.name][chunk] = plan_arm(arm, model, pinned, facts, yields_to=cuts)
    return plans


def key_of(arm: str, chunk: int) -> str:
    """Name of an arm at a chunk in the pool: each chunk is an engine of its own."""
    return f"{arm}@{chunk}"


def run_prefill(
    pool: ArmPool, plans: dict[str, dict[int, LaunchPlan]], spec: PrefillSpec, tick: Tick
) -> PrefillResult:
    """Measure every arm at every chunk."""
    points = {arm: {chunk: ChunkPoint(chunk) for chunk in spec.chunks} for arm in plans}
    warm: set[int] = set()
    for number, arm, chunk in turns_of(list(plans), spec.chunks, spec.rounds, keep=pool.keep):
        tick(f"round {number + 1}, {arm}, chunk {chunk}")
        session = pool.get(key_of(arm, chunk))
        if id(session) not in warm:
            warm.add(id(session))
            measure(session, spec, chunk, -1 - number)
        take(points[arm][chunk], measure(session, spec, chunk, number), spec, plans[arm][chunk])
    return PrefillResult(spec, plans, points, pool.receipts, pool.keep)


def measure(session: Session, spec: PrefillSpec, chunk: int, number: int) -> Observation:
    """One run of fresh prompts, one answer token each, so that no decode step comes between."""
    card = session.plan.card
    special = (*card.eos_token_ids, card.bos_token_id, card.pad_token_id)
    prompts = token_prompts(
        spec.count(chunk),
        spec.prompt_tokens,
        vocab_size=card.vocab_size,
        avoid=[token for token in special if token is not None],
        seed=spec.seed,
        salt=(chunk, number + spec.rounds + 1),
    )
    return session.run(Load(prompts=tuple(prompts), max_tokens=1))


def take(point: ChunkPoint, observed: Observation, spec: PrefillSpec, plan: LaunchPlan) -> None:
    """Take in one round.

    Raises:
        Refusal: no prefill step was reported.
    """
    steps = [turn for turn in observed.turns if turn.phase is Phase.PREFILL and turn.tokens]
    if not steps:
        raise Refusal(option="bench prefill", given="", rule="the engine reported no prefill step")
    point.delivered = point.delivered or delivered_chunk(steps)
    counted = [turn for turn in steps if turn.tokens == point.delivered]
    point.discarded += len(steps) - len(counted)
    point.steps += len(counted)
    point.submitted_tokens += spec.count(point.asked) * spec.prompt_tokens
    point.cached_tokens += observed.cached_tokens
    point.whole.append(sum(turn.tokens for turn in steps) / sum(turn.seconds for turn in steps))
    if counted:
        point.rounds.append(point.delivered / statistics.median(turn.seconds for turn in counted))
    point.reason = cut_reason(point, spec, plan)


def delivered_chunk(steps: Sequence[Turn]) -> int:
    """The chunk in which most tokens were computed; the larger one of equals."""
    weight: Counter[int] = Counter()
    for turn in steps:
        weight[turn.tokens] += turn.tokens
    return max(weight, key=lambda tokens: (weight[tokens], tokens))


def cut_reason(point: ChunkPoint, spec: PrefillSpec, plan: LaunchPlan) -> str:
    """Why fewer tokens than asked were computed in a step."""
    if point.delivered >= point.asked:
        return ""
    limit = plan.chunked_prefill_size * plan.attn_dp_size
    if point.delivered == limit:
        capacity = plan.provenance.get("moe_prefill_capacity")
        if capacity is not None and capacity.source is Source.USER:
            return (
                f"--moe-prefill-capacity {plan.moe_prefill_capacity} ({capacity.reason}) cut the chunk "
                f"from {point.asked} to {point.delivered}"
            )
        return f"--chunked-prefill-size {plan.chunked_prefill_size} on each of {plan.attn_dp_size} replicas"
    if spec.count(point.asked) * spec.prompt_tokens < point.asked:
        return f"only {spec.count(point.asked) * spec.prompt_tokens} tokens were submitted at once"
    return f"the scheduler made chunks of {point.delivered} (pages, or prompts spread over replicas)"
