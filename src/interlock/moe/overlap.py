"""Two-batch overlap: the tokens of a step in two halves, the exchange of one beside the experts of the other.

| exchange | experts |
|---|---|
| dispatch of the first half | |
| dispatch of the second | of the first |
| combine of the first | of the second |
| combine of the second | |

Each half has a dispatcher of its own with half the capacity, so both together hold the buffers of one. Every
rank halves every step, whatever its tokens (0 and 1 give empty halves), so all of them make the same calls.
A token's result does not depend on its half: results equal those without overlap bit for bit where runners
are row-invariant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from interlock.moe.a2a.contract import Dispatched, Dispatcher, DispatcherReceipt, DispatcherSpec
from interlock.moe.a2a.rows import ExpertInput
from interlock.moe.meter import LoadMeter
from interlock.moe.routing import Routes
from interlock.moe.side_work import Beside, SideWork
from interlock.moe.terms import Phase

T = TypeVar("T")


def half_specs(spec: DispatcherSpec) -> tuple[DispatcherSpec, DispatcherSpec]:
    """Dispatchers for the larger and the smaller half of ``spec``'s capacities, which are 2 or more."""
    larger = {phase: -(-tokens // 2) for phase, tokens in spec.capacity.items()}
    smaller = {phase: tokens // 2 for phase, tokens in spec.capacity.items()}
    return replace(spec, capacity=larger), replace(spec, capacity=smaller)


@dataclass(frozen=True, slots=True)
class _Half:
    """Consecutive tokens of a step: hidden [m, h], ids [m, k], weights [m, k]."""

    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


class TwoBatchOverlap:
    """The two dispatchers of a rank, and the side on which they work.

    Args:
        dispatchers: for the first and the second half of a step; see ``half_specs``.
    """

    def __init__(self, dispatchers: tuple[Dispatcher, Dispatcher], side: SideWork) -> None:
        self.dispatchers = dispatchers
        self._side = side

    def run(
        self,
        hidden: torch.Tensor,
        routes: Routes,
        phase: Phase,
        compute: Callable[[ExpertInput], torch.Tensor],
        meter: LoadMeter,
        layer: int,
    ) -> torch.Tensor:
        """Dispatch, experts and combine of one layer: hidden [n, h] -> [n, h].

        The meter counts the rows of both halves, and as time of the exchange what the experts wait for.
        """
        one, two = self.dispatchers
        first_half, second_half = _halves(hidden, routes)
        meter.dispatching()
        first = _dispatch(one, first_half, phase)
        meter.dispatched(layer, first.rows)
        second: Dispatched | None = None
        try:
            dispatching = self._side.start(lambda: _dispatch(two, second_half, phase))
            try:
                first_results = compute(first.rows)
            except BaseException:
                second = dispatching.abandon()
                raise
            meter.dispatching()
            second = dispatching.result()
            meter.dispatched(layer, second.rows, half=1)
            combining = self._side.start(lambda: one.combine(first_results, first.handle))
            second_results = _beside(combining, compute, second.rows)
            meter.combining()
            combined = combining.result()
            rest = two.combine(second_results, second.handle)
        except BaseException:
            one.release(first.handle)
            if second is not None:
                two.release(second.handle)
            raise
        meter.combined()
        return torch.cat([combined, rest])

    def observed(self) -> DispatcherReceipt:
        """Both dispatchers as one: what they hold is added up, what they say of themselves must agree."""
        one, two = (dispatcher.observed() for dispatcher in self.dispatchers)
        agreed = {name: kind for name, kind in one.layouts.items() if two.layouts.get(name) == kind}
        return replace(
            one,
            layouts=agreed,
            capacity={name: tokens + two.capacity[name] for name, tokens in one.capacity.items()},
            buffer_bytes=one.buffer_bytes + two.buffer_bytes,
            peak_bytes=one.peak_bytes + two.peak_bytes,
            dispatches=min(one.dispatches, two.dispatches),
            combines=min(one.combines, two.combines),
        )

    def close(self) -> None:
        """Free both dispatchers' buffers."""
        self._side.close()
        for dispatcher in self.dispatchers:
            dispatcher.close()


def _halves(hidden: torch.Tensor, routes: Routes) -> tuple[_Half, _Half]:
    middle = -(-hidden.shape[0] // 2)
    first, second = slice(middle), slice(middle, None)
    return (
        _Half(hidden[first], routes.ids[first], routes.weights[first]),
        _Half(hidden[second], routes.ids[second], routes.weights[second]),
    )


def _dispatch(dispatcher: Dispatcher, half: _Half, phase: Phase) -> Dispatched:
    return dispatcher.dispatch(half.hidden, half.ids, half.weights, phase)


def _beside(
    work: Beside[T], compute: Callable[[ExpertInput], torch.Tensor], rows: ExpertInput
) -> torch.Tensor:
    try:
        return compute(rows)
    except BaseException:
        work.abandon()
        raise
