"""Scheduler and sampler together: pressure, companions and chunks change no token and no log-probability."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from interlock.engine.messages import TokenLogprob
from interlock.engine.sampled import SampledTokens
from interlock.engine.sampler import Sampler
from interlock.engine.token_counts import TokenCounts
from tests.engine.simulation import VOCAB, Simulation, check_pages, next_token, sim_plan


class SampledSimulation(Simulation):
    """Like ``Simulation``, but the model gives logits (a function of the history) and the sampler draws."""

    def drive(self) -> None:
        sampler = Sampler()
        while self.scheduler.has_work:
            batch = self.scheduler.schedule()
            assert batch is not None
            scores: SampledTokens = self.model.forward(batch)
            rows = [logits_of(request.tokens) for request in batch.requests]
            logits = torch.stack(rows) if rows else torch.zeros(0, VOCAB)
            chosen = sampler.sample(logits, batch)
            self.receive(
                self.scheduler.commit(
                    batch,
                    SampledTokens(chosen.token_ids, chosen.logprobs, chosen.errors, scores.prompt_logprobs),
                )
            )
            check_pages(self.scheduler)

    def logprobs(self, name: str) -> list[TokenLogprob]:
        return [entry for delta in self.streams[name].deltas for entry in delta.logprobs]


def logits_of(history: np.ndarray) -> torch.Tensor:
    seed = next_token(history) * 1000 + len(history)
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


WORK: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 7, "logprobs": 2},
    {"temperature": 0.7, "top_p": 0.8, "seed": 8, "frequency_penalty": 0.7},
    {"temperature": 0.0, "repetition_penalty": 1.5, "logprobs": 0},
    {"temperature": 1.3, "top_k": 9, "seed": -1, "presence_penalty": 0.4, "min_tokens": 30},
    {"temperature": 1.0, "min_p": 0.05, "seed": 1 << 63, "logit_bias": {4: 3.0}, "logprobs": 1},
    {"temperature": 0.0, "prompt_logprobs": 0},
]


def run(indices: list[int], **plan: Any) -> SampledSimulation:
    sim = SampledSimulation(sim_plan(max_model_len=96, **plan))
    for index in indices:
        prompt = [(index * 5 + j * j) % VOCAB for j in range(20 + 7 * index)]
        sim.add(prompt, str(index), max_tokens=40, **WORK[index])
    sim.drive()
    return sim


@pytest.mark.parametrize("windows", [(None,), (None, 8)])
@pytest.mark.parametrize("chunk", [7, 64])
def test_pressure_and_companions_change_no_bit(windows: tuple[int | None, ...], chunk: int) -> None:
    """F13, G11, G22: six requests in a pool for one and a half, against each one alone in an empty server:
    seeded draws go on at their position after a retraction, and penalties keep their counts."""
    crowded = run(list(range(6)), windows=windows, full_pages=32, window_pages=16, chunked_prefill_size=chunk)
    assert crowded.scheduler.stats().retractions_total > 0
    for index in range(6):
        alone = run([index], windows=windows, full_pages=200, window_pages=200, prefix_cache=False)
        name = str(index)
        assert crowded.streams[name].tokens == alone.streams[name].tokens
        assert crowded.streams[name].finish == alone.streams[name].finish
        assert crowded.logprobs(name) == alone.logprobs(name)
        wants = WORK[index].get("logprobs") is not None
        assert len(alone.logprobs(name)) == (len(alone.streams[name].tokens) if wants else 0)
    crowded.verify_empty()


def test_token_counts_grow_and_are_incremental() -> None:
    """Counts after many small updates equal those of one large update, over more than 64 distinct ids."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 300, size=500).astype(np.int32)
    many, once = TokenCounts(), TokenCounts()
    for end in range(1, 501, 7):
        many.update(tokens[:end], 120)
    many.update(tokens, 120)
    once.update(tokens, 120)
    for counts in (many, once):
        assert sorted(counts.ids.tolist()) == sorted(set(tokens.tolist()))
        generated = dict(zip(counts.ids.tolist(), counts.generated.tolist(), strict=True))
        assert all(generated[token] == np.sum(tokens[120:] == token) for token in generated)
