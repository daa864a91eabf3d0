"""What the MoE layers of one rank receive and how long the exchange takes, counted in a sample of the steps.

Rows are counted where they arrive, so the counts are the work that this rank's experts were really given.
Legend: K MoE layers of this rank, L experts of this rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch

from interlock.moe.a2a.rows import ExpertInput, ReplicatedRows
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


@dataclass(slots=True)
class _Captured:
    """What the layers of one captured step left behind: each replay writes it anew, so it is kept.

    ``arrived``: (half of the step, decoder layer) -> local ids of lanes (``are_lanes``), or counts of rows.
    """

    are_lanes: bool = False
    arrived: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def keep(self, layer: int, rows: ExpertInput, half: int) -> None:
        self.are_lanes = isinstance(rows, ReplicatedRows)
        self.arrived[half, layer] = rows.ids if isinstance(rows, ReplicatedRows) else rows.counts

    @property
    def halves(self) -> range:
        """A step that is exchanged whole has one."""
        return range(1 + max(half for half, _ in self.arrived))

    @property
    def is_whole(self) -> bool:
        """Whether every layer has memory of its own; else the last one has overwritten the others."""
        return len({kept.data_ptr() for kept in self.arrived.values()}) == len(self.arrived)


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
    """Counts for all MoE layers of one rank, one step in ``every``. Does nothing until ``start``.

    A step that is captured as a CUDA graph is not made longer: what its layers received is kept where the
    graph leaves it, and read after a replay that is to be counted. Times are taken in eager steps only.

    Attributes:
        totals: by phase.
    """

    def __init__(
        self,
        experts: int,
        device: torch.device,
        *,
        shares: Mapping[Phase, int],
        every: int = SAMPLE_EVERY,
        is_capturing: Callable[[], bool] | None = None,
    ) -> None:
        """
        Args:
            experts: L.
            shares: over how many ranks the tokens of a replica are spread before they are dispatched.
            is_capturing: whether the device's work is being captured now; by default the device is asked.
        """
        on_device = device.type == "cuda"
        self.every = every
        self.totals: Mapping[Phase, PhaseTotals] = {phase: PhaseTotals() for phase in _PHASES}
        self._experts = experts
        self._shares = shares
        self._device = device
        self._on_device = on_device
        self._is_capturing = is_capturing or (torch.cuda.is_current_stream_capturing if on_device else _never)
        self._clock: _Clock = _DeviceClock() if on_device else _HostClock()
        self._layers: list[int] = []
        self._row_of: dict[int, int] = {}
        self._rows = torch.zeros(0)
        self._captured: dict[int, _Captured] = {}
        self._capture: _Captured | None = None
        self._steps = 0
        self._started = False
        self._sampled = False
        self._phase = Phase.PREFILL

    @property
    def layers(self) -> tuple[int, ...]:
        """Decoder layers with experts, ascending."""
        return tuple(sorted(self._layers))

    def add_layer(self, layer: int) -> None:
        """Count for decoder layer ``layer`` too; before ``start``."""
        self._layers.append(layer)

    def start(self) -> None:
        """The warm-up is over: count from now on."""
        self._started = True
        self._row_of = {layer: row for row, layer in enumerate(self.layers)}
        shape = (len(self._layers), len(_PHASES), self._experts + 1)
        self._rows = torch.zeros(shape, dtype=torch.int64, device=self._device)
        self._captured = {size: one for size, one in self._captured.items() if one.is_whole}

    def begin_step(self, phase: Phase, tokens: int) -> None:
        """A step is about to run, or to be captured; ``tokens`` are those of this replica."""
        self._phase = phase
        self._sampled, self._capture = False, None
        if self._is_capturing():
            self._capture = self._captured[tokens] = _Captured()
        elif self._next_is_sampled():
            self._sampled = True
            self._note_step(phase, tokens)

    def count_replay(self, phase: Phase, tokens: int) -> None:
        """The smallest captured step that holds ``tokens`` was replayed with so many."""
        if not self._next_is_sampled():
            return
        self._note_step(phase, tokens)
        size = min((size for size in self._captured if size >= tokens), default=None)
        if size is not None and self._captured[size].arrived:
            self._count_captured(phase, self._captured[size])

    def dispatching(self) -> None:
        if self._sampled:
            self._clock.begin()

    def dispatched(self, layer: int, rows: ExpertInput, half: int = 0) -> None:
        """``rows`` arrived in decoder layer ``layer``, of the step or of one half of it."""
        if self._sampled:
            self._clock.end(self.totals[self._phase].dispatch)
            self._count(layer, rows)
        elif self._capture is not None:
            self._capture.keep(layer, rows, half)

    def combining(self) -> None:
        if self._sampled:
            self._clock.begin()

    def combined(self) -> None:
        if self._sampled:
            self._clock.end(self.totals[self._phase].combine)

    def received(self) -> dict[Phase, torch.Tensor]:
        """Rows that each local expert received in counted steps: int64 [K, L] on the host, by phase."""
        self._clock.settle()
        if not self._layers:
            return dict.fromkeys(_PHASES, torch.zeros(0, self._experts, dtype=torch.int64))
        rows = self._rows.cpu()[:, :, 1:]
        return {phase: rows[:, index].contiguous() for index, phase in enumerate(_PHASES)}

    def _next_is_sampled(self) -> bool:
        sampled = self._started and self._steps % self.every == 0
        self._steps += self._started
        return sampled

    def _note_step(self, phase: Phase, tokens: int) -> None:
        totals = self.totals[phase]
        tokens = -(-tokens // self._shares[phase])
        totals.steps += 1
        totals.tokens += tokens
        totals.most_tokens = max(totals.most_tokens, tokens)

    def _count(self, layer: int, rows: ExpertInput) -> None:
        own = self._rows[self._row_of[layer], _PHASES.index(self._phase)]
        if not isinstance(rows, ReplicatedRows):
            own[1:] += rows.counts
        elif self._on_device:
            add_lane_counts(rows.ids, own)
        else:
            own[1:] += count_lanes(rows.ids, self._experts)

    def _count_captured(self, phase: Phase, captured: _Captured) -> None:
        """A handful of launches for all layers together."""
        own = self._rows[:, _PHASES.index(phase)]
        for half in captured.halves:
            arrived = torch.stack([captured.arrived[half, layer] for layer in self.layers])
            if captured.are_lanes:
                lanes = arrived.flatten(1).to(torch.int64) + 1
                own.scatter_add_(1, lanes, torch.ones_like(lanes))
            else:
                own[:, 1:] += arrived


def _never() -> bool:
    return False
