"""Backends with one fault each: what the suite must find. Negative controls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from interlock.moe.a2a.collective import BACKEND
from interlock.moe.a2a.collective.dispatcher import Collective
from interlock.moe.a2a.contract import ContractError, Handle
from interlock.moe.a2a.registry import a2a_backends
from interlock.moe.a2a.rows import ContiguousRows, ExpertInput, MaskedRows
from interlock.moe.conformance.backend_suite import RankFindings, run_backend_suite
from interlock.moe.terms import Phase
from interlock.parallel.topology import Groups


class ForgetsWeights(Collective):
    """Delivers weight 1 for every row."""

    def _dispatch(self, *arguments: Any) -> tuple[ExpertInput, Any]:
        rows, state = super()._dispatch(*arguments)
        assert isinstance(rows, ContiguousRows | MaskedRows)
        return replace(rows, weights=torch.ones_like(rows.weights)), state


class DropsWeights(Collective):
    """Delivers rows without weights, though its declaration leaves them to the runner."""

    def _dispatch(self, *arguments: Any) -> tuple[ExpertInput, Any]:
        rows, state = super()._dispatch(*arguments)
        return replace(rows, weights=None), state


class PaddedCounts(Collective):
    """B26: reports counts rounded up to 4."""

    def _dispatch(self, *arguments: Any) -> tuple[ExpertInput, Any]:
        rows, state = super()._dispatch(*arguments)
        assert isinstance(rows, ContiguousRows | MaskedRows)
        return replace(rows, counts=(rows.counts + 3) // 4 * 4), state


class SwapsTokens(Collective):
    """Gives the first two tokens each other's results."""

    def _combine(self, rows: torch.Tensor, num_tokens: int, state: Any) -> torch.Tensor:
        out = super()._combine(rows, num_tokens, state)
        return out[[1, 0, *range(2, num_tokens)]] if num_tokens > 1 else out


class SumsUnwritten(Collective):
    """B10: adds what nobody wrote."""

    def _combine(self, rows: torch.Tensor, num_tokens: int, state: Any) -> torch.Tensor:
        out = super()._combine(rows, num_tokens, state)
        return out + torch.empty_like(out) * 0


class AcceptsTooMany(Collective):
    """B24: raises the capacity instead of refusing."""

    def _check_dispatch(self, hidden: torch.Tensor, *arguments: Any) -> None:
        try:
            super()._check_dispatch(hidden, *arguments)
        except ContractError as error:
            if "capacity" not in str(error):
                raise


class CombinesTwice(Collective):
    """B28: takes a handle that was used."""

    def combine(self, rows: torch.Tensor, handle: Handle) -> torch.Tensor:
        if handle.released:
            return rows
        return super().combine(rows, handle)


class LiesAboutItsName(Collective):
    """A01: says that it is the backend that was asked for, and is another class."""

    def observed(self) -> Any:
        return replace(super().observed(), dispatcher="somewhere.else:Ordinary")


class LosesTheLastLane(Collective):
    """Drops the last lane of every token."""

    def _dispatch(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        phase: Phase,
        scales: torch.Tensor | None,
    ) -> tuple[ExpertInput, Any]:
        ids = ids.clone()
        ids[:, -1] = -1
        return super()._dispatch(hidden, ids, weights, phase, scales)


FAULTS = (
    *(ForgetsWeights, PaddedCounts, SwapsTokens, SumsUnwritten, AcceptsTooMany),
    *(CombinesTwice, LiesAboutItsName, LosesTheLastLane),
)


def findings_of(groups: Groups, fault: str) -> RankFindings:
    """Run the suite with a faulty dispatcher in place of the declared one."""
    assert a2a_backends().get("collective") is BACKEND
    kind = next(candidate for candidate in (*FAULTS, DropsWeights) if candidate.__name__ == fault)
    backend = replace(BACKEND, dispatcher=f"{kind.__module__}:{fault}")
    return run_backend_suite(backend, groups, device="cpu", cases=36, seed=3)
