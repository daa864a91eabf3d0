"""Log-probabilities as they are reported: of the model's raw logits, before any change to them.

This is vLLM's default (``raw_logprobs``): temperature, penalties, biases, masks and truncation do not show,
so values can be compared between runs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from interlock.engine.batch import Batch, prompt_row_blocks
from interlock.engine.messages import TokenLogprob


def token_logprobs(
    logits: torch.Tensor, token_ids: npt.NDArray[np.int64], alternatives: npt.NDArray[np.int64]
) -> list[TokenLogprob]:
    """For each row of float32 logits [r, V] the log-probability of its token and of its best alternatives.

    Args:
        token_ids: int64 [r].
        alternatives: int64 [r], how many alternatives each row wants, best first.
    """
    scores = torch.log_softmax(logits, dim=-1)
    ids = torch.from_numpy(token_ids).to(logits.device)
    chosen = scores.gather(1, ids[:, None])[:, 0].tolist()
    most = min(int(alternatives.max(initial=0)), logits.shape[1])
    if most == 0:
        return [TokenLogprob(token, value) for token, value in zip(token_ids.tolist(), chosen, strict=True)]
    best = torch.topk(scores, most, dim=-1)
    values, indices = best.values.tolist(), best.indices.tolist()
    return [
        TokenLogprob(token, value, tuple(zip(indices[row][:count], values[row][:count], strict=True)))
        for row, (token, value, count) in enumerate(
            zip(token_ids.tolist(), chosen, alternatives.tolist(), strict=True)
        )
    ]


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
