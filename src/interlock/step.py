"""One step of the engine, as an immutable description that the model's forward takes as an argument.

Legend: n tokens in the step, s sequences, P pages in the longest page table, m rows to sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from interlock.moe.terms import Phase


@dataclass(frozen=True, slots=True)
class PageMap:
    """Where one page space (full or sliding-window) keeps the keys and values of this step.

    Attributes:
        table: int32 [s, P], page id of each page of each sequence by absolute page index
            (position // page_size); -1 where no page is held (behind the window, or beyond the length).
        slots: int64 [n], flat slot (page id * page_size + offset) that each token of the step writes; -1
            for padding tokens, which write nothing.
    """

    table: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """Tokens, positions, page tables and sampling rows of one forward pass.

    Attributes:
        phase: agreed by all ranks.
        token_ids: int64 [n]; padding tokens are 0 and have ``slots == -1``.
        positions: int64 [n], absolute position of each token in its sequence.
        query_start: int32 [s + 1], tokens of sequence i are ``query_start[i] : query_start[i + 1]``.
        kv_len: int32 [s], length of each sequence including this step's tokens.
        full: page map of full-attention layers, or None when the model has none.
        window: page map of sliding-window layers, or None when the model has none.
        sample_rows: int64 [m], rows of the step whose logits are wanted.
        live_tokens: number of tokens that are not padding (padding comes last).
        live_count: the same as int32 [1] on the device, for a step that is captured in a CUDA graph and
            replayed with other numbers of live tokens (``live_tokens`` is then the largest); else None.
    """

    phase: Phase
    token_ids: torch.Tensor
    positions: torch.Tensor
    query_start: torch.Tensor
    kv_len: torch.Tensor
    full: PageMap | None
    window: PageMap | None
    sample_rows: torch.Tensor
    live_tokens: int
    live_count: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_sequences(self) -> int:
        return self.kv_len.shape[0]
