"""Finds stop strings in text that arrives piece by piece.

The match is the occurrence that ends first; among those that end together, the longest. So the result depends
on the text alone and not on how it was cut into tokens, and it is decided as soon as the character arrives.
Each stop string runs its own Knuth-Morris-Pratt automaton: O(1) amortised for each character.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """``stop`` ended at ``end`` characters of the fed text (counted over all feeds)."""

    stop: str
    end: int

    @property
    def start(self) -> int:
        return self.end - len(self.stop)


class StopMatcher:
    """Streaming search for any of ``stops`` (non-empty strings)."""

    def __init__(self, stops: Sequence[str]) -> None:
        # Longest first, so that the first automaton to finish at a character is the longest match.
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._borders = [_border_lengths(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._fed = 0

    @property
    def held(self) -> int:
        """Length of the longest suffix of the fed text that may still grow into a stop string."""
        return max(self._matched, default=0)

    def feed(self, text: str) -> StopMatch | None:
        """Advance over ``text``; stop at the first match. Not to be called again after a match."""
        matched = self._matched
        for offset, char in enumerate(text, 1):
            for index, stop in enumerate(self._stops):
                length = matched[index]
                borders = self._borders[index]
                while length and stop[length] != char:
                    length = borders[length - 1]
                if stop[length] == char:
                    length += 1
                    if length == len(stop):
                        return StopMatch(stop, self._fed + offset)
                matched[index] = length
        self._fed += len(text)
        return None


def _border_lengths(pattern: str) -> list[int]:
    """Entry i: length of the longest proper prefix of ``pattern[:i + 1]`` that is also its suffix."""
    borders = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[length] != pattern[index]:
            length = borders[length - 1]
        if pattern[length] == pattern[index]:
            length += 1
        borders[index] = length
    return borders
