"""One whole MoE layer on a GPU: choice of experts, quantisation, products, SwiGLU, weighted sum.

Router logits are drawn anew for each call (uniform routing) and given; the router's own product is not in it.
Calls are captured in a CUDA graph and replayed. Weights are larger than any cache, and every call of a graph
has its own tokens.

Legend: n tokens, k experts a token, E experts of the model, L experts of this rank, h hidden size.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import torch

from interlock.bench.cuda_timing import fp8_peak, graph_times, read_bandwidth
from interlock.bench.layer import DTYPES, LayerPoint, LayerShape, Skipped, Work, count_work
from interlock.bench.limits import Limits
from interlock.bench.statistics import Figure
from interlock.errors import InterlockError
from interlock.kernels.base import Kernels
from interlock.moe.a2a.rows import ReplicatedRows
from interlock.moe.experts.base import ExpertRunner, FillsExperts, Runner, RunnerSpec, SumsLanes
from interlock.plugins import load_symbol

WHOLE_LAYER, PRODUCTS = "whole layer", "products alone"
TOKENS_A_GRAPH, MAX_CALLS = 256, 16


@runtime_checkable
class MultipliesAlone(Protocol):
    """A runner that can repeat only its matrix products: what a layer around them is measured against."""

    def products_alone(self, rows: ReplicatedRows) -> Callable[[], object]:
        """Everything up to the products is done now; the call repeats these."""
        ...


@dataclass(frozen=True, slots=True)
class _Layer:
    """A loaded runner, and the way around it that the engine takes on one rank."""

    runner: Runner
    kernels: Kernels
    shape: LayerShape
    local_id: torch.Tensor

    def __call__(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        rows = self.rows(x, logits)
        if isinstance(self.runner, SumsLanes):
            return self.runner.run_summed(rows, x.dtype)
        return self.kernels.sum_lanes(self.runner.run(rows), rows.ids, x.dtype)

    def rows(self, x: torch.Tensor, logits: torch.Tensor) -> ReplicatedRows:
        from interlock.kernels.triton.router import top_k

        ids, weights = top_k(logits, None, self.shape.top_k, sigmoid=True, normalise=True)
        if self.shape.experts < self.shape.model_experts:
            ids = self.local_id[ids]
        return ReplicatedRows(x, ids, weights, sums=x.dtype)


class RandomFill:
    """Random experts, written where the runner keeps them; one expert at a time, to need little memory."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator("cuda").manual_seed(seed)

    def gate_up(self, values: torch.Tensor, scales: torch.Tensor | None) -> None:
        """See ``ExpertFill.gate_up``."""
        self._fill(values, scales)

    def down(self, values: torch.Tensor, scales: torch.Tensor | None) -> None:
        """See ``ExpertFill.down``."""
        self._fill(values, scales)

    def _fill(self, values: torch.Tensor, scales: torch.Tensor | None) -> None:
        size = values.shape[2] ** -0.5
        largest = 60.0 if scales is not None else size
        for expert in values:
            drawn = torch.randn(expert.shape, device=values.device, generator=self._generator)
            expert.copy_(drawn * largest)
        if scales is not None:
            spread = torch.rand(scales.shape, device=values.device, generator=self._generator)
            scales.copy_((spread + 0.5) * (size / 60.0))


def cuda_limits() -> Limits:
    """Reading memory, and the vendor's dense e4m3 product."""
    (bandwidth, read_by), (flops, computed_by) = read_bandwidth(), fp8_peak()
    return Limits(bandwidth, flops, read_by, computed_by)


def load_filled(declaration: ExpertRunner, shape: LayerShape, kernels: Kernels, seed: int) -> Runner:
    """A runner of the L experts of this rank with random weights.

    Raises:
        InterlockError: the runner cannot be built here.
    """
    spec = RunnerSpec(
        num_experts=shape.experts,
        hidden_size=shape.hidden,
        intermediate_size=shape.expert_width,
        dtype=DTYPES[shape.dtype],
        device=torch.device("cuda"),
        kernels=kernels,
        routed_experts=shape.model_experts,
    )
    runner: Runner = load_symbol(declaration.runner)(spec)
    if not isinstance(runner, FillsExperts):
        raise InterlockError(f"runner {declaration.name} cannot be filled with random weights")
    runner.fill_experts(RandomFill(seed))
    runner.finish_loading()
    return runner


def random_inputs(shape: LayerShape, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [n, h] and router logits float32 [n, E] of ``tokens`` tokens."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens, shape.hidden, device="cuda", generator=generator).to(DTYPES[shape.dtype])
    return x, torch.randn(tokens, shape.model_experts, device="cuda", generator=generator)


def make_layer(runner: Runner, kernels: Kernels, shape: LayerShape) -> Callable[..., torch.Tensor]:
    """The layer as a function of x [n, h] and logits [n, E] -> [n, h]; the first L experts are here."""
    local = torch.full((shape.model_experts + 1,), -1, dtype=torch.int64, device="cuda")
    local[: shape.experts] = torch.arange(shape.experts, device="cuda")
    return _Layer(runner, kernels, shape, local)


def run_cuda_layer(
    shape: LayerShape,
    runners: Sequence[ExpertRunner],
    tokens: Sequence[int],
    kernels: Kernels,
    limits: Limits,
    *,
    rounds: int,
    seed: int,
    tick: Callable[[str], None],
) -> Iterator[LayerPoint | Skipped]:
    """Measure every runner at every number of tokens; products alone too, where a runner can repeat them."""
    for declaration in runners:
        tick(f"weights for {declaration.name}")
        try:
            runner = load_filled(declaration, shape, kernels, seed)
        except InterlockError as problem:
            yield from (Skipped(declaration.name, WHOLE_LAYER, count, str(problem)) for count in tokens)
            continue
        layer = make_layer(runner, kernels, shape)
        for count in tokens:
            tick(f"{declaration.name}, {count} tokens")
            yield from layer_points(declaration.name, layer, count, limits, rounds, seed)
        del runner, layer
        torch.cuda.empty_cache()


def mean_work(works: Sequence[Work]) -> Work:
    """The mean of what several calls have to do; lanes and experts rounded."""
    count = len(works)
    return Work(
        lanes=round(sum(work.lanes for work in works) / count),
        touched=round(sum(work.touched for work in works) / count),
        weight_bytes=sum(work.weight_bytes for work in works) / count,
        nbytes=sum(work.nbytes for work in works) / count,
        flops=sum(work.flops for work in works) / count,
    )


def layer_points(
    name: str, layer: Callable[..., torch.Tensor], count: int, limits: Limits, rounds: int, seed: int
) -> Iterator[LayerPoint]:
    """The whole layer at ``count`` tokens, and its products alone where the runner can repeat them."""
    assert isinstance(layer, _Layer)
    sets = max(1, min(MAX_CALLS, TOKENS_A_GRAPH // count))
    inputs = [random_inputs(layer.shape, count, seed + 1000 + index) for index in range(sets)]
    all_rows = [layer.rows(*each) for each in inputs]
    ids = torch.cat([rows.ids for rows in all_rows]).cpu().view(sets, count, -1)
    weight_bytes = layer.runner.observed().weight_bytes
    works = [count_work(layer.shape, each, weight_bytes) for each in ids]
    work = mean_work(works)
    timed: dict[str, list[Callable[[], object]]] = {WHOLE_LAYER: [partial(layer, *each) for each in inputs]}
    if isinstance(layer.runner, MultipliesAlone):
        timed[PRODUCTS] = [layer.runner.products_alone(rows) for rows in all_rows]
    for what, calls in timed.items():
        yield LayerPoint(
            runner=name,
            layout=what,
            tokens=count,
            figure=Figure(tuple(graph_times(calls, rounds))),
            work=work,
            limit=limits.seconds(work.nbytes, work.flops),
            copies=1,
        )
