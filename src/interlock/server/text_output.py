"""Turns the token deltas of one engine request into text pieces, cut at stop strings.

One rule for text, logprobs and usage:

- The text ends before the first stop string (or with it, if asked for); characters that may become part of a
  stop string are held back until that is decided, so a piece is never taken back.
- A token's logprob entry is returned when its text starts before the cut. A token that ended the request
  (end of sequence, stop token) has an entry although its text is not shown.
- ``completion_tokens`` counts every token up to the one that completed the stop.
"""

from __future__ import annotations

from typing import NamedTuple

from interlock.engine.messages import SamplingParams, TokenDelta, TokenLogprob
from interlock.server.stop_strings import StopMatcher
from interlock.tokenizer import Detokenizer


class ScoredToken(NamedTuple):
    """``start`` is the offset of the token's text in the generated text, in characters."""

    logprob: TokenLogprob
    start: int


class Piece(NamedTuple):
    """What may be sent now. ``stop_reason`` is the stop string or stop token id that was matched."""

    text: str
    tokens: tuple[ScoredToken, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class TextOutput:
    """State of one choice. ``sampling`` and ``detokenizer`` belong to that choice alone.

    Attributes:
        completion_tokens: tokens generated so far, by the rule above.
        cached_tokens: prompt tokens reused at first admission.
        prompt_logprobs: as the engine sent them, or empty.
    """

    def __init__(self, sampling: SamplingParams, detokenizer: Detokenizer) -> None:
        self._sampling = sampling
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(sampling.stop) if sampling.stop else None
        self._unmatched_chars = 0
        self._pending = ""
        self._released = 0
        self._held_tokens: list[ScoredToken] = []
        self._first_delta = True
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
        self.finish_reason: str | None = None

    @property
    def _length(self) -> int:
        return self._released + len(self._pending)

    def push(self, delta: TokenDelta) -> Piece:
        """Take the next delta. After a piece with a finish reason nothing more may be pushed."""
        self._note(delta)
        last = len(delta.token_ids) - 1
        for index, token_id in enumerate(delta.token_ids):
            self.completion_tokens += 1
            if delta.logprobs:
                self._held_tokens.append(ScoredToken(delta.logprobs[index], self._length))
            ends_request = index == last and delta.stop_token_id is not None
            if ends_request and not self._sampling.include_stop_str_in_output:
                continue
            cut = self._take(self._detokenizer.push((token_id,)))
            if cut is not None:
                return cut
        if delta.finish_reason is None:
            return self._release()
        cut = self._take(self._detokenizer.finish())
        if cut is not None:
            return cut
        return self._end(delta.finish_reason, self._requested_stop(delta.stop_token_id))

    def _note(self, delta: TokenDelta) -> None:
        if delta.prompt_tokens and self._first_delta:
            self._first_delta = False
            self.cached_tokens = delta.cached_tokens
        if delta.prompt_logprobs:
            self.prompt_logprobs = delta.prompt_logprobs

    def _requested_stop(self, token_id: int | None) -> int | None:
        return token_id if token_id in self._sampling.stop_token_ids else None

    def _take(self, text: str) -> Piece | None:
        """Add decoded text; the last piece if it completes a stop string."""
        self._pending += text
        if self._matcher is None or not text:
            return None
        if self.completion_tokens < self._sampling.min_tokens:
            self._unmatched_chars = self._length
            return None
        match = self._matcher.feed(text)
        if match is None:
            return None
        cut = self._unmatched_chars + (
            match.end if self._sampling.include_stop_str_in_output else match.start
        )
        self._pending = self._pending[: cut - self._released]
        self._held_tokens = [token for token in self._held_tokens if token.start < cut]
        return self._end("stop", match.stop)

    def _release(self) -> Piece:
        if self._matcher is None:
            text, self._pending = self._pending, ""
            self._released += len(text)
            tokens, self._held_tokens = self._held_tokens, []
            return Piece(text, tuple(tokens))
        keep = self._matcher.held
        text = self._pending[: len(self._pending) - keep]
        self._pending = self._pending[len(text) :]
        self._released += len(text)
        ready = 0
        while ready < len(self._held_tokens) and self._held_tokens[ready].start < self._released:
            ready += 1
        tokens = self._held_tokens[:ready]
        del self._held_tokens[:ready]
        return Piece(text, tuple(tokens))

    def _end(self, finish_reason: str, stop_reason: int | str | None) -> Piece:
        self.finish_reason = finish_reason
        text, self._pending = self._pending, ""
        self._released += len(text)
        tokens, self._held_tokens = self._held_tokens, []
        return Piece(text, tuple(tokens), finish_reason, stop_reason)
