"""What tensors a model expects in its checkpoint. No torch here: the planner counts parameters with it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor by its name in the checkpoint.

    Attributes:
        shape: as stored (full, not sharded); for linears [out, in].
        quantisable: may be stored as fp8 with block scales beside it.
        fused_groups: > 0 for a fused qkv tensor that may be stored as this many row chunks, each with a scale
            grid of its own (see ``checkpoint/qkv.py``).
        optional: may be absent (a head that the config calls tied).
        role: how dummy weights are drawn: "linear", "output" (writes to the residual stream), "embedding",
            "norm", "router", "bias".
    """

    name: str
    shape: tuple[int, ...]
    role: str = "linear"
    quantisable: bool = False
    fused_groups: int = 0
    optional: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def count_parameters(specs: Iterable[TensorSpec]) -> int:
    """Number of weights, without optional ones and block scales."""
    return sum(spec.numel for spec in specs if not spec.optional)
