"""Chooses the next token of each row. What a request draws depends on its own logits, seed and position only.

Order, for one row of float32 logits:

1. log-probabilities are taken from the raw logits (see ``logprobs.py``);
2. penalties, then ``logit_bias``, then the ``min_tokens`` ban of end tokens, then a mask of allowed tokens;
3. greedy requests (temperature 0) take the largest, the lowest id among equals;
4. others: divide by temperature, then ``min_p``, then ``top_k``, then ``top_p`` on what is left (tokens that
   tie with the last one kept are kept too);
5. one uniform number of the counter-based generator at (seed, position) is looked up in the cumulative
   distribution in order of token id (float64). So neither companions nor retraction change a draw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch

from interlock.engine.batch import Batch, SamplingRows
from interlock.engine.device_sampling import NOT_FINITE, NOTHING_ALLOWED, Best, draw_on_device
from interlock.engine.draw import Draw
from interlock.engine.draw_host import draw_host
from interlock.engine.grammar_masks import apply_grammars
from interlock.engine.launched import Done, Launched
from interlock.engine.logprobs import prompt_logprobs, token_logprobs
from interlock.engine.messages import TokenLogprob
from interlock.engine.penalties import adjust_row
from interlock.engine.sampled import SampledTokens
from interlock.engine.upload import upload
from interlock.kernels import torch_draw

BLOCK_ELEMENTS = 1 << 20
NO_MASKS: Mapping[int, torch.Tensor] = {}

Int64s = npt.NDArray[np.int64]


class Sampler:
    """Stateless; what it remembers of a request is kept on the request.

    Args:
        draw: ``Kernels.draw`` of the kernels that computed the logits; not used on a CPU.
    """

    def __init__(self, draw: Draw = torch_draw.draw) -> None:
        self._draw = draw

    def sample_step(
        self,
        batch: Batch,
        hidden: torch.Tensor,
        logits: Callable[[torch.Tensor], torch.Tensor],
        *,
        masks: Mapping[int, torch.Tensor] = NO_MASKS,
    ) -> Launched:
        """Prompt log-probabilities and next tokens of a step.

        Args:
            hidden: [n, h], the model's output for ``batch``.
            logits: hidden rows [m, h] -> float32 [m, V].
            masks: see ``sample``.
        """
        scores = prompt_logprobs(batch, hidden, logits)
        rows = batch.arrays.sample_rows
        if not len(rows):
            return Done(SampledTokens(token_ids=np.zeros(0, dtype=np.int64), prompt_logprobs=scores))
        return self.start(logits(hidden[upload(rows, hidden.device)]), batch, masks=masks, scores=scores)

    def start(
        self,
        logits: torch.Tensor,
        batch: Batch,
        *,
        best: Best | None = None,
        masks: Mapping[int, torch.Tensor] = NO_MASKS,
        scores: tuple[tuple[TokenLogprob, ...], ...] = (),
    ) -> Launched:
        """``sample``, on a device without waiting for it.

        Args:
            best: the rows' largest logits where they are known already.
            scores: prompt log-probabilities to hand on.
        """
        if logits.device.type == "cpu":
            chosen = self.sample(logits, batch, masks=masks)
            return Done(SampledTokens(chosen.token_ids, chosen.logprobs, chosen.errors, scores))
        return draw_on_device(logits, batch, best=best, masks=masks, draw=self._draw, prompt_logprobs=scores)

    def sample(
        self, logits: torch.Tensor, batch: Batch, *, masks: Mapping[int, torch.Tensor] = NO_MASKS
    ) -> SampledTokens:
        """One token for each row, now. On a CPU; ``draw_on_device`` does the same elsewhere.

        Args:
            logits: float32 [m, V], one row for each of ``batch.requests``; not changed.
            masks: row -> bool [V], the tokens that a row may take beside its grammar; rows without are free.

        Returns:
            Tokens; a row whose logits are not finite, or that may take no token, gets an error instead and
            does not disturb the others.
        """
        sampling = batch.sampling
        greedy = _argmax(logits)
        errors = _not_finite(logits, greedy)
        if sampling.plain_greedy and not masks:
            return _result(greedy, {}, errors)
        changed = set(np.flatnonzero(sampling.adjusts).tolist()) | masks.keys()
        tokens = greedy.copy()
        adjusted = logits
        if changed:
            adjusted = logits.clone()
            for row in sorted(changed - errors.keys()):
                adjust_row(adjusted[row], batch.requests[row])
                if row in masks:
                    adjusted[row].masked_fill_(~masks[row], -torch.inf)
            apply_grammars(adjusted, batch.requests, sorted(changed - errors.keys()))
            rows = np.array(sorted(changed), dtype=np.int64)
            part = adjusted[torch.from_numpy(rows)]
            tokens[rows] = _argmax(part)
            for index in _not_finite(part, tokens[rows]):
                errors.setdefault(int(rows[index]), NOTHING_ALLOWED)
        random = np.flatnonzero(sampling.temperature > 0)
        random = random[[row not in errors for row in random.tolist()]] if errors else random
        _draw_rows(adjusted, sampling, random, tokens)
        return _result(tokens, _logprobs(logits, tokens, sampling, errors), errors)


def _argmax(logits: torch.Tensor) -> Int64s:
    """Largest entry of each row, lowest index first; the index of a NaN when there is one. int64 [m]."""
    first: Int64s = logits.numpy().argmax(axis=-1).astype(np.int64, copy=False)
    return first


def _not_finite(logits: torch.Tensor, best: Int64s) -> dict[int, str]:
    """Rows whose best entry is NaN or infinite (minus infinity when the whole row is)."""
    values = logits.gather(1, torch.from_numpy(best)[:, None])[:, 0].numpy()
    return dict.fromkeys(np.flatnonzero(~np.isfinite(values)).tolist(), NOT_FINITE)


def _result(tokens: Int64s, logprobs: dict[int, TokenLogprob], errors: dict[int, str]) -> SampledTokens:
    if errors:
        tokens = tokens.copy()
        tokens[list(errors)] = -1
    return SampledTokens(token_ids=tokens, logprobs=logprobs, errors=errors)


def _logprobs(
    logits: torch.Tensor, tokens: Int64s, sampling: SamplingRows, errors: dict[int, str]
) -> dict[int, TokenLogprob]:
    rows = np.array(
        [row for row in np.flatnonzero(sampling.logprobs >= 0).tolist() if row not in errors], dtype=np.int64
    )
    if not len(rows):
        return {}
    part = logits[torch.from_numpy(rows)]
    return dict(zip(rows.tolist(), token_logprobs(part, tokens[rows], sampling.logprobs[rows]), strict=True))


def _draw_rows(logits: torch.Tensor, sampling: SamplingRows, rows: Int64s, tokens: Int64s) -> None:
    """Draw a token for each of ``rows`` and write it to ``tokens``, a block of rows at a time."""
    step = max(1, BLOCK_ELEMENTS // logits.shape[1])
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        tokens[block] = draw_host(logits[torch.from_numpy(block)].numpy(), sampling, block)
