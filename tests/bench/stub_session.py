"""An engine with known delays: a scheduler in miniature whose steps take what a cost model says."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from interlock.bench.session import Load, Observation, Turn, TurnLog
from interlock.engine.messages import StepRecord
from interlock.moe.terms import Phase
from interlock.plan.card import AttentionCard, LayerCard, ModelCard
from interlock.plan.launch_plan import LaunchPlan
from tests.plans import make_plan


def stub_plan(**overrides: Any) -> LaunchPlan:
    attention = AttentionCard(
        num_heads=1, num_kv_heads=1, head_dim=8, v_head_dim=8, rope_theta=1e4, rotary_dim=8
    )
    card = ModelCard(
        family="fake",
        architecture="Fake",
        vocab_size=1000,
        hidden_size=8,
        intermediate_size=8,
        layers=(LayerCard(attention=attention, is_moe=False),),
        experts=None,
        norm_eps=1e-5,
        max_position=1 << 16,
        tie_word_embeddings=False,
        dtype="float32",
        weight_format="float32",
        eos_token_ids=(2,),
    )
    changes = {"max_running_requests": 1 << 16, "max_model_len": 1 << 15, "model": "stub", **overrides}
    return make_plan(card, **changes)


@dataclass
class StubSession:
    """Prefill in chunks of the plan, alternating with decode steps, one token a step and request.

    ``decode`` and ``prefill`` give the seconds of a step of so many sequences or tokens; ``jitter`` is the
    largest relative deviation; the first decode step of each batch takes ``compile`` seconds more;
    ``retract_every`` drops one sequence from every so many decode steps.
    """

    plan: LaunchPlan
    decode: Callable[[int], float]
    prefill: Callable[[int], float] = lambda tokens: tokens * 1e-5
    jitter: float = 0.0
    compile: float = 0.0
    retract_every: int = 0
    receipts: dict[int, dict[str, object]] = field(default_factory=lambda: {0: {}})
    closed: bool = False
    loads: list[Load] = field(default_factory=list)
    _compiled: set[int] = field(default_factory=set)
    _random: random.Random = field(default_factory=lambda: random.Random(1))
    _now: float = 0.0

    def close(self) -> None:
        self.closed = True

    def run(self, load: Load) -> Observation:
        self.loads.append(load)
        log = TurnLog(self.plan.attn_dp_size)
        waiting = [len(prompt) for prompt in load.prompts]
        left: list[int] = []
        made = [0] * len(waiting)
        full, turn, decodes, was_prefill = 0, 0, 0, False
        while any(waiting) or any(left):
            turn += 1
            room = self.plan.max_running_requests - sum(tokens > 0 for tokens in left)
            if any(waiting) and room > 0 and not (was_prefill and any(left)):
                was_prefill = True
                tokens, sequences = self._fill(waiting, left, load.max_tokens - 1, room)
                seconds = self.prefill(tokens)
                self._tell(log, turn, Phase.PREFILL, tokens, sequences, tokens, seconds)
                continue
            was_prefill = False
            running = [index for index, tokens in enumerate(left) if tokens > 0]
            decodes += 1
            if self.retract_every and decodes % self.retract_every == 0:
                running = running[:-1]
            for index in running:
                left[index] -= 1
                made[index] += 1
            lengths = sum(len(load.prompts[index]) + made[index] for index in running)
            seconds = self.decode(len(running)) + self._first(len(running))
            done = self._tell(log, turn, Phase.DECODE, len(running), len(running), lengths, seconds)
            full += done is not None and done.sequences == load.batch
            if load.steps and full >= load.steps:
                break
        outputs = tuple(tuple(range(count)) for count in made)
        return Observation(tuple(log.turns), outputs)

    def _fill(self, waiting: list[int], left: list[int], more: int, room: int) -> tuple[int, int]:
        """One chunk of the plan's size: (tokens, sequences)."""
        budget, tokens, sequences = self.plan.chunked_prefill_size * self.plan.attn_dp_size, 0, 0
        for index, missing in enumerate(waiting):
            if missing and budget and room:
                part = min(missing, budget)
                waiting[index] -= part
                budget, tokens, sequences = budget - part, tokens + part, sequences + 1
                if not waiting[index]:
                    left.append(more)
                    room -= 1
        return tokens, sequences

    def _first(self, batch: int) -> float:
        if batch in self._compiled:
            return 0.0
        self._compiled.add(batch)
        return self.compile

    def _tell(
        self, log: TurnLog, turn: int, phase: Phase, tokens: int, sequences: int, kv: int, seconds: float
    ) -> Turn | None:
        """Records of all replicas, which share the work and end together."""
        seconds *= 1 + self._random.uniform(-self.jitter, self.jitter)
        replicas, done = self.plan.attn_dp_size, None
        for replica in range(replicas):

            def share(total: int, replica: int = replica) -> int:
                return total // replicas + (replica < total % replicas)

            record = StepRecord(
                turn=turn,
                phase=phase.value,
                tokens=share(tokens),
                sequences=share(sequences),
                kv_tokens=share(kv),
                begun=self._now,
                ended=self._now + seconds,
            )
            done = log.add(replica, record, record.ended)
        self._now += seconds
        return done
