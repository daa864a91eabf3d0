"""What a layer needs to know about where it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from interlock.kernels.base import Kernels
from interlock.parallel.topology import Groups
from interlock.plan.launch_plan import LaunchPlan

if TYPE_CHECKING:
    from interlock.moe.layer import MoEContext


@dataclass(frozen=True, slots=True)
class ModelContext:
    """Handed to a model when it is built.

    Attributes:
        dtype: of activations and of weights that are not kept quantised.
        moe: what MoE layers need on top (dispatcher, runner), built by ``moe/build.py``.
    """

    plan: LaunchPlan
    kernels: Kernels
    groups: Groups
    device: torch.device
    dtype: torch.dtype
    moe: MoEContext
