"""An EngineClient that plays scripted tokens, and records what the server asked of it."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

from interlock.engine.load_history import LoadHistory
from interlock.engine.messages import AddRequest, SchedulerStats, TokenDelta, TokenLogprob
from interlock.errors import EngineDeadError
from interlock.plan.card import AttentionCard, LayerCard, ModelCard
from interlock.plan.launch_plan import LaunchPlan
from tests.plans import make_plan

EOS = 2
FIRST_BYTE = 3
VOCAB = 512
PADDED_VOCAB = 576


def fake_plan(**overrides: object) -> LaunchPlan:
    attention = AttentionCard(
        num_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=8, rope_theta=1e4, rotary_dim=8
    )
    card = ModelCard(
        family="fake",
        architecture="Fake",
        vocab_size=PADDED_VOCAB,
        hidden_size=32,
        intermediate_size=64,
        layers=(LayerCard(attention=attention, is_moe=False),),
        experts=None,
        norm_eps=1e-5,
        max_position=4096,
        tie_word_embeddings=False,
        dtype="float32",
        weight_format="float32",
        eos_token_ids=(EOS,),
    )
    return make_plan(card, **{"max_model_len": 128, "served_model_name": "tiny", **overrides})


def byte_ids(text: str) -> list[int]:
    """One token for each byte of ``text``."""
    return [byte + FIRST_BYTE for byte in text.encode()]


@dataclass(frozen=True)
class Play:
    """How a request is answered. An endless tail of "z" follows ``tokens``.

    ``per_delta`` tokens come in one delta, ``delay`` seconds apart; ``error_at`` fails the request at that
    token (``refused``: by its own doing); ``dies_at`` raises EngineDeadError there; ``hold`` blocks before
    the first token until released.
    """

    tokens: Sequence[int] = ()
    per_delta: int = 1
    delay: float = 0.0
    cached: int = 0
    error_at: int | None = None
    refused: bool = False
    dies_at: int | None = None
    hold: bool = False


def scored(token_id: int, position: int, alternatives: int) -> TokenLogprob:
    """Deterministic logprobs; the last of five alternatives is minus infinity."""
    chosen = -0.25 - position / 64
    top = [(token_id, chosen)] + [
        ((token_id * 7 + rank * 13 + position) % VOCAB, -1.0 - rank) for rank in range(1, alternatives)
    ]
    if alternatives >= 5:
        top[-1] = (top[-1][0], -math.inf)
    return TokenLogprob(token_id, chosen, tuple(top[:alternatives]))


@dataclass
class FakeEngine:
    """``play`` chooses the answer for a request; by default a seeded walk over the vocabulary.

    As in a real client, ending or cancelling a stream makes the engine forget the request, so that an abort
    after it has no effect; ``aborted`` lists effective aborts only.
    """

    plan: LaunchPlan = field(default_factory=fake_plan)
    receipts: dict[int, dict[str, object]] = field(default_factory=lambda: {0: {"tp_size": 1}})
    play: Callable[[AddRequest], Play] | None = None
    requests: list[AddRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    live: set[str] = field(default_factory=set)
    emitted: dict[str, int] = field(default_factory=dict)
    flushes: int = 0
    reason: str | None = None
    extra_stats: SchedulerStats = field(default_factory=SchedulerStats)
    released: bool = False
    history: LoadHistory = field(default_factory=LoadHistory)

    def reset(self) -> None:
        """Back to a fresh engine with the same plan."""
        fresh = FakeEngine(plan=self.plan)
        for name in (
            "play",
            "requests",
            "aborted",
            "live",
            "emitted",
            "flushes",
            "reason",
            "extra_stats",
            "released",
            "history",
        ):
            setattr(self, name, getattr(fresh, name))

    def script(
        self, text: str = "", *, tokens: Sequence[int] | None = None, eos: bool = True, **play: object
    ) -> None:
        """Answer every request with the bytes of ``text`` (or ``tokens``), then EOS."""
        ids = list(tokens) if tokens is not None else byte_ids(text)
        fixed = replace(Play(), tokens=(*ids, *([EOS] if eos else [])), **play)
        self.play = lambda request: fixed

    async def stream(self, request: AddRequest) -> AsyncIterator[TokenDelta]:
        assert request.sampling.n == 1
        assert request.request_id not in self.live
        assert request.sampling.max_tokens >= 0
        self.requests.append(request)
        if self.reason is not None:
            raise EngineDeadError(self.reason)
        self.live.add(request.request_id)
        try:
            async for delta in self._deltas(request, (self.play or _random_play)(request)):
                yield delta
        finally:
            self.live.discard(request.request_id)

    async def _deltas(self, request: AddRequest, play: Play) -> AsyncIterator[TokenDelta]:
        sampling, name = request.sampling, request.request_id
        while play.hold and not self.released and name not in self.aborted:
            await asyncio.sleep(0.002)
        first, sent, finish = True, 0, None
        while finish is None:
            await asyncio.sleep(play.delay)
            tokens: list[int] = []
            stop_token = None
            if name in self.aborted:
                yield TokenDelta(request_id=name, finish_reason="abort")
                return
            if sampling.max_tokens == 0:
                finish = "length"
            while finish is None and len(tokens) < play.per_delta:
                position = sent + len(tokens)
                if play.dies_at == position:
                    raise EngineDeadError("rank 0 died")
                if play.error_at == position:
                    yield TokenDelta(
                        request_id=name, finish_reason="error", error="scripted fault", refused=play.refused
                    )
                    return
                token = play.tokens[position] if position < len(play.tokens) else byte_ids("z")[0]
                tokens.append(token)
                may_stop = position + 1 >= sampling.min_tokens
                stops = token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos)
                if may_stop and stops:
                    finish, stop_token = "stop", token
                elif position + 1 >= sampling.max_tokens:
                    finish = "length"
            logprobs = ()
            if sampling.logprobs is not None:
                logprobs = tuple(scored(t, sent + i, sampling.logprobs) for i, t in enumerate(tokens))
            prompt_logprobs = ()
            if first and sampling.prompt_logprobs is not None:
                count = sampling.prompt_logprobs
                rest = [scored(t, i, count) for i, t in enumerate(request.token_ids) if i]
                prompt_logprobs = (None, *rest)
            sent += len(tokens)
            self.emitted[name] = sent
            yield TokenDelta(
                request_id=name,
                token_ids=tuple(tokens),
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                finish_reason=finish,
                stop_token_id=stop_token,
                prompt_tokens=len(request.token_ids) if first else 0,
                cached_tokens=play.cached if first else 0,
                queue_seconds=0.001 if first else None,
            )
            first = False

    async def abort(self, request_id: str) -> None:
        await asyncio.sleep(0)
        if request_id in self.live:
            self.aborted.append(request_id)

    async def flush_cache(self) -> None:
        self.flushes += 1

    def health(self) -> str | None:
        return self.reason

    def stats(self) -> tuple[SchedulerStats, ...]:
        return (self.extra_stats,)


def _random_play(request: AddRequest) -> Play:
    seed = hash((request.token_ids, request.sampling.seed))
    rng = random.Random(seed)
    return Play(tokens=[rng.randrange(EOS + 1, VOCAB) for _ in range(rng.randrange(1, 30))] + [EOS])
