"""Which experts compute a token, and with which weights.

``route(hidden) -> ids int64 [n, k], weights float32 [n, k]``: ids are distinct and ascending in a row, unused
slots are -1 with weight 0 and come last. Ties go to the lowest id. A row of NaN gets valid distinct ids and
NaN weights, and touches no other row.

Scores are computed in float64 and rounded to float32: vector and scalar code paths of torch differ in the
last bit of float32, so a token's weights would depend on its place in the batch.

Legend: n tokens, k experts a token, E experts, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from interlock.errors import CheckpointError
from interlock.kernels.base import Kernels, PackedWeight
from interlock.moe.a2a.contract import ContractError
from interlock.moe.device_routing import DeviceRouting, device_routing
from interlock.moe.native_moe import native_moe
from interlock.plan.card import ExpertsCard

NORM_EPS = 1e-20
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Routes:
    """ids int64 [n, k], weights float32 [n, k]."""

    ids: torch.Tensor
    weights: torch.Tensor


def choose_experts(logits: torch.Tensor, bias: torch.Tensor | None, card: ExpertsCard) -> Routes:
    """Top-k experts of float32 logits [n, E]; ``bias`` float32 [E] moves the choice, never the weights.

    An expert whose logit is -inf is never chosen. With groups, the ``top_k_groups`` best groups stay, judged
    by the sum of their two best biased scores (sigmoid) or by their best score (softmax). Source: the routing
    of DeepSeek-V3, which MiMo-V2 and Qwen3-MoE specialise.
    """
    if logits.dtype != torch.float32:
        raise TypeError(f"router logits must be float32, not {logits.dtype}")
    scores = _scores(logits, card.scoring)
    choice = scores if bias is None else scores + bias
    choice = choice.masked_fill(logits == -torch.inf, -torch.inf)
    if card.num_groups > 1:
        choice = _keep_best_groups(choice, card)
    best, ids = choice.sort(dim=-1, descending=True, stable=True)
    best, ids = best[:, : card.top_k], ids[:, : card.top_k]
    ids = ids.masked_fill(best == -torch.inf, card.num_experts).sort(dim=-1).values
    unused = ids == card.num_experts
    weights = scores.gather(1, ids.masked_fill(unused, 0)).masked_fill(unused, 0.0)
    return Routes(ids=ids.masked_fill(unused, -1), weights=scaled_weights(weights, card))


def scaled_weights(weights: torch.Tensor, card: ExpertsCard) -> torch.Tensor:
    """Normalise (where the card says so) and scale the chosen scores [n, k]; the only place that does."""
    if card.normalise_top_k:
        total = weights.sum(dim=-1, keepdim=True, dtype=torch.float64) + NORM_EPS
        weights = (weights / total).float()
    if card.routed_scaling_factor != 1.0:
        weights = weights * card.routed_scaling_factor
    return weights


def _scores(logits: torch.Tensor, scoring: str) -> torch.Tensor:
    if scoring == "sigmoid":
        return torch.sigmoid(logits.double()).float()
    if scoring == "softmax":
        return torch.softmax(logits.double(), dim=-1).float()
    raise ValueError(f"scoring {scoring!r} is not known; known: sigmoid, softmax")


def _keep_best_groups(choice: torch.Tensor, card: ExpertsCard) -> torch.Tensor:
    grouped = choice.view(choice.shape[0], card.num_groups, card.num_experts // card.num_groups)
    members = min(2 if card.scoring == "sigmoid" else 1, grouped.shape[2])
    rank = grouped.sort(dim=-1, descending=True).values[:, :, :members].sum(dim=-1)
    order = rank.sort(dim=-1, descending=True, stable=True).indices
    rejected = torch.ones_like(rank, dtype=torch.bool)
    rejected.scatter_(1, order[:, : card.top_k_groups], False)
    return grouped.masked_fill(rejected.unsqueeze(-1), -torch.inf).flatten(1)


def validate_routes(ids: torch.Tensor, num_experts: int) -> None:
    """Raise ContractError naming the token when an id is out of range or occurs twice in a row."""
    wrong = (ids < -1) | (ids >= num_experts)
    if wrong.any():
        token, lane = wrong.nonzero()[0].tolist()
        raise ContractError(
            f"token {token} names expert {int(ids[token, lane])}: ids must be in [0, {num_experts}) or -1"
        )
    ordered = ids.sort(dim=-1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any():
        token, lane = twice.nonzero()[0].tolist()
        raise ContractError(
            f"token {token} names expert {int(ordered[token, lane])} twice: ids of a token must be distinct"
        )


class Router:
    """The gate of one layer: a linear into float32 logits, then ``choose_experts``."""

    def __init__(self, card: ExpertsCard, hidden_size: int, kernels: Kernels, device: torch.device) -> None:
        if card.router_dtype not in _DTYPES:
            raise ValueError(f"router dtype {card.router_dtype!r} is not known; known: {', '.join(_DTYPES)}")
        self.card = card
        self._hidden_size = hidden_size
        self._kernels = kernels
        self._device = device
        native = native_moe(kernels)
        self._native = native if native is not None and native.can_route(card) else None
        self._weight: PackedWeight | None = None
        self._on_device: DeviceRouting | None = None
        self._largest_norm = 0.0
        self.bias: torch.Tensor | None = None

    def load(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """weight [E, h] is kept in the card's router dtype, bias [E] always in float32."""
        expected = (self.card.num_experts, self._hidden_size)
        if tuple(weight.shape) != expected:
            raise CheckpointError(f"router weight is {tuple(weight.shape)}, expected {expected}")
        if (bias is not None) != self.card.has_selection_bias:
            raise CheckpointError(
                f"router bias: given {bias is not None}, card says {not (bias is not None)}"
            )
        if bias is not None and (tuple(bias.shape) != expected[:1] or not bias.is_floating_point()):
            raise CheckpointError(f"router bias is {tuple(bias.shape)} {bias.dtype}, expected {expected[:1]}")
        dtype = _DTYPES[self.card.router_dtype]
        self._largest_norm = float(weight.float().norm(dim=1).max())
        weight = weight.to(device=self._device, dtype=dtype).contiguous()
        self._weight = self._kernels.pack_linear(weight)
        self._on_device = device_routing(self._kernels, self.card, weight)
        self.bias = None if bias is None else bias.to(device=self._device, dtype=torch.float32).contiguous()

    @property
    def loaded(self) -> bool:
        return self._weight is not None

    def scores(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [n, h] -> float32 [n, E] each: scores, which become weights, and what the choice goes by."""
        scores = _scores(self.logits(hidden), self.card.scoring)
        return scores, scores if self.bias is None else scores + self.bias

    def reach(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [n]: how large a logit of each row of hidden [n, h] can be; rounding is relative to it."""
        largest: torch.Tensor = hidden.float().norm(dim=-1) * self._largest_norm
        return largest

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, h] -> float32 [n, E]."""
        if self._weight is None:
            raise RuntimeError("route was called before load")
        if self._on_device is not None and hidden.dtype == torch.bfloat16:
            return self._on_device.logits(hidden)
        return self._kernels.linear(hidden, self._weight, out_dtype=torch.float32)

    def route(self, hidden: torch.Tensor, live_tokens: int, live_count: torch.Tensor | None = None) -> Routes:
        """hidden [n, h]; tokens at and beyond ``live_tokens`` are padding and get ids -1, weights 0.

        ``live_count``, int32 [1] on the device, overrides ``live_tokens`` where a graph is captured.
        """
        if self._on_device is not None and hidden.dtype == torch.bfloat16:
            routed = self._on_device.route(hidden, self.bias, self.card, live_tokens, live_count)
            return Routes(*routed)
        logits = self.logits(hidden)
        if self._native is not None:
            return Routes(*self._native.route(logits, self.bias, self.card, live_tokens))
        routes = choose_experts(logits, self.bias, self.card)
        if live_count is not None:
            padding = torch.arange(hidden.shape[0], device=hidden.device)[:, None] >= live_count
            return Routes(routes.ids.masked_fill(padding, -1), routes.weights.masked_fill(padding, 0.0))
        if live_tokens < hidden.shape[0]:
            routes.ids[live_tokens:] = -1
            routes.weights[live_tokens:] = 0.0
        return routes
