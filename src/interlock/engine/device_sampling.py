"""Sampling on a device while the host goes on: everything is queued, nothing is waited for before ``result``.

The meaning is that of ``sampler.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from interlock.engine.batch import Batch
from interlock.engine.draw import Draw, draw_rows
from interlock.engine.grammar_masks import apply_grammars
from interlock.engine.logprobs import ScoredTokens, score_tokens
from interlock.engine.messages import TokenLogprob
from interlock.engine.penalties import adjust_row
from interlock.engine.sampled import SampledTokens
from interlock.engine.upload import download, upload

NOT_FINITE = "the model's logits are not finite for this request (NaN or infinity)"
NOTHING_ALLOWED = "no token is allowed next: bias, min_tokens and mask together exclude the whole vocabulary"
BLOCK_ELEMENTS = 1 << 26

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Best:
    """The largest logit of each row, float32 [m], and its id, int64 [m], the lowest among equals."""

    values: torch.Tensor
    ids: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor) -> Best:
        found = logits.max(dim=-1)
        return cls(found.values, found.indices)


class DeviceDraw:
    """Tokens that a device is still drawing. See ``Launched``."""

    def __init__(
        self,
        tokens: torch.Tensor,
        best: torch.Tensor,
        allowed: tuple[Int64s, torch.Tensor] | None,
        scored: tuple[Int64s, ScoredTokens] | None,
        prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...],
    ) -> None:
        self.tokens = tokens
        self._tokens, self._best = download(tokens), download(best)
        self._allowed = None if allowed is None else (allowed[0], download(allowed[1]))
        self._scored = None if scored is None else (scored[0], scored[1].downloaded())
        self._prompt_logprobs = prompt_logprobs
        self._event: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def result(self) -> SampledTokens:
        """Wait for the device; a row with logits that are not finite, or without a token, gets an error."""
        if self._event is not None:
            self._event.synchronize()
        errors = dict.fromkeys(np.flatnonzero(~np.isfinite(self._best.numpy())).tolist(), NOT_FINITE)
        if self._allowed is not None:
            rows, values = self._allowed
            for index in np.flatnonzero(~np.isfinite(values.numpy())).tolist():
                errors.setdefault(int(rows[index]), NOTHING_ALLOWED)
        tokens = self._tokens.numpy()
        if errors:
            tokens = tokens.copy()
            tokens[list(errors)] = -1
        logprobs: dict[int, TokenLogprob] = {}
        if self._scored is not None:
            rows, scored = self._scored
            logprobs = dict(zip(rows.tolist(), scored.entries(), strict=True))
            for row in errors:
                logprobs.pop(row, None)
        return SampledTokens(tokens, logprobs, errors, self._prompt_logprobs)


def draw_on_device(
    logits: torch.Tensor,
    batch: Batch,
    *,
    best: Best | None = None,
    masks: Mapping[int, torch.Tensor],
    draw: Draw,
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = (),
) -> DeviceDraw:
    """Queue the draw of one token for each row.

    Args:
        logits: float32 [m, V], one row for each of ``batch.requests``; not changed.
        best: the rows' largest logits where they are known already.
        masks: row -> bool [V], the tokens that a row may take.
        draw: the kernels' draw.
    """
    sampling, device = batch.sampling, logits.device
    best = best or Best.of(logits)
    if sampling.plain_greedy and not masks:
        return DeviceDraw(best.ids, best.values, None, None, prompt_logprobs)
    tokens, adjusted, allowed = best.ids.clone(), logits, None
    changed = np.array(sorted(set(np.flatnonzero(sampling.adjusts).tolist()) | masks.keys()), dtype=np.int64)
    if len(changed):
        adjusted = logits.clone()
        for row in changed.tolist():
            adjust_row(adjusted[row], batch.requests[row])
            if row in masks:
                adjusted[row].masked_fill_(~masks[row].to(device), -torch.inf)
        apply_grammars(adjusted, batch.requests, changed.tolist())
        index = upload(changed, device)
        found = Best.of(adjusted[index])
        tokens[index] = found.ids
        allowed = (changed, found.values)
    random = np.flatnonzero(sampling.temperature > 0)
    step = max(1, BLOCK_ELEMENTS // logits.shape[1])
    for start in range(0, len(random), step):
        block = random[start : start + step]
        index = upload(block, device)
        tokens[index] = draw_rows(draw, adjusted[index], sampling, block)
    wanted = np.flatnonzero(sampling.logprobs >= 0)
    scored = None
    if len(wanted):
        index = upload(wanted, device)
        scored = (wanted, score_tokens(logits[index], tokens[index], sampling.logprobs[wanted]))
    return DeviceDraw(tokens, best.values, allowed, scored, prompt_logprobs)
