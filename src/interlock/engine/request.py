"""One request as its scheduler sees it."""

from __future__ import annotations

import time
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from interlock.engine.messages import AddRequest, SamplingParams, TokenLogprob
from interlock.engine.slots import SlotTable
from interlock.engine.token_counts import TokenCounts
from interlock.kv.prefix_tree import Node

if TYPE_CHECKING:
    from interlock.engine.grammar import GrammarState

UINT64 = (1 << 64) - 1


class State(Enum):
    """Where a request is. ``WAITING`` includes retracted requests; ``RECEIVING`` ones have pages that another
    server fills."""

    WAITING = auto()
    RECEIVING = auto()
    PREFILLING = auto()
    DECODING = auto()
    FINISHED = auto()


class Request:
    """State of one request.

    While it is admitted, its tokens and counters live in row ``slot`` of the ``SlotTable``; otherwise
    ``slot`` is -1 and ``_tokens`` keeps prompt and generated tokens.

    Attributes:
        rank: (priority, arrival); smaller is served first and retracted last.
        stop_ids: token ids that end it (end-of-sequence ids too, unless ignored).
        path: prefix-tree nodes of its first ``len(path)`` pages, all locked by it.
        cached_tokens: tokens reused at the first admission, None before it.
        prompt_logprobs: entries for prompt positions scored so far (entry 0 is None); None when not wanted.
        token_counts: what penalties need to know, kept by the sampler.
        told: whether a delta has been sent, so that prompt logprobs are sent once.
        inspection: what ``verify`` asked for, None for everybody else; chunk_ends: what it was told.
        grammar: what its answer must match, and how far it has come; None is free.
        holds: readers of its pages besides the model; until they are done it keeps pages and slot.
        arrived: when it came, by the monotonic clock; queue_seconds: from then to its first admission.
    """

    __slots__ = (
        "_table",
        "_tokens",
        "arrived",
        "cached_tokens",
        "chunk_ends",
        "grammar",
        "holds",
        "id",
        "inspection",
        "params",
        "path",
        "prompt_len",
        "prompt_logprobs",
        "queue_seconds",
        "rank",
        "seed",
        "slot",
        "state",
        "stop_ids",
        "token_counts",
        "told",
    )

    def __init__(
        self,
        message: AddRequest,
        *,
        arrival: int,
        seed: int,
        eos_ids: frozenset[int],
        tokens: npt.NDArray[np.int32] | None = None,
    ) -> None:
        params = message.sampling
        self.id = message.request_id
        self.params: SamplingParams = params
        self.rank = (message.priority, arrival)
        self.prompt_len = len(message.token_ids)
        self.seed = seed & UINT64
        self.stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_ids)
        self.state = State.WAITING
        self.slot = -1
        self.path: list[Node] = []
        self.cached_tokens: int | None = None
        self.prompt_logprobs: list[TokenLogprob | None] | None = (
            None if params.prompt_logprobs is None else [None]
        )
        self.told = False
        self.inspection = message.inspection
        self.chunk_ends: list[int] = []
        self.arrived = time.monotonic()
        self.queue_seconds: float | None = None
        self.token_counts: TokenCounts | None = None
        self.grammar: GrammarState | None = None
        self.holds = 0
        self._table: SlotTable | None = None
        self._tokens = np.array(message.token_ids, dtype=np.int32) if tokens is None else tokens

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self._tokens) if self._table is None else int(self._table.length[self.slot])

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.prompt_len

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """All tokens so far, int32; a view that is valid until the next commit."""
        if self._table is None:
            return self._tokens
        return self._table.tokens[self.slot, : self._table.length[self.slot]]

    @property
    def scored(self) -> int:
        """Prompt positions whose next-token log-probability is known."""
        return 0 if self.prompt_logprobs is None else len(self.prompt_logprobs) - 1

    @property
    def reusable_tokens(self) -> int:
        """Longest prefix whose computation may be skipped: the last token is always computed, and so is
        every prompt position whose logits are still wanted."""
        most = self.num_tokens - 1
        return most if self.prompt_logprobs is None else min(most, self.scored)

    def enter(self, table: SlotTable, slot: int) -> None:
        """Move the tokens into a row of the table."""
        table.fill(slot, self._tokens, self.prompt_len, self.params, self.seed)
        table.adjusts[slot] |= self.grammar is not None
        self._table, self.slot = table, slot

    def leave(self) -> None:
        """Take the tokens out of the table (the row itself is cleared by the caller)."""
        self._tokens = self.tokens.copy()
        self._table, self.slot = None, -1
