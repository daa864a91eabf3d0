"""Token counts of an answer; the one place that builds them, for streams and whole answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from interlock.server.text_output import TextOutput


def usage(outputs: Sequence[TextOutput], prompt_lengths: Sequence[int]) -> dict[str, Any]:
    """Usage of a request whose ``outputs`` are prompt-major (prompt i's n choices are adjacent).

    A prompt counts once whatever n is; its cached tokens are those of its first choice, because later
    choices hit what the first one stored. Completion tokens are summed over all choices.
    """
    choices = len(outputs) // len(prompt_lengths)
    prompt_tokens = sum(prompt_lengths)
    completion_tokens = sum(output.completion_tokens for output in outputs)
    cached_tokens = sum(output.cached_tokens for output in outputs[::choices])
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
