"""Routing on a GPU, for the kernel set that is written for it: one matrix product and one kernel.

``routing.py`` says what it means; tests hold them equal.
"""

from __future__ import annotations

import torch

from interlock.kernels.base import Kernels
from interlock.plan.card import ExpertsCard

KERNEL_SET = "triton"


class DeviceRouting:
    """The router's weight [E, h] on a GPU, and the choice. Can be captured in a CUDA graph.

    Args:
        weight: float32 or bfloat16, on the device.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        from interlock.kernels.triton import router

        self._router = router
        self._weight = router.pack_router(weight)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden bfloat16 [n, h] -> float32 [n, E]."""
        return self._router.sum_parts(self._router.part_logits(hidden, self._weight))

    def route(
        self,
        hidden: torch.Tensor,
        bias: torch.Tensor | None,
        card: ExpertsCard,
        live_tokens: int,
        live_count: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden bfloat16 [n, h] -> ids int64 [n, k], weights float32 [n, k]; see ``Router.route``."""
        logits = self._router.part_logits(hidden, self._weight)
        return self._router.top_k(
            logits.values,
            bias,
            card.top_k,
            sigmoid=card.scoring == "sigmoid",
            normalise=card.normalise_top_k,
            scaling=card.routed_scaling_factor,
            parts=logits.parts,
            live_tokens=live_tokens,
            live_count=live_count,
        )


def device_routing(kernels: Kernels, card: ExpertsCard, weight: torch.Tensor) -> DeviceRouting | None:
    """For the GPU's kernel set and a choice without groups of experts; None leaves it to torch."""
    if kernels.name != KERNEL_SET or card.num_groups > 1 or card.scoring not in ("sigmoid", "softmax"):
        return None
    return DeviceRouting(weight)
