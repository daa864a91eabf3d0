"""Sizes of DeepEP v1's low-latency interface that declarations need; no torch."""

from __future__ import annotations

TOKENS_MULTIPLE = 4
"""R * T must be a multiple of it (TMA of the scales)."""


def library_capacity(tokens: int) -> int:
    """T as the library is told it: rounded up so that R * T fits any R."""
    return -(-tokens // TOKENS_MULTIPLE) * TOKENS_MULTIPLE
