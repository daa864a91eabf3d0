"""Translates the sampling fields of a request into ``SamplingParams``, with checks that need the model."""

from __future__ import annotations

from typing import Any

from interlock.engine.messages import SamplingParams
from interlock.server.errors import bad_request
from interlock.server.protocol import GenerationBody
from interlock.server.settings import SamplingDefaults, ServerSettings

MAX_STOPS = 16
MAX_STOP_CHARS = 512
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
_SEEDS = 2**63


def sampling_params(
    body: GenerationBody,
    *,
    settings: ServerSettings,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    vocab_size: int,
) -> SamplingParams:
    """Sampling of one choice, with the server's defaults filled in.

    Args:
        max_tokens: already limited to the context.
        logprobs, prompt_logprobs: alternatives for each generated and prompt token, None for none.
        vocab_size: token ids must lie below.

    Raises:
        ApiError: 400 naming the field that is out of range.
    """
    defaults: SamplingDefaults = settings.sampling_defaults
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise bad_request(
            f"min_tokens is {min_tokens}, more than max_tokens {max_tokens}", param="min_tokens"
        )
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_or(body.temperature, defaults.temperature),
        top_p=_or(body.top_p, defaults.top_p),
        top_k=max(_or(body.top_k, defaults.top_k), 0),
        min_p=_or(body.min_p, defaults.min_p),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, defaults.repetition_penalty),
        logit_bias=_logit_bias(body.logit_bias, vocab_size),
        seed=body.seed,
        stop=stop_strings(body.stop),
        stop_token_ids=_stop_token_ids(body.stop_token_ids, vocab_size),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        skip_special_tokens=_or(body.skip_special_tokens, True),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
    )


def seed_of_choice(seed: int | None, choice: int) -> int | None:
    """Choice i of n draws from seed + i, folded into 63 bits; choice 0 draws as n = 1 would."""
    return None if seed is None else (seed + choice) % _SEEDS


def stop_strings(value: Any) -> tuple[str, ...]:
    """``stop`` as a tuple: a string or up to 16 non-empty strings.

    Raises:
        ApiError: 400.
    """
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise bad_request("stop must be a string or a list of strings", param="stop")
    if len(stops) > MAX_STOPS:
        raise bad_request(f"stop has {len(stops)} entries; at most {MAX_STOPS} are allowed", param="stop")
    if any(not stop for stop in stops):
        raise bad_request("stop has an empty string, which would match at once", param="stop")
    if any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise bad_request(f"a stop string is longer than {MAX_STOP_CHARS} characters", param="stop")
    return tuple(stops)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def check_logprobs(name: str, count: int | None, limit: int) -> None:
    """Refuse (400) more than ``limit`` alternatives for each token in the field ``name``."""
    if count is not None and count > limit:
        raise bad_request(f"{name} is {count}; at most {limit} are allowed", param=name)


def _stop_token_ids(ids: list[int] | None, vocab_size: int) -> tuple[int, ...]:
    ids = ids or []
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise bad_request(
            f"stop_token_ids has {len(ids)} entries; at most {MAX_STOP_TOKEN_IDS} are allowed",
            param="stop_token_ids",
        )
    for token_id in ids:
        if token_id >= vocab_size:
            raise bad_request(
                f"stop_token_ids has {token_id}; token ids lie below {vocab_size}", param="stop_token_ids"
            )
    return tuple(ids)


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float]:
    bias = bias or {}
    if len(bias) > MAX_LOGIT_BIAS:
        raise bad_request(
            f"logit_bias has {len(bias)} entries; at most {MAX_LOGIT_BIAS} are allowed", param="logit_bias"
        )
    checked: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocab_size):
            raise bad_request(
                f"logit_bias key {key[:40]!r} is no token id; ids are 0 to {vocab_size - 1}",
                param="logit_bias",
            )
        if not -100 <= value <= 100:
            raise bad_request(
                f"logit_bias of token {key} is {value:g}; expected -100 to 100", param="logit_bias"
            )
        checked[int(key)] = value
    return checked
