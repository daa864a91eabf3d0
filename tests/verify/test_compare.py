"""The measure itself: what is identical, rounding, or different, and near ties."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.engine.messages import TokenLogprob
from interlock.verify.arm import Scored
from interlock.verify.compare import Outcome, agree, compare, tolerance_of
from tests.plan.machines import tiny_card
from tests.plans import make_plan

logprobs = st.floats(-30, 0)


def scored(*entries: TokenLogprob | None) -> Scored:
    return Scored(tuple(range(len(entries))), 1, entries)


def entry(token: int, *values: float) -> TokenLogprob:
    return TokenLogprob(token, values[token], tuple(enumerate(values)))


@pytest.mark.parametrize(("margin", "excused"), [(0.01, True), (0.5, False)])
def test_a_flip_is_excused_only_at_a_near_tie(margin: float, excused: bool) -> None:
    """E14: the self-test of ``agree``."""
    assert agree([1.0, 1.0 - margin, 0.0], [1.0, 1.0 + margin, 0.0], margin=0.05) is excused


@given(st.lists(logprobs, min_size=2, max_size=5))
def test_a_text_is_identical_with_itself(values: list[float]) -> None:
    text = scored(None, entry(0, *values), entry(1, *values))
    same = compare(text, text, 0.0)
    assert same.outcome is Outcome.IDENTICAL
    assert (same.largest, same.first_difference, same.mean_kl) == (0.0, None, 0.0)


@given(st.floats(-5, -0.1), st.floats(1e-6, 4e-4))
def test_a_difference_below_the_tolerance_is_rounding_and_above_is_not(value: float, change: float) -> None:
    ours, theirs = (scored(None, entry(0, v, -9.0)) for v in (value, value + change))
    assert compare(ours, theirs, 5e-4).outcome is Outcome.ROUNDING
    assert compare(ours, theirs, change / 2).outcome is Outcome.DIFFERENT
    assert compare(ours, theirs, 0.0).outcome is Outcome.DIFFERENT
    assert compare(ours, theirs, 5e-4).largest == pytest.approx(change, rel=1e-6)


def test_one_different_position_among_many_is_found_and_named() -> None:
    good, bad = entry(0, -1.0, -2.0), entry(0, -1.5, -2.0)
    ours, theirs = scored(None, *[good] * 9), scored(None, *[good] * 6, bad, *[good] * 2)
    result = compare(ours, theirs, 1e-3)
    assert result.outcome is Outcome.DIFFERENT
    assert result.first_difference == 7
    assert result.worst is not None
    assert result.worst.position == 7


def test_a_flip_counts_where_the_control_sees_no_near_tie() -> None:
    """The values are near, but the preference is not a near tie for the control."""
    ours, theirs = scored(None, entry(0, -0.5, -0.9)), scored(None, entry(0, -0.71, -0.7))
    assert compare(ours, theirs, 0.125).outcome is Outcome.DIFFERENT
    assert compare(ours, theirs, 0.3).outcome is Outcome.ROUNDING


def test_alternatives_that_only_one_arm_reports_are_not_compared() -> None:
    ours = scored(None, TokenLogprob(1, -1.0, ((2, -1.2),)))
    theirs = scored(None, TokenLogprob(1, -1.0, ((3, -1.2),)))
    assert compare(ours, theirs, 1e-3).largest == 0.0
    assert compare(ours, theirs, 1e-3).outcome is Outcome.ROUNDING


def test_positions_without_a_common_token_are_different() -> None:
    ours, theirs = scored(None, TokenLogprob(1, -1.0)), scored(None, TokenLogprob(2, -1.0))
    assert compare(ours, theirs, 1.0).outcome is Outcome.DIFFERENT


def test_nan_is_never_rounding() -> None:
    ours, theirs = scored(None, entry(0, -1.0, -2.0)), scored(None, entry(0, math.nan, -2.0))
    assert compare(ours, theirs, 1.0).outcome is Outcome.DIFFERENT


def test_other_texts_are_not_compared() -> None:
    ours = Scored((1, 2), 1, (None, entry(0, -1.0)))
    with pytest.raises(ValueError, match="different texts"):
        compare(ours, Scored((1, 3), 1, ours.entries), 1.0)


@pytest.mark.parametrize(
    ("control", "candidate", "tolerance"),
    [
        ({}, {}, 5e-4),
        ({}, {"dtype": "bfloat16"}, 0.125),
        ({"kv_cache_dtype": "bfloat16"}, {}, 0.125),
        ({"deterministic": True}, {"deterministic": True}, 0.0),
        ({"deterministic": True}, {}, 5e-4),
        ({"deterministic": True}, {"deterministic": True, "kernels": "cpu"}, 5e-4),
    ],
)
def test_tolerance_follows_dtypes_and_promises(
    control: dict[str, object], candidate: dict[str, object], tolerance: float
) -> None:
    card = tiny_card()
    assert tolerance_of(make_plan(card, **control), make_plan(card, **candidate)) == tolerance
    assert tolerance_of(None, make_plan(card)) == 0.125
