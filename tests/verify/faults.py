"""Seeded faults: each changes one thing of a candidate that receipts cannot see (but for the last)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch

from interlock.checkpoint import reader
from interlock.engine.model_runner import ModelRunner
from interlock.moe.layer import MoELayer
from interlock.moe.routing import Router, Routes, scaled_weights
from interlock.moe.terms import Phase
from interlock.verify.attribute import Origin
from tests.verify.in_process import Change, unchanged


@dataclass(frozen=True)
class Fault:
    """A fault and what ``verify`` must say of it.

    Attributes:
        origin: where the layers must part first; None where the start must be refused.
        layer, position: of the first difference; None where the text decides.
        words: must occur in the diagnosis, or in the refusal.
    """

    name: str
    origin: Origin | None
    layer: int | None
    position: int | None
    words: str
    change: Change = unchanged
    patches: Callable[[], ExitStack] = ExitStack
    options: dict[str, Any] = field(default_factory=dict)


def _attentions(runner: ModelRunner) -> Iterator[Any]:
    return (layer.attention for layer in runner.model.layers)


def _experts(runner: ModelRunner) -> Iterator[MoELayer]:
    return (layer.experts for layer in runner.model.layers if layer.experts is not None)


def wider_window(runner: ModelRunner) -> None:
    for attention in _attentions(runner):
        if attention._window is not None:
            attention._window += 1
            attention._card = msgspec.structs.replace(attention._card, window=attention._window)


def no_value_scale(runner: ModelRunner) -> None:
    for attention in _attentions(runner):
        attention._card = msgspec.structs.replace(attention._card, value_scale=1.0)


def no_sinks(runner: ModelRunner) -> None:
    for attention in _attentions(runner):
        if attention.sinks is not None:
            attention.sinks.fill_(-torch.inf)


def swapped_rope_bases(runner: ModelRunner) -> None:
    full, sliding = (layer.attention for layer in runner.model.layers[:2])
    tables = full._cos_sin, sliding._cos_sin
    for attention in _attentions(runner):
        attention._cos_sin = tables[attention._window is None]


def not_renormalised(runner: ModelRunner) -> None:
    for layer in _experts(runner):
        layer._router.card = msgspec.structs.replace(layer.card, normalise_top_k=False)


def bias_in_weights(runner: ModelRunner) -> None:
    def route(router: Router, original: Any) -> Any:
        def faulty(hidden: torch.Tensor, live_tokens: int, live_count: torch.Tensor | None) -> Routes:
            routes = original(hidden, live_tokens, live_count)
            weights = router.scores(hidden)[1].gather(1, routes.ids.clamp_min(0))
            weights = scaled_weights(weights, router.card).masked_fill(routes.ids < 0, 0.0)
            return Routes(routes.ids, weights)

        return faulty

    for layer in _experts(runner):
        router: Any = layer._router
        router.route = route(router, router.route)


def stale_padding_row(runner: ModelRunner) -> None:
    """A padding row of the step before takes the slot of a live row."""

    def run(original: Any) -> Any:
        last: list[torch.Tensor] = []

        def faulty(rows: Any) -> torch.Tensor:
            out = original(rows)
            fresh = out.clone()
            if last:
                out[-1, 0] = last[0][0, 0]
            last[:] = [fresh]
            return out

        return faulty

    for layer in _experts(runner):
        layer._runner.run = run(layer._runner.run)  # type: ignore[method-assign]


def swapped_page(runner: ModelRunner) -> None:
    """While decoding, the first and the last page of a sequence are taken for one another."""
    original = runner.forward

    def forward(arrays: Any) -> torch.Tensor:
        table = arrays.full_table
        if arrays.phase is Phase.DECODE and table is not None and table.shape[1] > 1:
            order = np.arange(table.shape[1])
            order[[0, -1]] = order[[-1, 0]]
            arrays = replace(arrays, full_table=table[:, order])
        return original(arrays)

    runner.forward = forward  # type: ignore[method-assign]


def other_order(runner: ModelRunner) -> None:
    kernels: Any = runner.kernels
    original = kernels.sum_lanes
    kernels.sum_lanes = lambda rows, ids, dtype: original(rows.flip(1), ids.flip(1), dtype)


def smaller_capacity(runner: ModelRunner) -> None:
    dispatcher: Any = runner.context.moe.dispatcher
    capacity = {phase: tokens - 1 for phase, tokens in dispatcher.spec.capacity.items()}
    dispatcher.spec = replace(dispatcher.spec, capacity=capacity)


def _rotated_experts() -> ExitStack:
    original = MoELayer.load_expert

    def load_expert(self: MoELayer, expert_id: int, *weights: torch.Tensor) -> None:
        original(self, (expert_id + 1) % self.card.num_experts, *weights)

    return _patched(mock.patch.object(MoELayer, "load_expert", load_expert))


def _shifted_scales() -> ExitStack:
    original = reader.scale_row_of

    def scale_row_of(row: torch.Tensor, **shape: int) -> torch.Tensor:
        rows = original(row, **shape)
        return (rows + 1).clamp_max(original(torch.tensor(shape["rows"] - 1), **shape))

    return _patched(mock.patch.object(reader, "scale_row_of", scale_row_of))


def _patched(patch: Any) -> ExitStack:
    stack = ExitStack()
    stack.enter_context(patch)
    return stack


FAULTS = (
    Fault("window + 1", Origin.ATTENTION, 1, 16, "look at the window", wider_window),
    Fault("value scale off", Origin.ATTENTION, 0, 0, "value scale", no_value_scale),
    Fault("bias in weights", Origin.WEIGHTS, 1, 0, "selection bias entered the weights", bias_in_weights),
    Fault("weights not renormalised", Origin.WEIGHTS, 1, 0, "which sum to 1 against", not_renormalised),
    Fault("scale block shifted", Origin.ATTENTION, 0, 0, "projections' weights", patches=_shifted_scales),
    Fault("expert map rotated", Origin.EXPERTS, 1, 0, "map of experts", patches=_rotated_experts),
    Fault("stale padding row routed", Origin.EXPERTS, 1, None, "padding rows", stale_padding_row),
    Fault("KV page swapped", Origin.ATTENTION, 0, None, "KV pages", swapped_page),
    Fault("sink dropped", Origin.ATTENTION, 1, 0, "the sinks", no_sinks),
    Fault("rope base swapped", Origin.ATTENTION, 0, 1, "rotary", swapped_rope_bases),
    Fault(
        "combine in another order", Origin.ROUNDING, 1, None, "sums in another order", other_order,
        options={"deterministic": True},
    ),
    Fault("one rank's T smaller", None, None, None, "the capacity of a rank is", smaller_capacity),
)  # fmt: skip
