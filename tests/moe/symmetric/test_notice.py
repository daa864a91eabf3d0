"""What the device found, told by the host: texts, and who asks after a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from interlock.errors import EngineDeadError
from interlock.moe.a2a.contract import ContractError, DispatcherSpec, FindsLater
from interlock.moe.a2a.symmetric.notice import BAD_ID, COUNTS, OVERFLOW, RESULTS, ROWS, problem
from interlock.moe.layer import MoEContext

SPEC = cast(DispatcherSpec, SimpleNamespace(rank=3, top_k=8, num_experts=256))


@pytest.mark.parametrize(
    ("code", "awaited"),
    [(COUNTS, "did not begin the dispatch"), (ROWS, "did not finish the dispatch"), (RESULTS, "the combine")],
)
def test_a_late_rank_is_named_with_what_it_did_not_do(code: int, awaited: str) -> None:
    error = problem([code, 5, 77, 60_100_000_000, 0, 0, 0, 0], SPEC)
    assert isinstance(error, EngineDeadError)
    assert "expert-parallel rank 5" in str(error)
    assert awaited in str(error)
    assert "in exchange 77 within 60.1 s, as rank 3 saw it" in str(error)


def test_a_bad_route_is_told_as_token_and_slot() -> None:
    error = problem([BAD_ID, 8 * 12 + 5, 1, 300], SPEC)
    assert isinstance(error, ContractError)
    assert str(error).startswith("token 12 names expert 300 (slot 5): ids must be in [0, 256)")
    assert "names an expert twice" in str(problem([OVERFLOW, 9, 4, 99_000], SPEC))


class _Found:
    def check(self) -> None:
        raise EngineDeadError("rank 1 is late")


@pytest.mark.parametrize("overlap", [False, True])
def test_a_context_asks_every_dispatcher_that_can_find_something_later(overlap: bool) -> None:
    assert isinstance(_Found(), FindsLater)
    quiet, finds = SimpleNamespace(), _Found()
    both = SimpleNamespace(dispatchers=(quiet, finds)) if overlap else None
    context: Any = SimpleNamespace(overlap=both, dispatcher=quiet if overlap else finds)
    with pytest.raises(EngineDeadError, match="rank 1 is late"):
        MoEContext.check(context)
    MoEContext.check(cast(Any, SimpleNamespace(overlap=None, dispatcher=quiet)))
