"""What the kernels need to know to draw the rows of a step on a device. On a CPU ``draw_host.py`` draws."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from interlock.engine.batch import SamplingRows
from interlock.engine.philox import uniforms
from interlock.engine.upload import upload

Int64s = npt.NDArray[np.int64]


class Draw(Protocol):
    """``Kernels.draw``."""

    def __call__(
        self,
        logits: torch.Tensor,
        *,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        uniforms: torch.Tensor,
    ) -> torch.Tensor: ...


def draw_rows(draw: Draw, logits: torch.Tensor, sampling: SamplingRows, rows: Int64s) -> torch.Tensor:
    """Draw from float32 logits [r, V], which belong to the rows ``rows`` of the batch -> int64 [r]."""
    device = logits.device
    return draw(
        logits,
        temperature=upload(sampling.temperature[rows], device),
        top_k=upload(sampling.top_k[rows], device),
        top_p=upload(sampling.top_p[rows], device),
        min_p=upload(sampling.min_p[rows], device),
        uniforms=upload(uniforms(sampling.seed[rows], sampling.positions[rows]), device),
    )
