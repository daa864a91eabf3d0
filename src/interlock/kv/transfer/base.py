"""What a transfer backend declares, and what its live objects do. No torch at import time.

A backend moves bytes of key-value pages from a prefill server's rank to a decode server's rank. It knows
nothing of tokens, heads or requests: the receiver registers buffers, the sender writes pieces of its own
buffers into them, one-sided. What to copy is computed in ``copies``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from interlock.errors import InterlockError

if TYPE_CHECKING:
    import torch

Int64s = npt.NDArray[np.int64]


class TransferError(InterlockError):
    """A transfer that cannot be done; its text names both sides' part in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferBackend:
    """Capabilities of one backend.

    Attributes:
        devices: where the pools may live: "cpu", "cuda".
        spans_hosts: the two servers may run on different machines.
        packages: distributions that must be installed.
        one_of: distributions of which one must be installed, any of them.
        libraries: shared libraries that the operating system must have.
        remedy: what to run where one of ``libraries`` is missing.
        sender, receiver: "module:Class" of a ``KVSender`` and a ``KVReceiver``, constructed with the host
            that peers reach this process at and ``timeout``, the seconds after which a silent one is gone.
        environment: name and value of variables of the library that a rank is started with, where they are
            not set: it reads them when it is loaded.
        limits: what else to know, for people: which links it was run over, what was never run.
        priority: the highest one that is ready is taken by default.
    """

    name: str
    summary: str
    devices: frozenset[str]
    spans_hosts: bool
    sender: str
    receiver: str
    packages: tuple[str, ...] = ()
    one_of: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    remedy: str = ""
    environment: tuple[tuple[str, str], ...] = ()
    limits: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Pieces:
    """Bytes to copy, all int64 [pieces].

    Piece i is ``rows[i]`` times ``length[i]`` bytes, ``source_stride[i]`` apart from ``source[i]`` of the
    sender's buffer ``source_buffer[i]`` on, written ``target_stride[i]`` apart from ``target[i]`` of the
    receiver's buffer ``target_buffer[i]`` on.
    """

    source_buffer: Int64s
    source: Int64s
    target_buffer: Int64s
    target: Int64s
    length: Int64s
    rows: Int64s
    source_stride: Int64s
    target_stride: Int64s

    def __len__(self) -> int:
        return len(self.length)

    @property
    def nbytes(self) -> int:
        return int((self.length * self.rows).sum())

    def check(self, source_sizes: Sequence[int], target_sizes: Sequence[int]) -> None:
        """Raises ``TransferError`` for a piece that leaves its buffers."""
        for name, buffer, start, stride, sizes in (
            ("source", self.source_buffer, self.source, self.source_stride, source_sizes),
            ("target", self.target_buffer, self.target, self.target_stride, target_sizes),
        ):
            check_blocks(name, buffer, start, self.length, self.rows, stride, sizes)


def check_blocks(
    name: str,
    buffer: Int64s,
    start: Int64s,
    length: Int64s,
    rows: Int64s,
    stride: Int64s,
    sizes: Sequence[int],
) -> None:
    """Raises ``TransferError`` for a block that leaves its buffer; ``name`` says which side it is on."""
    if not len(buffer):
        return
    if buffer.min() < 0 or buffer.max() >= len(sizes):
        raise TransferError(f"a piece is in {name} buffer {buffer.max()}; there are {len(sizes)}")
    limit = np.asarray(sizes, dtype=np.int64)[buffer]
    for values in (start, length, rows, stride):
        if values.min() < 0 or (values > limit).any():
            raise TransferError(f"a piece leaves its {name} buffer")
    reach = (rows.astype(np.float64) - 1) * stride
    if (reach > limit).any() or (start + (rows - 1) * stride + length > limit).any():
        raise TransferError(f"a piece leaves its {name} buffer")


class KVReceiver(Protocol):
    """The decode side of one rank: memory that others may write to."""

    @property
    def settle_seconds(self) -> float:
        """Once a sender has stopped, or was cut off, its last bytes are written within this time. Known
        after ``register``."""

    def allocate(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Zero-filled uint8 buffers of these sizes on the CPU, suitable for ``register``."""

    def register(self, buffers: Sequence[torch.Tensor]) -> bytes:
        """Open contiguous ``buffers`` to writers; returns what a sender needs to ``connect``.

        Raises:
            TransferError: they cannot be opened.
        """

    def close(self) -> None:
        """Nobody may write any more. Idempotent."""


class KVSender(Protocol):
    """The prefill side of one rank."""

    def register(self, buffers: Sequence[torch.Tensor]) -> None:
        """The contiguous buffers that pieces are read from."""

    def connect(self, description: bytes, sizes: Sequence[int]) -> int:
        """Reach a receiver; returns its number. ``sizes`` are what its buffers must hold, in bytes.

        Raises:
            TransferError: it cannot be reached, or is not what it says.
        """

    def write(self, receiver: int, pieces: Pieces) -> None:
        """Copy; when this returns, all bytes are in the receiver's memory. One caller at a time.

        Raises:
            TransferError: not everything arrived.
        """

    def cut(self, receiver: int) -> None:
        """Begin nothing more for this receiver, and end a ``write`` to it soon. Any thread."""

    def disconnect(self, receiver: int) -> None: ...

    def close(self) -> None:
        """Idempotent."""
