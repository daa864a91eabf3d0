"""Which requests are refused when they arrive: those that could never run. Nothing is clamped silently."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from interlock.engine.messages import AddRequest, SamplingParams
from interlock.kv.store import Geometry

Int32s = npt.NDArray[np.int32]


def prompt_array(token_ids: Sequence[int]) -> Int32s | None:
    """The ids as the scheduler keeps them, int32; None when one does not fit, so is in no vocabulary."""
    try:
        wide = np.array(token_ids, dtype=np.int64)
    except OverflowError:
        return None
    narrow: Int32s = wide.astype(np.int32)
    return narrow if np.array_equal(wide, narrow) else None


def refusal(
    message: AddRequest,
    *,
    max_model_len: int,
    vocab_size: int,
    geometry: Geometry,
    tokens: Int32s | None = None,
) -> str | None:
    """Why the request can never run, as a sentence for the client; None when it can.

    Args:
        tokens: ``prompt_array`` of the prompt where it is at hand.
    """
    prompt = len(message.token_ids)
    if prompt == 0:
        return "the prompt has no tokens; at least one is needed"
    ids = message.token_ids
    lowest, highest = (min(ids), max(ids)) if tokens is None else (int(tokens.min()), int(tokens.max()))
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        return f"token id {wrong} is not in the vocabulary, whose ids are 0 to {vocab_size - 1}"
    problem = _bad_params(message.sampling, vocab_size)
    if problem:
        return problem
    most = message.sampling.max_tokens
    if prompt + most > max_model_len:
        return (
            f"the prompt has {prompt} tokens and max_tokens is {most}, together {prompt + most}; "
            f"this server's limit is {max_model_len}"
        )
    cached = prompt + max(0, most - 1)
    if geometry.has_full and geometry.pages(cached) > geometry.full_pages:
        return (
            f"the request needs up to {cached} tokens of key-value cache and the whole cache holds "
            f"{geometry.full_pages * geometry.page_size}; shorten the prompt or lower max_tokens ({most})"
        )
    return None


def _bad_params(params: SamplingParams, vocab_size: int) -> str | None:
    if params.n != 1:
        return f"the scheduler runs one sequence a request and was given n = {params.n}"
    if params.max_tokens < 0:
        return f"max_tokens is {params.max_tokens}; it must be 0 or more"
    if not 0 <= params.min_tokens <= params.max_tokens:
        return f"min_tokens is {params.min_tokens}; it must be between 0 and max_tokens ({params.max_tokens})"
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        return f"temperature is {params.temperature}; it must be a number of 0 or more"
    if not 0 < params.top_p <= 1:
        return f"top_p is {params.top_p}; it must be above 0 and at most 1"
    if params.top_k < 0:
        return f"top_k is {params.top_k}; it must be 0 (all tokens) or more"
    if not 0 <= params.min_p <= 1:
        return f"min_p is {params.min_p}; it must be between 0 and 1"
    if not (math.isfinite(params.repetition_penalty) and params.repetition_penalty > 0):
        return f"repetition_penalty is {params.repetition_penalty}; it must be a number above 0"
    if not (math.isfinite(params.presence_penalty) and math.isfinite(params.frequency_penalty)):
        return "presence_penalty and frequency_penalty must be finite numbers"
    for token, bias in params.logit_bias.items():
        if not 0 <= token < vocab_size or not math.isfinite(bias):
            return f"logit_bias has {token}: {bias}; ids are 0 to {vocab_size - 1} and values finite"
    for token in params.forced_token_ids:
        if not 0 <= token < vocab_size:
            return f"forced_token_ids has {token}; ids are 0 to {vocab_size - 1}"
    for wanted in (params.logprobs, params.prompt_logprobs):
        if wanted is not None and not 0 <= wanted <= vocab_size:
            return f"{wanted} alternatives were asked for; 0 to {vocab_size} can be given"
    return None
