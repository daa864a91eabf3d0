"""What every rank of ``bench a2a`` does: build each arm's dispatcher, exchange in turns, take the time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Final

import torch

from interlock.bench.copy_speed import CopySpeed, measure_copies
from interlock.kernels.availability import native_cpu_unavailable
from interlock.kernels.registry import get_kernels
from interlock.moe.a2a.contract import Dispatched, Dispatcher, DispatcherSpec
from interlock.moe.a2a.registry import a2a_backends
from interlock.moe.a2a.rows import SCALE_GROUP
from interlock.moe.fp8_rows import quantise_rows
from interlock.moe.placement import place
from interlock.moe.terms import Layout, Phase
from interlock.parallel.topology import Groups
from interlock.plugins import load_symbol

PARTS: Final = ("both", "dispatch", "combine", "graph")
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MOST_MASKED: Final = 512
"""Tokens a rank up to which slabs are measured: decode steps are no larger, and a slab holds the worst."""
WARM_UP: Final = 20
TIMEOUT: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class A2AShape:
    """What is exchanged: rows of ``hidden`` channels, each to ``top_k`` of ``experts``.

    ``dtype``: "float32", "bfloat16", or "fp8" for e4m3 rows with scales and results in bfloat16.
    """

    hidden: int
    experts: int
    top_k: int
    dtype: str = "float32"

    @property
    def rows(self) -> str:
        """Dtype of dispatched rows as dispatchers name it."""
        return self.dtype

    @property
    def results(self) -> str:
        """Dtype of what the experts give back."""
        return "bfloat16" if self.dtype == "fp8" else self.dtype

    @property
    def row_bytes(self) -> int:
        """Of a dispatched row, scales included."""
        if self.dtype == "fp8":
            return self.hidden + 4 * -(-self.hidden // SCALE_GROUP)
        return self.hidden * DTYPES[self.dtype].itemsize

    @property
    def result_bytes(self) -> int:
        return self.hidden * DTYPES[self.results].itemsize


@dataclass(frozen=True, slots=True)
class A2AArm:
    """One backend in one layout, in the phase that it has the layout in."""

    backend: str
    layout: Layout
    phase: Phase

    @property
    def name(self) -> str:
        return f"{self.backend} {self.layout.value}"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one rank, out and home: see ``bench/a2a.py``."""

    logical_out: float
    logical_home: float
    link_out: float
    link_home: float

    @staticmethod
    def of(ids: torch.Tensor, held: Sequence[range], rank: int, shape: A2AShape) -> Traffic:
        """Of tokens with experts ``ids`` int64 [n, k] on ``rank`` of those that hold ``held``."""
        lanes = int((ids >= 0).sum())
        away = sum(
            int(((ids >= part.start) & (ids < part.stop)).any(dim=1).sum())
            for owner, part in enumerate(held)
            if owner != rank
        )
        return Traffic(
            lanes * shape.row_bytes, lanes * shape.result_bytes, away * shape.row_bytes,
            away * shape.result_bytes,
        )  # fmt: skip

    @staticmethod
    def mean(parts: Sequence[Traffic]) -> Traffic:
        """Averaged over ranks."""
        count = len(parts)
        return Traffic(
            sum(part.logical_out for part in parts) / count,
            sum(part.logical_home for part in parts) / count,
            sum(part.link_out for part in parts) / count,
            sum(part.link_home for part in parts) / count,
        )

    def logical(self, part: str) -> float:
        return _of_part(part, self.logical_out, self.logical_home)

    def link(self, part: str) -> float:
        return _of_part(part, self.link_out, self.link_home)


def _of_part(part: str, out: float, home: float) -> float:
    return {"dispatch": out, "combine": home}.get(part, out + home)


@dataclass(slots=True)
class Measured:
    """What one rank measured: seconds by (tokens, arm, part), one for each round."""

    copies: CopySpeed
    times: dict[tuple[int, str, str], list[float]] = field(default_factory=dict)
    traffic: dict[int, Traffic] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Tokens of this rank: x [n, h], scales or None, ids [n, k], weights [n, k]."""

    x: torch.Tensor
    scales: torch.Tensor | None
    ids: torch.Tensor
    weights: torch.Tensor


def measure(
    groups: Groups,
    arms: Sequence[A2AArm],
    shape: A2AShape,
    tokens: Sequence[int],
    rounds: int,
    device: str,
    ranks_per_gpu: int,
) -> Measured:
    """Runs in every rank process; all of them enter every call."""
    torch.use_deterministic_algorithms(False)  # the suites' processes fill fresh tensors with NaN
    where = torch.device(device)
    copies = CopySpeed(1.0, None, "")
    if groups.ep.rank == 0:
        copies = measure_copies(where)
    groups.ep.barrier()
    found = Measured(copies)
    generator = torch.Generator().manual_seed(groups.ep.rank)
    held = place(shape.experts, groups.ep.size)
    for count in tokens:
        batch = _batch(shape, count, generator, where)
        found.traffic[count] = Traffic.of(batch.ids.cpu(), held, groups.ep.rank, shape)
        with ExitStack() as stack:
            exchanges = {}
            for arm in arms:
                if arm.layout is Layout.MASKED and count > MOST_MASKED:
                    continue
                dispatcher = build(arm, groups, shape, count, where, ranks_per_gpu)
                stack.enter_context(closing(dispatcher))
                exchanges[arm.name] = _Exchange(groups, dispatcher, arm, batch)
            _take_turns(exchanges, count, rounds, found)
    return found


def _take_turns(exchanges: dict[str, _Exchange], count: int, rounds: int, found: Measured) -> None:
    """Arms alternate; the first rounds do not count."""
    warm_up = min(WARM_UP, max(2, rounds // 2))
    for number in range(warm_up + rounds):
        for name, exchange in exchanges.items():
            seconds = exchange.round()
            if number >= warm_up:
                for part, value in seconds.items():
                    found.times.setdefault((count, name, part), []).append(value)


def build(
    arm: A2AArm, groups: Groups, shape: A2AShape, capacity: int, device: torch.device, ranks_per_gpu: int
) -> Dispatcher:
    """The arm's dispatcher for ``capacity`` tokens; kernels are the fast ones where they can be built."""
    backend = a2a_backends().get(arm.backend)
    other = {phase: sorted(backend.layouts[phase])[0] for phase in Phase if phase is not arm.phase}
    modes = backend.modes
    spec = DispatcherSpec(
        groups=groups,
        experts=place(shape.experts, groups.ep.size),
        rank=groups.ep.rank,
        num_experts=shape.experts,
        top_k=shape.top_k,
        hidden_size=shape.hidden,
        row_dtype=shape.rows,
        dtype=DTYPES[shape.results],
        device=device,
        layouts={arm.phase: arm.layout, **other},
        capacity={phase: capacity if phase is arm.phase else 1 for phase in Phase},
        kernels=get_kernels(_kernels(device), threads=1),
        alignment=128 if device.type == "cuda" else 1,
        timeout=TIMEOUT,
        mode=modes.one_node[0] if modes else "",
        ranks_per_gpu=ranks_per_gpu,
    )
    dispatcher: Dispatcher = load_symbol(backend.dispatcher)(spec)
    return dispatcher


def _kernels(device: torch.device) -> str:
    if device.type == "cuda":
        return "triton"
    return "cpu" if native_cpu_unavailable() is None else "torch"


def _batch(shape: A2AShape, count: int, generator: torch.Generator, device: torch.device) -> _Batch:
    """Random rows and routes; each token's experts distinct and ascending."""
    x = torch.randn(count, shape.hidden, generator=generator)
    scores = torch.rand(count, shape.experts, generator=generator)
    ids = scores.argsort(dim=1)[:, : shape.top_k].sort(dim=1).values
    weights = torch.full((count, shape.top_k), 1 / shape.top_k)
    rows, scales = quantise_rows(x) if shape.dtype == "fp8" else (x.to(DTYPES[shape.dtype]), None)
    on_device = None if scales is None else scales.to(device)
    return _Batch(rows.to(device), on_device, ids.to(device), weights.to(device))


class _Exchange:
    """One arm's dispatcher with the tokens of this rank and experts that cost nothing: their results are
    made once, in the layout that the first dispatch shows."""

    def __init__(self, groups: Groups, dispatcher: Dispatcher, arm: A2AArm, batch: _Batch) -> None:
        self._group = groups.ep
        self._dispatcher = dispatcher
        self._phase = arm.phase
        self._batch = batch
        first = self._dispatch()
        rows = first.rows.rows
        dtype = torch.bfloat16 if batch.scales is not None else rows.dtype
        self._results = torch.ones(rows.shape, dtype=dtype, device=rows.device)
        dispatcher.combine(self._results, first.handle)
        self._on_device = rows.device.type == "cuda"
        capturable = arm.phase in a2a_backends().get(arm.backend).capturable
        self._graph = self._captured() if capturable and self._on_device else None

    def round(self) -> dict[str, float]:
        """Seconds of each part, once."""
        seconds = {"both": self._timed(self._both)}
        dispatched: list[Dispatched] = []
        seconds["dispatch"] = self._timed(lambda: dispatched.append(self._dispatch()))
        handle = dispatched[0].handle
        seconds["combine"] = self._timed(lambda: self._dispatcher.combine(self._results, handle))
        if self._graph is not None:
            seconds["graph"] = self._timed(self._graph.replay)
        return seconds

    def _dispatch(self) -> Dispatched:
        batch = self._batch
        return self._dispatcher.dispatch(batch.x, batch.ids, batch.weights, self._phase, scales=batch.scales)

    def _both(self) -> None:
        self._dispatcher.combine(self._results, self._dispatch().handle)

    def _captured(self) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._both()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._group.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self._both()
        return graph

    def _timed(self, call: Callable[[], object]) -> float:
        """Seconds of ``call``, which all ranks begin together."""
        if not self._on_device:
            self._group.barrier()
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        self._group.all_gather(torch.zeros(1))  # between hosts: nothing is left on the device's queue
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
