"""Routing on a GPU, for the kernel set that is written for it: one matrix product and one kernel.

``routing.py`` says what it means; tests hold them equal.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from interlock.kernels.availability import triton_unavailable
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


@cache
def _counter() -> Callable[[torch.Tensor, torch.Tensor], None] | None:
    """The kernel that counts lanes, where there is one."""
    if triton_unavailable() is not None:
        return None
    from interlock.kernels.triton.router import count_lanes

    return count_lanes


def add_lane_counts(ids: torch.Tensor, counts: torch.Tensor) -> None:
    """counts int64 [L + 1] on a device grows: ``counts[i + 1]`` by the lanes of ids int64 naming i (or -1).

    Nothing waits for the host: it can be captured.
    """
    counter = _counter()
    if counter is not None and ids.numel():
        counter(ids.contiguous(), counts)
        return
    lanes = ids.flatten() + 1
    counts.scatter_add_(0, lanes, torch.ones_like(lanes))


def device_routing(kernels: Kernels, card: ExpertsCard, weight: torch.Tensor) -> DeviceRouting | None:
    """For the GPU's kernel set and a choice without groups of experts; None leaves it to torch."""
    if kernels.name != KERNEL_SET or card.num_groups > 1 or card.scoring not in ("sigmoid", "softmax"):
        return None
    return DeviceRouting(weight)
