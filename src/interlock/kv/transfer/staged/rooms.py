"""Memory that a landing fetches into, a few rooms in turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from interlock.kv.transfer.staged.carrier import LANDING_ROOMS


@dataclass(slots=True)
class _Room:
    memory: torch.Tensor
    registered: Any


class Rooms:
    """``LANDING_ROOMS`` pieces of registered host memory.

    Args:
        register, release: open memory to the carrier and give it up; ``release`` gets the memory and what
            ``register`` returned.
        retired: keeps, as long as the process lives, what something late may still be written to.
    """

    def __init__(
        self,
        register: Callable[[torch.Tensor], Any],
        release: Callable[[torch.Tensor, Any], None],
        retired: list[object],
    ) -> None:
        self._register = register
        self._release = release
        self._rooms: list[_Room | None] = [None] * LANDING_ROOMS
        self._turn = 0
        self._retired = retired

    def next(self, nbytes: int) -> torch.Tensor:
        """The room whose turn it is, uint8 [nbytes]."""
        self._turn = (self._turn + 1) % LANDING_ROOMS
        room = self._rooms[self._turn]
        if room is None or len(room.memory) < nbytes:
            self._give_back(self._turn)
            memory = torch.zeros(nbytes, dtype=torch.uint8)
            room = self._rooms[self._turn] = _Room(memory, self._register(memory))
        return room.memory[:nbytes]

    def retire(self, *more: object) -> None:
        """The room of the last ``next`` may still be written to: it stays as it is, and ``more`` with it."""
        self._retired += [self._rooms[self._turn], *more]
        self._rooms[self._turn] = None

    def close(self) -> None:
        """Give the rooms back. Idempotent."""
        for turn in range(LANDING_ROOMS):
            self._give_back(turn)

    def _give_back(self, turn: int) -> None:
        room, self._rooms[turn] = self._rooms[turn], None
        if room is not None:
            self._release(room.memory, room.registered)
