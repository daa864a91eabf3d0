"""One MoE layer's experts alone: time by tokens for each runner and layout, beside the device's roofline.

Weights of several layers are used in turn, as in a model, so that they come from memory and not from a cache.
Bytes are those of the experts that were touched (as the runner holds them) and of the rows in and out;
operations are 6 * h * i for each lane.

Legend: n tokens, k experts a token, E experts, h hidden size, i expert width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from interlock.bench.limits import Limits, time_calls
from interlock.bench.statistics import Figure
from interlock.errors import Refusal
from interlock.kernels.base import Kernels
from interlock.moe.a2a.rows import ContiguousRows, ExpertInput, MaskedRows, ReplicatedRows
from interlock.moe.experts.base import ExpertRunner, Runner, RunnerSpec
from interlock.moe.experts.registry import expert_runners
from interlock.moe.layouts import aligned_segments, count_lanes, positions, slab_segments
from interlock.moe.terms import Layout
from interlock.plugins import load_symbol

MAX_COPIES = 64
MAX_SLAB_BYTES = 1 << 30
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """h, i, E, k and the dtype of rows and weights.

    ``routed`` is the model's number of experts where E is one rank's share of them.
    """

    hidden: int
    expert_width: int
    experts: int
    top_k: int
    dtype: str
    routed: int | None = None

    @property
    def model_experts(self) -> int:
        """Experts that tokens choose from."""
        return self.routed or self.experts

    @property
    def weight_bytes(self) -> int:
        """Of one layer in the activation dtype."""
        return self.experts * 3 * self.hidden * self.expert_width * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class Work:
    """What one call has to do at least.

    Attributes:
        lanes: (token, expert) pairs.
        touched: experts with at least one lane.
        nbytes: weights of touched experts, rows read, results written.
        flops: 6 * h * i * lanes.
    """

    lanes: int
    touched: int
    weight_bytes: float
    nbytes: float
    flops: float


@dataclass(frozen=True, slots=True)
class LayerPoint:
    """One runner and layout at ``tokens``. Times in seconds."""

    runner: str
    layout: str
    tokens: int
    figure: Figure
    work: Work
    limit: float
    copies: int

    @property
    def share_of_limit(self) -> float:
        """Roofline time over measured time."""
        return self.limit / self.figure.median


@dataclass(frozen=True, slots=True)
class Skipped:
    """A point that was not measured, and why."""

    runner: str
    layout: str
    tokens: int
    reason: str


def choose_runners(names: Sequence[str], device: str, kernels: str, dtype: str) -> list[ExpertRunner]:
    """The runners that work with this device and kernel set; all, or those of ``names``.

    Raises:
        Refusal: one of ``names`` is unknown or does not fit.
    """
    catalogue = expert_runners()
    chosen = [catalogue.get(name) for name in names] if names else list(catalogue.entries.values())
    fitting = [
        runner
        for runner in chosen
        if device in runner.devices
        and (not runner.kernels or kernels in runner.kernels)
        and dtype in runner.activation_dtypes
    ]
    left_out = [runner.name for runner in chosen if runner not in fitting]
    if not fitting or (names and left_out):
        raise Refusal(
            option="--runner",
            given=" ".join(left_out),
            rule=f"does not work on {device} with kernels {kernels} and {dtype}",
            alternatives=[
                f"--runner {runner.name}" for runner in catalogue.entries.values() if runner in fitting
            ]
            or ["another --kernels or --device"],
        )
    return fitting


def run_layer(
    shape: LayerShape,
    runners: Sequence[ExpertRunner],
    tokens: Sequence[int],
    kernels: Kernels,
    device: torch.device,
    limits: Limits,
    *,
    rounds: int,
    working_set: int,
    seed: int,
    tick: Callable[[str], None],
) -> Iterator[LayerPoint | Skipped]:
    """Measure every runner in every layout that it declares, at every number of tokens.

    Args:
        working_set: bytes of weights that are used in turn, at least.
    """
    copies = max(1, min(MAX_COPIES, -(-working_set // shape.weight_bytes)))
    for declaration in runners:
        tick(f"weights of {copies} layers for {declaration.name}")
        layers = [_load(declaration, shape, kernels, device, seed) for _ in range(copies)]
        for layout in sorted(declaration.layouts):
            for count in tokens:
                tick(f"{declaration.name}, {layout.value}, {count} tokens")
                slab = shape.experts * count * shape.hidden * DTYPES[shape.dtype].itemsize
                if layout is Layout.MASKED and slab > MAX_SLAB_BYTES:
                    reason = f"its slab would be {slab / 2**30:.1f} GiB"
                    yield Skipped(declaration.name, layout.value, count, reason)
                    continue
                rows, ids = make_rows(shape, layout, count, declaration.alignment, device, seed)
                work = count_work(shape, ids, layers[0].observed().weight_bytes)
                calls = [lambda layer=layer, rows=rows: layer.run(rows) for layer in layers]
                times = time_calls(calls, device, rounds)
                yield LayerPoint(
                    runner=declaration.name,
                    layout=layout.value,
                    tokens=count,
                    figure=Figure(tuple(times)),
                    work=work,
                    limit=limits.seconds(work.nbytes, work.flops),
                    copies=copies,
                )
        del layers


def _load(
    declaration: ExpertRunner, shape: LayerShape, kernels: Kernels, device: torch.device, seed: int
) -> Runner:
    """A runner with random weights; all experts hold the same values, each in memory of its own."""
    spec = RunnerSpec(
        num_experts=shape.experts,
        hidden_size=shape.hidden,
        intermediate_size=shape.expert_width,
        dtype=DTYPES[shape.dtype],
        device=device,
        kernels=kernels,
    )
    runner: Runner = load_symbol(declaration.runner)(spec)
    generator = torch.Generator().manual_seed(seed)
    gate, up = (
        torch.randn(shape.expert_width, shape.hidden, generator=generator) * shape.hidden**-0.5
        for _ in range(2)
    )
    down = torch.randn(shape.hidden, shape.expert_width, generator=generator) * shape.expert_width**-0.5
    gate, up, down = (weight.to(DTYPES[shape.dtype]) for weight in (gate, up, down))
    for expert in range(shape.experts):
        runner.load_expert(expert, gate, up, down)
    runner.finish_loading()
    return runner


def make_rows(
    shape: LayerShape, layout: Layout, tokens: int, alignment: int, device: torch.device, seed: int
) -> tuple[ExpertInput, torch.Tensor]:
    """Rows of ``tokens`` random tokens in ``layout``, and their experts int64 [n, k] (uniform, distinct)."""
    generator = torch.Generator().manual_seed(seed + tokens)
    x = torch.randn(tokens, shape.hidden, generator=generator).to(DTYPES[shape.dtype])
    scores = torch.rand(tokens, shape.experts, generator=generator)
    ids = scores.topk(shape.top_k, dim=1).indices.sort(dim=1).values
    weights = torch.full((tokens, shape.top_k), 1 / shape.top_k)
    if layout is Layout.REPLICATED:
        return ReplicatedRows(x.to(device), ids.to(device), weights.to(device)), ids
    lanes = ids.flatten()
    counts = count_lanes(lanes, shape.experts)
    masked = layout is Layout.MASKED
    segments = slab_segments(counts, tokens) if masked else aligned_segments(counts, alignment)
    at = positions(lanes, segments)
    data = torch.zeros(segments.rows, shape.hidden, dtype=x.dtype)
    data[at] = x.repeat_interleave(shape.top_k, dim=0)
    spread = torch.zeros(segments.rows)
    spread[at] = weights.flatten()
    data, spread, counts32 = data.to(device), spread.to(device), counts.int().to(device)
    if masked:
        slab = (shape.experts, tokens)
        return MaskedRows(data.view(*slab, -1), counts32, spread.view(slab)), ids
    return ContiguousRows(data, segments.psum.int().to(device), counts32, alignment, spread), ids


def count_work(shape: LayerShape, ids: torch.Tensor, layer_weight_bytes: int) -> Work:
    """What the rows of ``ids`` need: ``layer_weight_bytes`` is what the runner holds for all E experts."""
    lanes = int((ids >= 0).sum())
    touched = int((torch.bincount(ids[ids >= 0], minlength=shape.experts) > 0).sum())
    weight_bytes = layer_weight_bytes * touched / shape.experts
    row = shape.hidden * DTYPES[shape.dtype].itemsize
    return Work(
        lanes=lanes,
        touched=touched,
        weight_bytes=weight_bytes,
        nbytes=weight_bytes + ids.shape[0] * row + lanes * row,
        flops=6.0 * shape.hidden * shape.expert_width * lanes,
    )
