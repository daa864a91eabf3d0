"""Collectives of one group of ranks, as the layers use them; a group of one does nothing."""

from __future__ import annotations

from typing import Protocol

import torch


class Group(Protocol):
    """An ordered set of ranks. All members call the same method in the same order.

    ``rank`` is the position within the group. Tensors are contiguous. Results are new tensors, except for
    ``all_reduce``, which may reuse its argument.
    """

    rank: int
    size: int

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the group."""

    def all_gather(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Concatenate equal-shaped tensors of all ranks along ``dim`` in rank order."""

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """The tensor of group rank ``source``."""

    def barrier(self) -> None: ...


class SingleGroup:
    """The group of one rank: every collective is the identity."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return tensor

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        return tensor

    def barrier(self) -> None:
        return
