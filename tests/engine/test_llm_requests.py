"""What Python hands to ``LLM.generate``: read as numbers, or refused at once; never a call that hangs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from interlock import LLM, SamplingParams
from interlock.errors import RequestError
from tests.engine.conftest import engine

SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Any:
    with engine(tiny) as running:
        yield running


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "prompt",
    [[10**20], [-(10**20)], [2**40], [-1], ["a"], [1.5], [None], [], 5],
    ids=lambda value: repr(value),
)
def test_what_is_no_prompt_is_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError):
        llm.generate([prompt], SHORT)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=3, seed=10**30),
        SamplingParams(max_tokens="3"),  # type: ignore[arg-type]
        SamplingParams(max_tokens=3, stop_token_ids=("a",)),  # type: ignore[arg-type]
    ],
    ids=repr,
)
def test_parameters_of_another_kind_are_refused(llm: LLM, sampling: SamplingParams) -> None:
    with pytest.raises(RequestError):
        llm.generate("x", sampling)


@pytest.mark.timeout(60)
def test_arrays_are_prompts(llm: LLM) -> None:
    ids = [9, 10, 11]
    (plain,), (array,) = (llm.generate([each], SHORT) for each in (ids, np.array(ids)))
    assert plain.token_ids == array.token_ids
    assert len(plain.token_ids) == 3
