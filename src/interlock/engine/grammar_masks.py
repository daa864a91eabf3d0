"""Applies the grammars of constrained requests to the logits of their rows, all rows at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from interlock.engine.grammar import GrammarState
from interlock.engine.request import Request
from interlock.engine.upload import upload


def apply_grammars(logits: torch.Tensor, requests: Sequence[Request], rows: Iterable[int]) -> None:
    """Set the logits [m, V] of tokens that a row's grammar forbids to minus infinity, in place.

    Only one bit a token and row goes to a device.

    Args:
        rows: which rows to look at; those without a grammar stay as they are.
    """
    states = [(row, grammar) for row in rows if (grammar := requests[row].grammar) is not None]
    states = [(row, grammar) for row, grammar in states if grammar.applies]
    if not states:
        return
    width = logits.shape[1]
    words = torch.empty((len(states), -(-width // 32)), dtype=torch.int32)
    GrammarState.fill([grammar for _, grammar in states], words)
    if logits.device.type == "cpu":
        allowed = np.unpackbits(words.numpy().view(np.uint8), axis=1, count=width, bitorder="little")
        values = logits.numpy()
        for index, (row, _) in enumerate(states):
            values[row][allowed[index] == 0] = -np.inf
        return
    where = upload(np.array([row for row, _ in states], dtype=np.int64), logits.device)
    banned = ~unpacked(upload(words.numpy(), logits.device), width)
    logits[where] = logits[where].masked_fill(banned, -torch.inf)


def unpacked(words: torch.Tensor, width: int) -> torch.Tensor:
    """int32 [g, ceil(width / 32)] -> bool [g, width]: bit t % 32 of word t // 32."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> shifts) & 1).bool().flatten(1)[:, :width]
