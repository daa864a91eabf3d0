"""What the layers of a step share is made once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class StepMemo(Generic[T]):
    """Remembers what was made of one of the step's tensors until another step brings another tensor.

    Tensors are told apart by identity: those of a step do not change while it runs. Each captured CUDA graph
    has tensors of its own, so each holds what makes its own results.
    """

    def __init__(self) -> None:
        self._key: torch.Tensor | None = None
        self._made: T | None = None

    def of(self, key: torch.Tensor, make: Callable[[], T]) -> T:
        """What ``make`` gave for this very tensor."""
        if self._key is not key or self._made is None:
            self._key, self._made = key, make()
        return self._made
