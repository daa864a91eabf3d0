"""Which tokens a request has, and how often each was generated, for penalties."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class TokenCounts:
    """The distinct tokens of a request and how often each was generated, kept up to date incrementally."""

    def __init__(self) -> None:
        self._index: dict[int, int] = {}
        self._ids: npt.NDArray[np.int64] = np.zeros(64, dtype=np.int64)
        self._generated: npt.NDArray[np.float32] = np.zeros(64, dtype=np.float32)
        self._seen = 0

    def update(self, tokens: npt.NDArray[np.int32], prompt_len: int) -> None:
        """Take in the tokens that are new since the last call."""
        for position, token in enumerate(tokens[self._seen :].tolist(), start=self._seen):
            index = self._index.setdefault(token, len(self._index))
            if index == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._generated = np.concatenate([self._generated, np.zeros_like(self._generated)])
            self._ids[index] = token
            self._generated[index] += position >= prompt_len
        self._seen = len(tokens)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        return self._ids[: len(self._index)]

    @property
    def generated(self) -> npt.NDArray[np.float32]:
        return self._generated[: len(self._index)]
