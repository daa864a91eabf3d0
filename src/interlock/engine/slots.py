"""The admitted requests of a replica as one table of numpy columns: a step costs no Python for each token."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from interlock.engine.messages import SamplingParams
from interlock.kv.prefix_tree import NO_PAGE
from interlock.kv.store import Geometry

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM."""


class SlotTable:
    """One row for each admitted request.

    Attributes:
        tokens: int32 [rows, max_model_len], prompt and generated tokens.
        length: int64 [rows], tokens known.
        computed: int64 [rows], tokens whose keys and values are in the cache.
        pages: int64 [rows], pages allocated in each space (the same count in both).
        first_window: int64 [rows], first page that is still held in the window space.
        full, window: int32 [rows, pages], page id by page index, -1 where none is held; None for a space
            that the model does not have.
        adjusts: the logits are changed by penalties, a bias, a grammar or a forced token.
        logprobs: alternatives wanted, -1 for no logprobs.
    """

    def __init__(self, rows: int, max_model_len: int, geometry: Geometry) -> None:
        pages = geometry.pages(max_model_len)
        self.rows = rows
        self.tokens = np.zeros((rows, max_model_len), dtype=np.int32)
        self.length = np.zeros(rows, dtype=np.int64)
        self.prompt_len = np.zeros(rows, dtype=np.int64)
        self.computed = np.zeros(rows, dtype=np.int64)
        self.pages = np.zeros(rows, dtype=np.int64)
        self.first_window = np.zeros(rows, dtype=np.int64)
        self.full = np.full((rows, pages), NO_PAGE, dtype=np.int32) if geometry.has_full else None
        self.window = np.full((rows, pages), NO_PAGE, dtype=np.int32) if geometry.window is not None else None
        self.max_tokens = np.zeros(rows, dtype=np.int64)
        self.min_tokens = np.zeros(rows, dtype=np.int64)
        self.ignore_eos = np.zeros(rows, dtype=np.bool_)
        self.has_stop_ids = np.zeros(rows, dtype=np.bool_)
        self.temperature = np.zeros(rows, dtype=np.float32)
        self.top_k = np.zeros(rows, dtype=np.int64)
        self.top_p = np.ones(rows, dtype=np.float64)
        self.min_p = np.zeros(rows, dtype=np.float64)
        self.seed = np.zeros(rows, dtype=np.uint64)
        self.adjusts = np.zeros(rows, dtype=np.bool_)
        self.logprobs = np.full(rows, -1, dtype=np.int64)
        self._free = list(range(rows - 1, -1, -1))

    @property
    def free_rows(self) -> int:
        return len(self._free)

    def take_row(self) -> int:
        return self._free.pop()

    def give_row(self, row: int) -> None:
        """Clear a row's page tables and give it back."""
        used = self.pages[row]
        for table in (self.full, self.window):
            if table is not None:
                table[row, :used] = NO_PAGE
        self.pages[row] = 0
        self.length[row] = 0
        self.computed[row] = 0
        self.first_window[row] = 0
        self._free.append(row)

    def held(self, row: int) -> int:
        """Pages of both spaces in a row's tables."""
        used = self.pages[row]
        return sum(
            int((each[row, :used] != NO_PAGE).sum()) for each in (self.full, self.window) if each is not None
        )

    def fill(
        self, row: int, tokens: npt.NDArray[np.int32], prompt_len: int, params: SamplingParams, seed: int
    ) -> None:
        """Write a request's tokens and sampling parameters into its row."""
        self.tokens[row, : len(tokens)] = tokens
        self.length[row] = len(tokens)
        self.prompt_len[row] = prompt_len
        self.max_tokens[row] = params.max_tokens
        self.min_tokens[row] = params.min_tokens
        self.ignore_eos[row] = params.ignore_eos
        self.has_stop_ids[row] = bool(params.stop_token_ids)
        self.temperature[row] = 0.0 if params.temperature < GREEDY_BELOW else params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = seed
        self.adjusts[row] = bool(
            params.logit_bias
            or params.forced_token_ids
            or params.presence_penalty
            or params.frequency_penalty
            or params.repetition_penalty != 1.0
        )
        self.logprobs[row] = -1 if params.logprobs is None else params.logprobs
