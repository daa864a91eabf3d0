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
    def module(self) -> str:
        """Last name of the module that holds it: "o_proj" of ``...self_attn.o_proj.weight``."""
        return self.name.split(".")[-2] if "." in self.name else self.name

    def stored_fp8(self, weight_format: str, fp8_except: tuple[str, ...]) -> bool:
        """Whether a checkpoint of this format holds it as fp8 blocks."""
        return self.quantisable and weight_format == "fp8_block" and self.module not in fp8_except

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def count_parameters(specs: Iterable[TensorSpec]) -> int:
    """Number of weights, without optional ones and block scales."""
    return sum(spec.numel for spec in specs if not spec.optional)
