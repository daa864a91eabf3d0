"""What a layer needs to know about where it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from interlock.kernels.base import Kernels
from interlock.nn.attention_backends.base import PagedAttention
from interlock.parallel.topology import Groups
from interlock.plan.launch_plan import LaunchPlan

if TYPE_CHECKING:
    from interlock.moe.layer import MoEContext


@dataclass(frozen=True, slots=True)
class ModelContext:
    """Handed to a model when it is built.

    Attributes:
        dtype: of activations and of weights that are not kept quantised.
        attention: computes over the cache, for all layers.
        moe: what MoE layers need on top (dispatcher, runner), built by ``moe/build.py``.
    """

    plan: LaunchPlan
    kernels: Kernels
    attention: PagedAttention
    groups: Groups
    device: torch.device
    dtype: torch.dtype
    moe: MoEContext
