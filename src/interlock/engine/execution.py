"""How the leader of a replica runs a step: forward, logits and sampling, queued, not waited for."""

from __future__ import annotations

import torch

from interlock.engine.batch import Batch
from interlock.engine.device_sampling import Best
from interlock.engine.launched import Launched
from interlock.engine.model_runner import ModelRunner
from interlock.engine.sampler import Sampler
from interlock.engine.upload import upload


class StepExecutor:
    """Runs the batches of one scheduler; a decode step is a CUDA graph where one fits."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._sampler = Sampler(runner.kernels.draw)

    def launch(self, batch: Batch, after: Launched | None = None) -> Launched:
        """Start a step.

        Args:
            after: the step before, from whose tokens a batch that was scheduled ahead goes on.
        """
        tokens = None
        if batch.sources is not None:
            assert after is not None, "a step that was scheduled ahead follows another"
            tokens = _taken(after.tokens, batch)
        replayed = self._runner.replay(batch.arrays, tokens)
        if replayed is not None:
            return self._sampler.start(replayed.logits, batch, best=Best(replayed.best, replayed.best_ids))
        hidden = self._runner.forward(batch.arrays, tokens)
        return self._sampler.sample_step(batch, hidden, self._runner.logits)


def _taken(tokens: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The tokens [n] of ``batch``; a row that failed has none, and computes whatever token 0 gives."""
    assert batch.sources is not None
    if len(batch.sources) != len(tokens):
        tokens = tokens[upload(batch.sources, tokens.device)]
    return tokens.clamp(min=0)
