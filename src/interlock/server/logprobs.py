"""Logprobs in the shapes of the completions and chat APIs. JSON has no infinities: the floor is -9999."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from interlock.engine.messages import TokenLogprob
from interlock.server.text_output import ScoredToken
from interlock.server.token_names import TokenNames

FLOOR = -9999.0


def finite(logprob: float) -> float:
    """``logprob``, not below the floor; NaN is the floor too."""
    return logprob if logprob >= FLOOR else FLOOR


def completion_logprobs(
    tokens: Iterable[tuple[int, TokenLogprob | None, int]], names: TokenNames, *, as_ids: bool
) -> dict[str, list[Any]]:
    """``logprobs`` of a completion choice.

    Args:
        tokens: (token id, its logprob or None for the first token of an echoed prompt, offset in
            characters of the returned text).

    Returns:
        ``tokens``, ``token_logprobs``, ``top_logprobs`` and ``text_offset``, all of one length. An entry of
        ``top_logprobs`` maps token to logprob, best first, and always has the chosen token.
    """
    result: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token_id, scored, offset in tokens:
        label = names.label(token_id, as_ids)
        result["tokens"].append(label)
        result["text_offset"].append(offset)
        if scored is None:
            result["token_logprobs"].append(None)
            result["top_logprobs"].append(None)
            continue
        result["token_logprobs"].append(finite(scored.logprob))
        best: dict[str, float] = {}
        for other, logprob in scored.top:
            best.setdefault(names.label(other, as_ids), finite(logprob))
        best.setdefault(label, finite(scored.logprob))
        result["top_logprobs"].append(best)
    return result


def generated_entries(
    tokens: Sequence[ScoredToken], shift: int
) -> list[tuple[int, TokenLogprob | None, int]]:
    """Input of ``completion_logprobs`` for generated tokens; ``shift`` is the length of an echoed prompt."""
    return [(token.logprob.token_id, token.logprob, token.start + shift) for token in tokens]


def chat_logprobs(tokens: Sequence[ScoredToken], names: TokenNames, *, as_ids: bool) -> dict[str, Any]:
    """``logprobs`` of a chat choice: one entry for each token, alternatives best first."""
    return {
        "content": [
            {
                **_chat_entry(token.logprob.token_id, token.logprob.logprob, names, as_ids),
                "top_logprobs": [
                    _chat_entry(other, logprob, names, as_ids) for other, logprob in token.logprob.top
                ],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def _chat_entry(token_id: int, logprob: float, names: TokenNames, as_ids: bool) -> dict[str, Any]:
    return {
        "token": names.label(token_id, as_ids),
        "logprob": finite(logprob),
        "bytes": names.utf8(token_id),
    }


def prompt_logprobs(
    scored: Sequence[TokenLogprob | None], names: TokenNames
) -> list[dict[str, dict[str, Any]] | None]:
    """The ``prompt_logprobs`` extension: for each token None or {id: {logprob, decoded_token}}."""
    result: list[dict[str, dict[str, Any]] | None] = []
    for entry in scored:
        if entry is None:
            result.append(None)
            continue
        options = dict(entry.top)
        options.setdefault(entry.token_id, entry.logprob)
        result.append(
            {
                str(other): {"logprob": finite(logprob), "decoded_token": names.text(other)}
                for other, logprob in options.items()
            }
        )
    return result
