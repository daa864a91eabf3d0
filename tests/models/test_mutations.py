"""Controls: each mistake that engines have made moves the log-probabilities far beyond the tolerance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from interlock.plan.card import AttentionCard, ModelCard
from interlock.reference.mimo_v2 import MiMoReference
from tests.harness import Harness, build_model, run_chunks
from tests.models.prompts import PROMPT, TOLERANCE, distance
from tests.tiny import flash, tiny_folder, v25

replace = msgspec.structs.replace
FAR = 1000 * TOLERANCE


def attention(change: Callable[[AttentionCard], dict[str, Any]]) -> Callable[[ModelCard], ModelCard]:
    def edit(card: ModelCard) -> ModelCard:
        layers = tuple(
            replace(layer, attention=replace(layer.attention, **change(layer.attention)))
            for layer in card.layers
        )
        return replace(card, layers=layers)

    return edit


def experts(**changes: Any) -> Callable[[ModelCard], ModelCard]:
    return lambda card: replace(card, experts=replace(card.experts, **changes))


MISTAKES: dict[str, Callable[[ModelCard], ModelCard]] = {
    "window one key wider": attention(lambda a: {"window": a.window and a.window + 1}),
    "window one key narrower": attention(lambda a: {"window": a.window and a.window - 1}),
    "no value scale": attention(lambda a: {"value_scale": 1.0}),
    "rope bases swapped": attention(lambda a: {"rope_theta": 1e7 if a.window else 1e4}),
    "one rope base": attention(lambda a: {"rope_theta": 1e4}),
    "whole head rotated": attention(lambda a: {"rotary_dim": a.head_dim}),
    "no renormalisation": experts(normalise_top_k=False),
    "one expert fewer": experts(top_k=1),
    "softmax router": experts(scoring="softmax"),
    "routed scaling of 2": experts(routed_scaling_factor=2.0),
    "other eps": lambda card: replace(card, norm_eps=1e-2),
}


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    return MiMoReference.load(tiny_folder(v25())).logprobs(PROMPT)


def test_no_mistake_is_near(expected: torch.Tensor) -> None:
    assert distance(run_chunks(build_model(tiny_folder(v25())), PROMPT, 16), expected) <= TOLERANCE


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_far(mistake: str, expected: torch.Tensor) -> None:
    """E03, C08: swapped base, dropped scale or a window off by one fail the oracle tests."""
    harness = build_model(tiny_folder(v25()), edit_card=MISTAKES[mistake])
    assert distance(run_chunks(harness, PROMPT, 16), expected) > FAR


def drop_sinks(harness: Harness) -> None:
    for layer in harness.model.layers:
        if layer.attention.sinks is not None:
            layer.attention.sinks.fill_(float("-inf"))


def test_dropped_sinks_are_far(expected: torch.Tensor) -> None:
    harness = build_model(tiny_folder(v25()))
    drop_sinks(harness)
    assert distance(run_chunks(harness, PROMPT, 16), expected) > FAR


def test_a_chunked_qkv_read_as_plain_is_far() -> None:
    folder = tiny_folder(v25(fp8=False))
    expected = MiMoReference.load(folder, qkv_layout="chunked").logprobs(PROMPT)
    right, wrong = (
        run_chunks(build_model(folder, qkv_layout=layout), PROMPT) for layout in ("chunked", "plain")
    )
    assert distance(right, expected) <= TOLERANCE
    assert distance(wrong, expected) > FAR


def test_a_wrong_position_in_the_cache_is_far(expected: torch.Tensor) -> None:
    """Control of the chunked runs: a chunk that does not see the one before it."""
    harness = build_model(tiny_folder(v25()))
    rows = torch.cat([run_chunks(harness, PROMPT[:20]), run_chunks(harness, PROMPT[20:])])
    assert distance(rows[:20], expected[:20]) <= TOLERANCE
    assert distance(rows[20:], expected[20:]) > FAR


def test_the_split_layout_notices_swapped_heads() -> None:
    """Control: reading kv heads in another order is visible."""
    folder = tiny_folder(flash())
    reference = MiMoReference.load(folder)
    name = "model.layers.1.self_attn.k_proj.weight"
    reference.weights[name] = reference.weights[name].roll(192, 0)
    rows = run_chunks(build_model(folder), PROMPT)
    assert distance(rows, reference.logprobs(PROMPT)) > FAR
