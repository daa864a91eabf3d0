"""A transfer backend for tests: ``shared_memory`` that misbehaves as the file ``$PAIR_FAULT_FILE`` says.

The file holds one word and a moment of the machine's monotonic clock until which it counts:

    stall      nothing is written before that moment
    slow       each write takes 0.1 s more
    reorder    the pieces of a write arrive one by one, in another order
    duplicate  every piece is written twice
    fail       a write ends after half of its pieces with ``TransferError``
    break      the same with an exception that nobody foresaw
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

from interlock.kv.transfer.base import Pieces, TransferError
from interlock.kv.transfer.shared_memory import BACKEND as PLAIN
from interlock.kv.transfer.shared_memory.pools import SharedSender

FILE = "PAIR_FAULT_FILE"
NAME = "faulty"
BACKEND = replace(PLAIN, name=NAME, summary="for tests", sender=f"{__name__}:FaultySender", priority=0)


def some(pieces: Pieces, which: np.ndarray) -> Pieces:
    """Those pieces, in that order."""
    return Pieces(**{each.name: getattr(pieces, each.name)[which] for each in fields(Pieces)})


class FaultySender(SharedSender):
    """``KVSender``."""

    def write(self, receiver: int, pieces: Pieces) -> None:
        mode, until = told()
        order = np.arange(len(pieces))
        if mode == "stall":
            while told()[0] == "stall":
                time.sleep(0.01)
        elif mode == "slow":
            time.sleep(0.1)
        elif mode == "reorder":
            random.Random(until).shuffle(order)
            for index in order:
                super().write(receiver, some(pieces, order[index : index + 1]))
            return
        elif mode == "duplicate":
            super().write(receiver, pieces)
        elif mode in ("fail", "break"):
            super().write(receiver, some(pieces, order[: len(order) // 2]))
            raise (TransferError if mode == "fail" else ArithmeticError)("the wire is wet")
        super().write(receiver, pieces)


def told() -> tuple[str, float]:
    """The fault that is on now, "" for none, and until when."""
    try:
        mode, _, until = Path(os.environ[FILE]).read_text().partition(" ")
    except OSError:
        return "", 0.0
    return (mode, float(until)) if until and time.monotonic() < float(until) else ("", 0.0)
