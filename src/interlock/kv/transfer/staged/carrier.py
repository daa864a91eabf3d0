"""What moves a run of bytes from a sender's staging memory to a receiver."""

from __future__ import annotations

from typing import Protocol

import torch

LANDING_ROOMS = 3
"""Parts that a receiver holds: one that comes, one that waits, one that is scattered."""


class SourceCarrier(Protocol):
    """The sender's end. One for each sender."""

    def open(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] of host memory that receivers can fetch from; called once.

        Raises:
            TransferError: it cannot be had.
        """

    def description(self) -> bytes:
        """What a receiver needs to ``reach`` the memory."""

    def close(self) -> None:
        """Idempotent."""


class Landing(Protocol):
    """A receiver's end of one sender. One thread."""

    def fetch(self, start: int, nbytes: int) -> torch.Tensor:
        """Bytes ``start : start + nbytes`` of the sender's memory, uint8. They stay for the next
        ``LANDING_ROOMS - 1`` calls.

        Raises:
            TransferError: not all of them arrived. The landing is not used again: what is late may still
                be written to its memory, which must therefore stay as long as the process does.
        """

    def close(self) -> None:
        """Idempotent."""


class TargetCarrier(Protocol):
    """The receiver's end. One for each receiver; any thread."""

    def reach(self, description: bytes, nbytes: int) -> Landing:
        """Reach a sender's ``nbytes`` of memory.

        Raises:
            TransferError: it cannot be reached, or is not what it says.
        """

    def close(self) -> None:
        """Idempotent."""
