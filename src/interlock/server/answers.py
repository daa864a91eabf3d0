"""Collects the pieces of a generation into whole answers, and lays out echoed prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate

from interlock.engine.messages import TokenLogprob
from interlock.server.context import ServerContext
from interlock.server.generation import Choice, Generation
from interlock.server.text_output import ScoredToken


@dataclass
class Answer:
    """Everything one choice produced."""

    choice: Choice
    texts: list[str] = field(default_factory=list)
    tokens: list[ScoredToken] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)


async def collect(generation: Generation) -> list[Answer]:
    """Run ``generation`` to its end; answers in the order of choices."""
    answers = [Answer(choice) for choice in generation.choices]
    async for choice, piece in generation.pieces():
        answer = answers[choice.index]
        answer.texts.append(piece.text)
        answer.tokens.extend(piece.tokens)
        if piece.finish_reason is not None:
            answer.finish_reason = piece.finish_reason
            answer.stop_reason = piece.stop_reason
    return answers


def best(answers: list[Answer], of: int, n: int) -> list[Answer]:
    """The ``n`` answers of largest mean logprob out of each ``of`` that belong to one prompt, best first."""
    if of == n:
        return answers
    groups = [answers[start : start + of] for start in range(0, len(answers), of)]
    return [answer for group in groups for answer in sorted(group, key=_mean_logprob, reverse=True)[:n]]


def _mean_logprob(answer: Answer) -> float:
    scores = [token.logprob.logprob for token in answer.tokens]
    return sum(scores) / len(scores) if scores else -math.inf


@dataclass(frozen=True)
class Echo:
    """A prompt as it is echoed: its text, and where each token's text starts in it (in characters)."""

    text: str
    token_ids: tuple[int, ...]
    offsets: tuple[int, ...]

    def entries(self, scored: tuple[TokenLogprob | None, ...]) -> list[tuple[int, TokenLogprob | None, int]]:
        """Input of ``completion_logprobs`` for the prompt; ``scored`` as the engine sent it.

        A request that was aborted before its prompt was scored has no scores: all entries are None then.
        """
        scored = scored or (None,) * len(self.token_ids)
        return list(zip(self.token_ids, scored, self.offsets, strict=True))


def echo_of(choice: Choice, context: ServerContext) -> Echo:
    """The echo of ``choice``'s prompt: the client's own text, or the decoded token ids."""
    decoder = context.detokenizer(
        skip_special_tokens=choice.request.sampling.skip_special_tokens, continues=False
    )
    pieces = [decoder.push((token_id,)) for token_id in choice.prompt.token_ids]
    starts = [0, *accumulate(len(piece) for piece in pieces)][:-1]
    text = choice.prompt.text
    if text is None:
        text = "".join(pieces) + decoder.finish()
    return Echo(text, choice.prompt.token_ids, tuple(starts))
