"""Prompts of completions and the context limit: from request fields to token ids that the engine can take."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from interlock.plan.launch_plan import LaunchPlan
from interlock.server.errors import ApiError, bad_request
from interlock.tokenizer import Tokenizer

DEFAULT_COMPLETION_TOKENS = 16
_INLINE_CHARS = 16_384
_PROMPT_FORMS = "prompt must be a string, a list of strings, a list of token ids or a list of such lists"


@dataclass(frozen=True)
class Prompt:
    """``text`` is None for a prompt that was given as token ids."""

    token_ids: tuple[int, ...]
    text: str | None = None


@dataclass(frozen=True)
class ContextLimit:
    """Most tokens (prompt and answer together) that one request may occupy, and what sets the limit."""

    tokens: int
    source: str

    @classmethod
    def from_plan(cls, plan: LaunchPlan) -> ContextLimit:
        pool = plan.full_pages * plan.page_size
        has_full_layers = any(layer.attention.window is None for layer in plan.card.layers)
        if has_full_layers and pool < plan.max_model_len:
            return cls(pool, "the KV pool of this server")
        return cls(plan.max_model_len, "max_model_len")

    def answer_tokens(
        self,
        prompt_tokens: int,
        requested: int | None,
        default: int | None,
        *,
        prompt_param: str,
        answer_param: str = "max_tokens",
    ) -> int:
        """Tokens to generate: ``requested``, else the rest of the context, at most ``default``.

        Raises:
            ApiError: 400 with the numbers, when prompt and answer do not fit.
        """
        room = self.tokens - prompt_tokens
        if requested is None and room > 0:
            return min(room, default or room)
        if requested is not None and room >= requested:
            return requested
        wanted = f"{prompt_tokens} prompt tokens"
        if requested is not None:
            wanted += f" + {requested} to generate = {prompt_tokens + requested}"
        raise bad_request(
            f"{wanted} exceed the context of {self.tokens} tokens ({self.source}); "
            f"shorten the prompt{f' or lower {answer_param}' if room > 0 else ''}",
            param=prompt_param if room < 1 else answer_param,
            code="context_length_exceeded",
        )


async def encode_text(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of ``text``; long texts are encoded in a thread so that running streams go on."""
    if len(text) <= _INLINE_CHARS:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)


async def completion_prompts(
    value: Any, *, tokenizer: Tokenizer, vocab_size: int, add_special_tokens: bool, max_prompts: int
) -> list[Prompt]:
    """The ``prompt`` field as prompts: a text, a list of texts, token ids, or a list of lists of token ids.

    Raises:
        ApiError: 400 for anything else, for an empty prompt and for ids outside the vocabulary.
    """
    if not isinstance(value, str | list):
        raise _bad_prompt(_PROMPT_FORMS)
    items: list[Any] = value if isinstance(value, list) else [value]
    if not items:
        raise _bad_prompt("prompt is an empty list")
    if _is_ids(items):
        items = [items]
    if len(items) > max_prompts:
        raise _bad_prompt(f"prompt has {len(items)} entries; at most {max_prompts} are allowed")
    if all(isinstance(item, str) for item in items):
        return [await _text_prompt(item, tokenizer, add_special_tokens) for item in items]
    if all(isinstance(item, list) and (not item or _is_ids(item)) for item in items):
        return [_ids_prompt(item, vocab_size) for item in items]
    raise _bad_prompt(_PROMPT_FORMS)


def _is_ids(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)


async def _text_prompt(text: str, tokenizer: Tokenizer, add_special_tokens: bool) -> Prompt:
    if not text:
        raise _bad_prompt("prompt is empty; give at least one character")
    ids = await encode_text(tokenizer, text, add_special_tokens=add_special_tokens)
    if not ids:
        raise _bad_prompt("prompt has no tokens")
    return Prompt(tuple(ids), text)


def _ids_prompt(ids: list[int], vocab_size: int) -> Prompt:
    if not ids:
        raise _bad_prompt("prompt is empty; give at least one token id")
    for token_id in (min(ids), max(ids)):
        if not 0 <= token_id < vocab_size:
            shown = str(token_id) if abs(token_id) < 2**63 else "a huge integer"
            raise _bad_prompt(f"prompt has token id {shown}; ids are 0 to {vocab_size - 1}")
    return Prompt(tuple(ids))


def _bad_prompt(message: str) -> ApiError:
    return bad_request(message, param="prompt", code="invalid_value")
