"""Sampling that is queued on a device gives what sampling on the host gives; here both run on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interlock.engine.device_sampling import NOT_FINITE, Best, draw_on_device
from interlock.engine.sampler import Sampler
from interlock.kernels import torch_draw
from tests.engine.simulation import VOCAB
from tests.engine.test_sampler import make_batch, random_logits

PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 5]),
        "top_p": st.sampled_from([1.0, 0.7]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "seed": st.integers(0, 1 << 40),
        "logprobs": st.sampled_from([None, 0, 3]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 1.5]),
        "logit_bias": st.sampled_from([{}, {}, {3: 50.0}]),
    }
)


@given(params=st.lists(PARAMS, min_size=1, max_size=8), seed=st.integers(0, 1000), known=st.booleans())
def test_a_queued_draw_is_the_draw_of_the_host(params: list[dict[str, Any]], seed: int, known: bool) -> None:
    logits = random_logits(len(params), seed)
    batch = make_batch(*params)
    host = Sampler().sample(logits.clone(), batch)
    best = Best.of(logits) if known else None
    queued = draw_on_device(logits, batch, best=best, masks={}, draw=torch_draw.draw)
    assert queued.tokens.tolist() == host.token_ids.tolist()
    result = queued.result()
    assert result.token_ids.tolist() == host.token_ids.tolist()
    assert result.errors == host.errors
    assert result.logprobs.keys() == host.logprobs.keys()
    for row, entry in host.logprobs.items():
        assert result.logprobs[row] == entry


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, "row of -inf"])
def test_a_row_that_is_not_finite_fails_alone(bad: float | str) -> None:
    logits = random_logits(3, 1)
    logits[1, 5 if isinstance(bad, float) else slice(None)] = bad if isinstance(bad, float) else -torch.inf
    batch = make_batch(*({"temperature": t, "seed": 1, "logprobs": 1} for t in (0.0, 0.9, 0.9)))
    result = draw_on_device(logits, batch, masks={}, draw=torch_draw.draw).result()
    assert result.errors == {1: NOT_FINITE}
    assert result.token_ids[1] == -1
    assert set(result.logprobs) == {0, 2}
    alone = draw_on_device(
        logits[2:], make_batch({"temperature": 0.9, "seed": 1}), masks={}, draw=torch_draw.draw
    ).result()
    assert result.token_ids[2] == alone.token_ids[0]


def test_a_row_without_a_token_to_take_is_told_so() -> None:
    batch = make_batch({"temperature": 0.0}, {"temperature": 0.0})
    nothing = torch.zeros(VOCAB, dtype=torch.bool)
    result = draw_on_device(random_logits(2), batch, masks={0: nothing}, draw=torch_draw.draw).result()
    assert list(result.errors) == [0]
    assert "no token is allowed" in result.errors[0]
    assert np.asarray(result.token_ids)[0] == -1
