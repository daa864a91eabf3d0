"""The words of the MoE contract that light modules (planner, declarations) share. No torch here."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """What all ranks do in one step; agreed before the step."""

    PREFILL = "prefill"
    DECODE = "decode"


class Layout(StrEnum):
    """The shape of dispatched rows.

    ``REPLICATED``: every rank holds all tokens; runners compute local experts, a reduction follows.
    ``CONTIGUOUS``: rows grouped by local expert, each segment aligned; ``psum[i] = start(i) + count(i)``.
    ``MASKED``: slab ``[local experts, M, h]`` with a count for each expert; static shapes.
    """

    REPLICATED = "replicated"
    CONTIGUOUS = "contiguous"
    MASKED = "masked"
