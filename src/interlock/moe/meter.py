"""What the MoE layers of one rank receive and how long the exchange takes, counted in a sample of the steps.

Rows are counted where they arrive, so the counts are the work that this rank's experts were really given.
Legend: K MoE layers of this rank, L experts of this rank.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch

from interlock.moe.a2a.base import ExpertInput, ReplicatedRows
from interlock.moe.device_routing import add_lane_counts
from interlock.moe.layouts import count_lanes
from interlock.moe.terms import Phase

SAMPLE_EVERY: Final = 8
"""One step in so many is measured: the same ones on every rank, since every rank enters every step."""

_PHASES: Final = tuple(Phase)


@dataclass(slots=True)
class Duration:
    """Seconds in all and number of calls."""

    seconds: float = 0.0
    calls: int = 0

    def add(self, seconds: float) -> None:
        self.seconds += seconds
        self.calls += 1


@dataclass(slots=True)
class PhaseTotals:
    """Of the counted steps of one phase: how many, tokens that this rank dispatched in them, and times."""

    steps: int = 0
    tokens: int = 0
    most_tokens: int = 0
    dispatch: Duration = field(default_factory=Duration)
    combine: Duration = field(default_factory=Duration)


class _Clock(Protocol):
    def begin(self) -> None: ...

    def end(self, into: Duration) -> None: ...

    def settle(self) -> None:
        """Add what has ended since."""


class _HostClock:
    """The computation is done when the call returns."""

    def __init__(self) -> None:
        self._begun = 0.0

    def begin(self) -> None:
        self._begun = time.perf_counter()

    def end(self, into: Duration) -> None:
        into.add(time.perf_counter() - self._begun)

    def settle(self) -> None:
        return


class _DeviceClock:
    """Times on the device's own queue; nothing waits for it."""

    def __init__(self) -> None:
        self._begun = _event()
        self._pending: list[tuple[torch.cuda.Event, torch.cuda.Event, Duration]] = []

    def begin(self) -> None:
        self._begun = _event()
        self._begun.record()

    def end(self, into: Duration) -> None:
        ended = _event()
        ended.record()
        self._pending.append((self._begun, ended, into))

    def settle(self) -> None:
        running = []
        for begun, ended, into in self._pending:
            if ended.query():  # type: ignore[no-untyped-call]
                into.add(begun.elapsed_time(ended) / 1e3)
            else:
                running.append((begun, ended, into))
        self._pending = running


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class LoadMeter:
    """Counts for all MoE layers of one rank. Does nothing until ``start``.

    On a CPU one step in ``every`` is counted and timed. On a device every step is counted, also one that is
    replayed as a graph, because the counting is part of what was captured; times are taken in eager steps.

    Attributes:
        totals: by phase.
    """

    def __init__(
        self, experts: int, device: torch.device, *, shares: Mapping[Phase, int], every: int = SAMPLE_EVERY
    ) -> None:
        """
        Args:
            experts: L.
            shares: over how many ranks the tokens of a replica are spread before they are dispatched.
        """
        self.every = every
        self.totals: Mapping[Phase, PhaseTotals] = {phase: PhaseTotals() for phase in _PHASES}
        self._experts = experts
        self._shares = shares
        self._device = device
        self._on_device = device.type == "cuda"
        self._clock: _Clock = _DeviceClock() if self._on_device else _HostClock()
        self._rows: dict[int, torch.Tensor] = {}
        self._steps = 0
        self._started = False
        self._counts = False
        self._times = False
        self._phase = Phase.PREFILL

    @property
    def layers(self) -> tuple[int, ...]:
        """Decoder layers with experts, ascending."""
        return tuple(sorted(self._rows))

    def add_layer(self, layer: int) -> None:
        """Count for decoder layer ``layer`` too."""
        shape = (len(_PHASES), self._experts + 1)
        self._rows[layer] = torch.zeros(shape, dtype=torch.int64, device=self._device)

    def start(self) -> None:
        """Forget the warm-up and count from now on."""
        self._started = True
        for rows in self._rows.values():
            rows.zero_()

    def begin_step(self, phase: Phase, tokens: int) -> None:
        """A step is about to run; ``tokens`` are those of this replica."""
        self._phase = phase
        if self._on_device and torch.cuda.is_current_stream_capturing():
            self._counts, self._times = True, False
            return
        sampled = self._started and self._steps % self.every == 0
        self._steps += self._started
        self._counts = sampled or (self._started and self._on_device)
        self._times = sampled
        if self._counts:
            self.count_step(phase, tokens)

    def count_step(self, phase: Phase, tokens: int) -> None:
        """A step that is counted: an eager one, or a captured one that is replayed."""
        totals = self.totals[phase]
        tokens = -(-tokens // self._shares[phase])
        totals.steps += 1
        totals.tokens += tokens
        totals.most_tokens = max(totals.most_tokens, tokens)

    def dispatching(self) -> None:
        if self._times:
            self._clock.begin()

    def dispatched(self, layer: int, rows: ExpertInput) -> None:
        """``rows`` arrived in decoder layer ``layer``."""
        if self._times:
            self._clock.end(self.totals[self._phase].dispatch)
        if self._counts:
            self._count(layer, rows)

    def combining(self) -> None:
        if self._times:
            self._clock.begin()

    def combined(self) -> None:
        if self._times:
            self._clock.end(self.totals[self._phase].combine)

    def received(self) -> dict[Phase, torch.Tensor]:
        """Rows that each local expert received in counted steps: int64 [K, L] on the host, by phase."""
        self._clock.settle()
        layers = self.layers
        if not layers:
            empty = torch.zeros(0, self._experts, dtype=torch.int64)
            return dict.fromkeys(_PHASES, empty)
        rows = torch.stack([self._rows[layer] for layer in layers]).cpu()[:, :, 1:]
        return {phase: rows[:, index].contiguous() for index, phase in enumerate(_PHASES)}

    def _count(self, layer: int, rows: ExpertInput) -> None:
        own = self._rows[layer][_PHASES.index(self._phase)]
        if not isinstance(rows, ReplicatedRows):
            own[1:] += rows.counts
        elif self._on_device:
            add_lane_counts(rows.ids, own)
        else:
            own[1:] += count_lanes(rows.ids, self._experts)
