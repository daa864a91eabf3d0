"""The walk through the layers, on made-up traces: what is excused as a near tie, and what is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from interlock.verify.attribute import LOGITS, MIXED, SCORES, Origin, attribute, precision_of
from interlock.verify.trace import LayerRoutes, Trace

TOKENS, WIDTH, EXPERTS = 6, 16, 4


def trace(layers: int = 2) -> Trace:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, EXPERTS, generator=generator)
    logits[3] = torch.tensor([2.0, 1.0, 1.0 - 1e-6, -1.0])
    choice = torch.sigmoid(logits)
    ids = choice.topk(2).indices.sort(-1).values
    routes = LayerRoutes(ids, torch.full((TOKENS, 2), 0.5), choice, logits, torch.full((TOKENS,), 10.0))
    outputs = {
        (layer, part): torch.randn(TOKENS, WIDTH, generator=generator)
        for layer in range(layers)
        for part in ("attention", "mlp")
    }
    return Trace(torch.arange(TOKENS), outputs, {1: routes})


def flipped(base: Trace, row: int, ids: list[int]) -> Trace:
    """The same trace with another choice at one token, and what follows from it."""
    routes = base.routes[1]
    changed = routes.ids.clone()
    changed[row] = torch.tensor(ids)
    outputs = dict(base.outputs)
    outputs[1, "mlp"] = outputs[1, "mlp"].clone()
    outputs[1, "mlp"][row] += 1.0
    return replace(base, outputs=outputs, routes={1: replace(routes, ids=changed)})


def test_equal_traces_have_no_cause() -> None:
    assert attribute(trace(), trace(), "float32").origin is Origin.NONE


def test_a_near_tie_of_scores_is_excused_with_what_follows() -> None:
    found = attribute(trace(), flipped(trace(), 3, [0, 2]), "float32")
    assert found.origin is Origin.FLIP
    (flip,) = found.flips
    assert (flip.layer, flip.position, flip.left, flip.joined, flip.unit) == (1, 3, (1,), (2,), SCORES)
    assert 0 <= flip.gap < 1e-6
    assert not found.is_fault


def test_a_choice_far_from_a_tie_is_a_fault() -> None:
    found = attribute(trace(), flipped(trace(), 3, [0, 3]), "float32")
    assert (found.origin, found.layer, found.position) == (Origin.CHOICE, 1, 3)
    assert found.is_fault


def test_a_saturated_router_is_judged_by_its_logits() -> None:
    """Scores jump from 0 to 1 although the logits differ by rounding of what they can reach."""
    sides = []
    for sign in (1.0, -1.0):
        base = trace()
        logits = base.routes[1].logits.clone()
        logits[3] = torch.tensor([90.0, sign * 40.0, -sign * 40.0, -90.0])
        routes = replace(
            base.routes[1], logits=logits, choice=torch.sigmoid(logits), reach=torch.full((TOKENS,), 1e9)
        )
        side = replace(base, routes={1: routes})
        sides.append(flipped(side, 3, [0, 1 if sign > 0 else 2]))
    found = attribute(*sides, "float32")
    assert found.origin is Origin.FLIP
    assert found.flips[0].unit == LOGITS


def test_a_difference_elsewhere_is_still_found_after_a_flip() -> None:
    candidate = flipped(trace(), 3, [0, 2])
    candidate.outputs[1, "mlp"][1] += 0.5
    found = attribute(trace(), candidate, "float32")
    assert (found.origin, found.layer, found.position) == (Origin.EXPERTS, 1, 1)


def test_later_positions_see_a_flip_through_attention_and_earlier_ones_do_not() -> None:
    control, candidate = trace(3), flipped(trace(3), 3, [0, 2])
    candidate.outputs[2, "attention"] = candidate.outputs[2, "attention"].clone()
    candidate.outputs[2, "attention"][4] += 1.0
    assert attribute(control, candidate, "float32").origin is Origin.FLIP
    candidate.outputs[2, "attention"][2] += 1.0
    found = attribute(control, candidate, "float32")
    assert (found.origin, found.layer, found.position) == (Origin.ATTENTION, 2, 2)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_a_fault(value: float) -> None:
    candidate = trace()
    candidate.outputs[0, "attention"][2, 0] = value
    found = attribute(trace(), candidate, "bfloat16")
    assert (found.origin, found.layer, found.position) == (Origin.ATTENTION, 0, 2)


def test_rounding_depends_on_the_precision_of_both_arms() -> None:
    candidate = trace()
    candidate.outputs[0, "mlp"] = candidate.outputs[0, "mlp"] * 1.01
    assert attribute(trace(), candidate, "float32").origin is Origin.DENSE
    assert attribute(trace(), candidate, "bfloat16").origin is Origin.ROUNDING
    assert precision_of("float32", "float32") == "float32"
    assert precision_of("float32", "bfloat16") == MIXED


def test_traces_of_other_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="same positions"):
        attribute(trace(), replace(trace(), positions=torch.arange(1, TOKENS + 1)), "float32")
