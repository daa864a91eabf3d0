"""What the sampler hands back to the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from interlock.engine.messages import TokenLogprob

NO_TOKEN_ALLOWED = "no token is allowed next"
"""How the error of a row begins whose own bias, min_tokens and grammar leave it nothing."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Results of one step.

    Attributes:
        token_ids: int64 [m], -1 for rows with an error.
        logprobs: by row, for rows that asked.
        errors: by row, why no token could be drawn.
        prompt_logprobs: one tuple for each entry of ``Batch.prompt_scores``.
    """

    token_ids: npt.NDArray[np.int64]
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
