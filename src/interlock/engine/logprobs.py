"""Log-probabilities as they are reported: of the model's raw logits, before any change to them.

This is vLLM's default (``raw_logprobs``): temperature, penalties, biases, masks and truncation do not show,
so values can be compared between runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from interlock.engine.batch import Batch, prompt_row_blocks
from interlock.engine.messages import TokenLogprob
from interlock.engine.upload import download


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Tokens of r rows and their log-probabilities, where they were computed.

    Attributes:
        tokens: int64 [r]; chosen: float32 [r].
        top, top_ids: float32 and int64 [r, K], best alternatives of each row.
        alternatives: int64 [r] on the host, how many of them each row wants.
    """

    tokens: torch.Tensor
    chosen: torch.Tensor
    top: torch.Tensor
    top_ids: torch.Tensor
    alternatives: npt.NDArray[np.int64]

    def downloaded(self) -> ScoredTokens:
        """The same on the host, filled when the work queued on the device so far is done."""
        return ScoredTokens(
            download(self.tokens),
            download(self.chosen),
            download(self.top),
            download(self.top_ids),
            self.alternatives,
        )

    def entries(self) -> list[TokenLogprob]:
        """One entry for each row; waits for the device."""
        tokens, chosen = self.tokens.tolist(), self.chosen.tolist()
        if self.top.shape[1] == 0:
            return [TokenLogprob(token, value) for token, value in zip(tokens, chosen, strict=True)]
        values, indices = self.top.tolist(), self.top_ids.tolist()
        return [
            TokenLogprob(token, value, tuple(zip(indices[row][:count], values[row][:count], strict=True)))
            for row, (token, value, count) in enumerate(
                zip(tokens, chosen, self.alternatives.tolist(), strict=True)
            )
        ]


def score_tokens(
    logits: torch.Tensor, tokens: torch.Tensor, alternatives: npt.NDArray[np.int64]
) -> ScoredTokens:
    """For each row of float32 logits [r, V] the log-probability of its token and of its best alternatives.

    Args:
        tokens: int64 [r], on the device of the logits; an id out of range gets an arbitrary value.
        alternatives: int64 [r], how many alternatives each row wants, best first.
    """
    scores = torch.log_softmax(logits, dim=-1)
    chosen = scores.gather(1, tokens.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    best = torch.topk(scores, min(int(alternatives.max(initial=0)), logits.shape[1]), dim=-1)
    return ScoredTokens(tokens, chosen, best.values, best.indices, alternatives)


def token_logprobs(
    logits: torch.Tensor, token_ids: npt.NDArray[np.int64], alternatives: npt.NDArray[np.int64]
) -> list[TokenLogprob]:
    """As ``score_tokens`` for int64 [r] ids on the host, as entries."""
    return score_tokens(logits, torch.from_numpy(token_ids).to(logits.device), alternatives).entries()


def prompt_logprobs(
    batch: Batch, hidden: torch.Tensor, logits: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[tuple[TokenLogprob, ...], ...]:
    """Prompt log-probabilities of a step, one tuple for each entry of ``batch.prompt_scores``.

    Logits are computed in the blocks of ``prompt_row_blocks``, so [chunk, V] is never held in full.

    Args:
        hidden: [n, h], the model's output for the step.
        logits: hidden rows [m, h] -> float32 [m, V]; called once a block, on every rank of the replica.
    """
    wanted = batch.prompt_scores
    if not wanted:
        return ()
    targets = np.concatenate([scores.targets for scores in wanted])
    counts = np.concatenate(
        [np.full(len(scores.targets), scores.request.params.prompt_logprobs or 0) for scores in wanted]
    )
    entries: list[TokenLogprob] = []
    for rows in prompt_row_blocks(batch.arrays):
        block = slice(len(entries), len(entries) + len(rows))
        values = logits(hidden[torch.from_numpy(rows).to(hidden.device)])
        entries += token_logprobs(values, targets[block], counts[block])
    result = []
    start = 0
    for scores in wanted:
        end = start + len(scores.targets)
        result.append(tuple(entries[start:end]))
        start = end
    return tuple(result)
