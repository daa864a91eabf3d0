"""The statistics against numbers that are known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.bench.prompts import text_prompt, token_prompts
from interlock.bench.statistics import Crossover, Figure, crossover, growth, percentile

BATCHES = (32, 64, 128, 256, 512)
EP = dict(zip(BATCHES, (34.08, 37.06, 39.44, 44.24, 49.99), strict=True))
TP = dict(zip(BATCHES, (30.56, 39.01, 45.81, 51.24, 62.34), strict=True))


def figures(values: dict[int, float], width: float = 0.0) -> dict[int, Figure]:
    return {batch: Figure((value - width, value, value + width)) for batch, value in values.items()}


def test_the_published_table_reproduces() -> None:
    """A published decode table: growth 1.47x against 2.04x, and EP wins from batch 64 on."""
    assert growth(figures(EP)) == pytest.approx(1.47, abs=0.005)
    assert growth(figures(TP)) == pytest.approx(2.04, abs=0.005)
    found = crossover("ep", figures(EP), "tp", figures(TP))
    gap = 34.08 - 30.56
    meets = 32 + 32 * gap / (gap + 39.01 - 37.06)
    assert found == Crossover("ep", "tp", 64, pytest.approx(meets), clear=True)
    assert crossover("tp", figures(TP), "ep", figures(EP)) == found


def test_a_crossover_within_the_spread_says_so() -> None:
    found = crossover("ep", figures(EP, width=2.0), "tp", figures(TP))
    assert found is not None
    assert not found.clear


def test_no_crossover_where_one_arm_always_wins() -> None:
    faster = {batch: value - 20 for batch, value in EP.items()}
    assert crossover("a", figures(faster), "b", figures(TP)) is None
    assert crossover("a", figures({32: 1.0}), "b", figures(TP)) is None
    equal = crossover("a", figures(TP), "b", figures(TP))
    assert equal is None


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 1))
def test_percentiles_are_numpys(values: list[float], share: float) -> None:
    expected = float(np.percentile(values, share * 100))
    assert percentile(values, share) == pytest.approx(expected, abs=1e-6, rel=1e-9)


def test_no_value_has_no_percentile() -> None:
    """K03: absent is None, not zero."""
    assert percentile([], 0.5) is None


@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 2**48))
def test_no_two_prompts_share_a_prefix(count: int, length: int, seed: int) -> None:
    """K01: nothing of one prompt is in the prefix cache for another, or for those of another round."""
    prompts = token_prompts(count, length, vocab_size=100, avoid=(0, 2), seed=seed, salt=(1,))
    assert len({prompt[0] for prompt in prompts}) == count
    assert not {0, 2} & {token for prompt in prompts for token in prompt}
    assert prompts == token_prompts(count, length, vocab_size=100, avoid=(0, 2), seed=seed, salt=(1,))
    texts = [text_prompt(index, length, seed=seed).split()[0] for index in range(count)]
    assert len(set(texts)) == count
