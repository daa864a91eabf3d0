"""Where weights come from, as the layers see it: a checkpoint folder or dummy weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from interlock.checkpoint.specs import TensorSpec
from interlock.checkpoint.validate import LoadReport
from interlock.kernels.fp8_blocks import Fp8Blocks

Progress = Callable[[int, int, str], None]
"""Called with (parts done, parts in all, name of the part just loaded)."""


def no_progress(done: int, total: int, what: str) -> None:
    """The progress callback that says nothing."""


class ExpertFill(Protocol):
    """See ``moe/experts/base.py``, where runners meet it."""

    def gate_up(self, values: torch.Tensor, scales: torch.Tensor | None) -> None: ...

    def down(self, values: torch.Tensor, scales: torch.Tensor | None) -> None: ...


class WeightSource(Protocol):
    """Opened, not yet read. ``validate`` comes first and says what will be read.

    ``load_format`` is the plan item's value that this source is.
    """

    load_format: str
    report: LoadReport
    progress: Progress

    def close(self) -> None: ...

    def validate(self, specs: Sequence[TensorSpec], skipped_prefixes: Sequence[str]) -> LoadReport:
        """Compare what is there with what the model expects. Raises CheckpointError."""

    def __contains__(self, name: str) -> bool: ...

    def read(
        self,
        name: str,
        *,
        rows: Sequence[range] | None = None,
        columns: range | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        """The tensor (or these rows, in this order, and these columns of it), dequantised, as ``dtype``."""

    def is_fp8(self, name: str) -> bool:
        """Whether the tensor is stored as fp8 blocks."""

    def read_fp8(
        self, name: str, *, rows: Sequence[range] | None = None, columns: range | None = None
    ) -> Fp8Blocks:
        """The stored blocks of a tensor, or of these rows and columns of it, as they are.

        Raises CheckpointError where a block of the result would lie in two stored ones.
        """

    def expert_fill(self, prefix: str, first_expert: int) -> ExpertFill | None:
        """What writes all experts of a layer at once; None where they are read one by one."""
