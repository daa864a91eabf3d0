"""Decode: ms per token for each global batch, arms in turn over several rounds.

A figure is the time of a step that ran with exactly the batch that was asked for, since in such a step every
request gets one token. Steps at another batch (while the batch fills and empties, or after a retraction) and
the first full ones are discarded and counted.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from interlock.bench.arms import ArmSpec, plan_arm
from interlock.bench.pool import ArmPool, check_room, turns_of
from interlock.bench.prompts import token_prompts
from interlock.bench.session import Load, Observation, Session, Turn
from interlock.bench.statistics import Crossover, Figure, crossover, growth
from interlock.moe.terms import Phase
from interlock.plan.facts import MachineFacts
from interlock.plan.launch_plan import LaunchPlan

RAMP_SLACK = 8
Tick = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DecodeSpec:
    """What is pinned for all arms.

    Attributes:
        batches: global batches, ascending.
        context: tokens of every prompt.
        steps: full-batch steps to measure in a round.
        settle: full-batch steps before those.
        seed: of the prompts; the same prompts go to every arm.
    """

    batches: tuple[int, ...]
    context: int
    steps: int
    rounds: int
    seed: int
    settle: int = 2

    def sequences(self, batch: int, plan: LaunchPlan) -> int:
        """Sequences of each replica."""
        return -(-batch // plan.attn_dp_size)

    def max_tokens(self, batch: int, plan: LaunchPlan) -> int:
        """Longest answer: prefill alternates with decode steps, and the first request must outlive that."""
        ramp = -(-self.sequences(batch, plan) * self.context // plan.chunked_prefill_size)
        return self.settle + self.steps + ramp + ramp // 4 + RAMP_SLACK

    def longest(self, plan: LaunchPlan) -> int:
        """Tokens of the longest sequence."""
        return self.context + self.max_tokens(max(self.batches), plan)


@dataclass(slots=True)
class Point:
    """One arm at one batch.

    Attributes:
        rounds: median ms of a step, for each round that had any.
        steps: ms of every step that counted.
        discarded: decode steps that ran at another batch, or before the batch settled.
        other_batches: batch -> how many decode steps ran at it instead.
        contexts: mean sequence length at the first and the last step that counted, over rounds.
        client: ms between steps as they reached this process, for each round: what the ranks' clocks say must
            agree with it.
        outputs: tokens of the last round, for comparing arms.
    """

    batch: int
    rounds: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    discarded: int = 0
    other_batches: dict[int, int] = field(default_factory=dict)
    contexts: list[tuple[float, float]] = field(default_factory=list)
    client: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    outputs: tuple[tuple[int, ...], ...] = ()
    prompts: tuple[tuple[int, ...], ...] = ()

    @property
    def figure(self) -> Figure | None:
        return Figure(tuple(self.rounds)) if self.rounds else None

    def add(self, observed: Observation, spec: DecodeSpec) -> None:
        """Take in one round."""
        decode = [turn for turn in observed.turns if turn.phase is Phase.DECODE]
        full = [turn for turn in decode if turn.sequences == self.batch]
        counted = full[spec.settle : spec.settle + spec.steps]
        self.discarded += len(decode) - len(counted)
        for turn in decode:
            if turn.sequences != self.batch:
                self.other_batches[turn.sequences] = self.other_batches.get(turn.sequences, 0) + 1
        self.cached_tokens += observed.cached_tokens
        self.outputs = observed.outputs
        if counted:
            times = [turn.seconds * 1e3 for turn in counted]
            self.steps += times
            self.rounds.append(statistics.median(times))
            lengths = [turn.kv_tokens / turn.sequences for turn in counted]
            self.contexts.append((lengths[0], lengths[-1]))
            self.client += _between(decode, counted)


def _between(decode: Sequence[Turn], counted: Sequence[Turn]) -> list[float]:
    """Mean ms from one counted step to the next as they were received; nothing if others came between."""
    first = next(index for index, turn in enumerate(decode) if turn is counted[0])
    if len(counted) < 2 or any(a is not b for a, b in zip(decode[first:], counted, strict=False)):
        return []
    return [(counted[-1].received - counted[0].received) * 1e3 / (len(counted) - 1)]


@dataclass(slots=True)
class DecodeResult:
    """All points by arm and batch, and the receipts of the arms."""

    spec: DecodeSpec
    plans: dict[str, LaunchPlan]
    points: dict[str, dict[int, Point]]
    receipts: dict[str, dict[int, dict[str, object]]]
    kept_alive: bool

    def figures(self, arm: str) -> dict[int, Figure]:
        """Figures of an arm by batch, where there are any."""
        found = {batch: point.figure for batch, point in self.points[arm].items()}
        return {batch: figure for batch, figure in found.items() if figure is not None}

    def growth(self, arm: str) -> float | None:
        return growth(self.figures(arm))

    def crossovers(self) -> list[Crossover]:
        """For every pair of arms that cross."""
        arms = list(self.points)
        pairs = [(a, b) for i, a in enumerate(arms) for b in arms[i + 1 :]]
        found = [crossover(a, self.figures(a), b, self.figures(b)) for a, b in pairs]
        return [each for each in found if each is not None]

    def same_tokens(self, arm: str) -> float:
        """Share of the generated tokens of the last round in which ``arm`` agrees with the first arm, over
        the steps that both ran. Arms of one model that differ here are not doing the same work."""
        first = next(iter(self.points))
        same = total = 0
        for batch, point in self.points[arm].items():
            for mine, theirs in zip(point.outputs, self.points[first][batch].outputs, strict=False):
                length = min(len(mine), len(theirs))
                total += length
                same += sum(a == b for a, b in zip(mine[:length], theirs[:length], strict=True))
        return same / total if total else 1.0


def plan_arms(
    arms: Sequence[ArmSpec], model: str, spec: DecodeSpec, facts: MachineFacts
) -> dict[str, LaunchPlan]:
    """Plans with room for the largest batch, and with the prefix cache off unless an arm asks for it."""
    plans = {}
    for arm in arms:
        draft = plan_arm(arm, model, {"prefix_cache": False}, facts)
        sequences = spec.sequences(max(spec.batches), draft)
        pinned = {
            "prefix_cache": False,
            "max_running_requests": sequences,
            "max_model_len": spec.longest(draft),
        }
        plans[arm.name] = plan_arm(arm, model, pinned, facts)
        check_room(arm.name, plans[arm.name], sequences, spec.longest(draft))
    return plans


def run_decode(pool: ArmPool, spec: DecodeSpec, tick: Tick) -> DecodeResult:
    """Measure every arm of ``pool`` at every batch. ``tick`` is told each unit of work before it starts."""
    points = {name: {batch: Point(batch) for batch in spec.batches} for name in pool.plans}
    warm: set[tuple[int, int]] = set()
    for number, arm, batch in turns_of(list(pool.plans), spec.batches, spec.rounds, keep=pool.keep):
        tick(f"round {number + 1}, {arm}, batch {batch}")
        session = pool.get(arm)
        if (id(session), batch) not in warm:
            warm.add((id(session), batch))
            measure(session, spec, batch, -1 - number, steps=1)
        prompts, observed = measure(session, spec, batch, number, steps=spec.steps)
        points[arm][batch].prompts = prompts
        points[arm][batch].add(observed, spec)
    return DecodeResult(spec, dict(pool.plans), points, pool.receipts, pool.keep)


def measure(
    session: Session, spec: DecodeSpec, batch: int, number: int, *, steps: int
) -> tuple[tuple[tuple[int, ...], ...], Observation]:
    """One batch of fresh prompts, decoded until ``settle + steps`` steps had all of them."""
    card = session.plan.card
    special = {*card.eos_token_ids, card.bos_token_id, card.pad_token_id} - {None}
    prompts = tuple(
        token_prompts(
            batch,
            spec.context,
            vocab_size=card.vocab_size,
            avoid=[token for token in special if token is not None],
            seed=spec.seed,
            salt=(batch, number + spec.rounds + 1),
        )
    )
    load = Load(
        prompts=prompts,
        max_tokens=spec.max_tokens(batch, session.plan),
        batch=batch,
        steps=spec.settle + steps,
    )
    return prompts, session.run(load)


def tokens_per_second(figures: Mapping[int, Figure]) -> dict[int, float]:
    """Output tokens a second of the whole batch: batch / time of a step."""
    return {batch: batch * 1e3 / figure.median for batch, figure in figures.items()}
