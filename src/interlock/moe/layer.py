"""One MoE layer: route -> dispatch -> experts -> combine. It names no backend and no runner.

Legend: n tokens of this attention replica, h hidden size, E experts, i expert width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch

from interlock.errors import CheckpointError
from interlock.kernels.base import Kernels
from interlock.kernels.fp8_blocks import Fp8Blocks
from interlock.moe.a2a.contract import Dispatcher, DispatcherReceipt, FindsLater
from interlock.moe.a2a.rows import ExpertInput, ReplicatedRows
from interlock.moe.experts.base import (
    ExpertFill,
    ExpertRunner,
    FillsExperts,
    LoadsFp8,
    Runner,
    RunnerSpec,
    SumsLanes,
)
from interlock.moe.meter import LoadMeter
from interlock.moe.observer import LayerObserver
from interlock.moe.overlap import TwoBatchOverlap
from interlock.moe.placement import place
from interlock.moe.routing import Router, Routes
from interlock.moe.terms import Layout, Phase
from interlock.parallel.topology import Groups
from interlock.plan.card import ExpertsCard
from interlock.plugins import load_symbol
from interlock.step import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEContext:
    """What the MoE layers of one rank share. Built by ``build_moe_context``.

    Attributes:
        experts: global expert ids of every rank that holds different experts.
        rank: this rank's index in ``experts``.
        slices: ranks over which each expert's width is cut, and ``slice_rank`` this rank's place among them.
        dispatcher: exchanges whole steps. overlap: exchanges steps in halves in its place, None where not.
        meter: counts what the layers receive and how long the exchange takes.
        layers: every layer built with this context, in order of construction.
    """

    groups: Groups
    kernels: Kernels
    device: torch.device
    dtype: torch.dtype
    dispatcher: Dispatcher
    runner: ExpertRunner
    layouts: Mapping[Phase, Layout]
    experts: tuple[range, ...]
    rank: int
    slices: int
    slice_rank: int
    meter: LoadMeter
    overlap: TwoBatchOverlap | None = None
    layers: list[MoELayer] = field(default_factory=list)

    def observed(self) -> dict[str, object]:
        """Receipts of this rank by plan item, and ``moe_layers`` with one entry for each layer."""
        receipt = self.receipt()
        runners = {layer.runner_name for layer in self.layers}
        return {
            "moe_a2a_backend": receipt.name,
            "moe_a2a_mode": receipt.mode,
            "moe_runner_backend": ", ".join(sorted(runners)),
            "moe_layout_prefill": receipt.layouts.get(Phase.PREFILL),
            "moe_layout_decode": receipt.layouts.get(Phase.DECODE),
            "moe_prefill_capacity": receipt.capacity[Phase.PREFILL],
            "moe_decode_capacity": receipt.capacity[Phase.DECODE],
            "moe_buffer_bytes": receipt.buffer_bytes,
            "expert_weight_format": ", ".join(sorted({layer.weight_format for layer in self.layers})),
            "ep_size": self.groups.ep.size,
            "moe_dispatcher": asdict(receipt),
            "moe_layers": [layer.observed() for layer in self.layers],
        }

    def receipt(self) -> DispatcherReceipt:
        """What exchanges the steps, as it observed itself."""
        return (self.overlap or self.dispatcher).observed()

    def check(self) -> None:
        """Raise what the exchange has found in steps that have ended: their results mean nothing then."""
        dispatchers = self.overlap.dispatchers if self.overlap else (self.dispatcher,)
        for dispatcher in dispatchers:
            if isinstance(dispatcher, FindsLater):
                dispatcher.check()

    def close(self) -> None:
        """Free the dispatcher's buffers."""
        (self.overlap or self.dispatcher).close()


class MoELayer:
    """The routed experts of one decoder layer on one rank.

    Attributes:
        local_experts: global ids of the experts held here; load exactly these.
        observer: told the routes, which it may replace; None except in a step that is inspected.
    """

    def __init__(self, card: ExpertsCard, hidden_size: int, layer_index: int, context: MoEContext) -> None:
        self.card = card
        self.layer_index = layer_index
        self.observer: LayerObserver | None = None
        self.local_experts = context.experts[context.rank]
        self._context = context
        self._width = place(card.intermediate_size, context.slices)[context.slice_rank]
        self._router = Router(card, hidden_size, context.kernels, context.device)
        self._runner: Runner = load_symbol(context.runner.runner)(
            RunnerSpec(
                num_experts=len(self.local_experts),
                hidden_size=hidden_size,
                intermediate_size=len(self._width),
                dtype=context.dtype,
                device=context.device,
                kernels=context.kernels,
                routed_experts=card.num_experts,
            )
        )
        self._sums_lanes = self._runner if isinstance(self._runner, SumsLanes) else None
        self._dispatches: Counter[str] = Counter()
        self._combines: Counter[str] = Counter()
        self._overlapped: Counter[str] = Counter()
        self._loaded = False
        context.layers.append(self)
        context.meter.add_layer(layer_index)

    @property
    def runner_name(self) -> str:
        """Name that the live runner reports."""
        return self._runner.observed().name

    @property
    def weight_format(self) -> str:
        """What the live runner holds its weights in."""
        return self._runner.observed().weight_format

    def load_router(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """weight [E, h], bias [E] when the card has a selection bias; any float dtype."""
        self._router.load(weight, bias)

    def load_expert(self, expert_id: int, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
        """Full-width projections gate, up [i, h], down [h, i] of a global expert id held here.

        The layer keeps its slice of the width, in the activation dtype.
        """
        local_id = self._local_id(expert_id, gate.shape, up.shape, down.shape)
        width = slice(self._width.start, self._width.stop)
        self._runner.load_expert(local_id, gate[width], up[width], down[:, width])

    @property
    def keeps_fp8(self) -> bool:
        """Whether the runner computes block-fp8 weights as they are stored."""
        return isinstance(self._runner, LoadsFp8)

    def load_expert_fp8(self, expert_id: int, gate: Fp8Blocks, up: Fp8Blocks, down: Fp8Blocks) -> None:
        """As ``load_expert``, from the checkpoint's blocks; for a layer that ``keeps_fp8``."""
        assert isinstance(self._runner, LoadsFp8), "keeps_fp8 says whether blocks can be loaded"
        local_id = self._local_id(expert_id, gate.shape, up.shape, down.shape)
        if len(self._width) < self.card.intermediate_size:
            gate, up, down = gate.rows(self._width), up.rows(self._width), down.columns(self._width)
        self._runner.load_expert_fp8(local_id, gate, up, down)

    def fill_experts(self, fill: ExpertFill) -> bool:
        """Have all experts made up at once; False where the runner cannot, or holds slices of them."""
        if not isinstance(self._runner, FillsExperts) or len(self._width) < self.card.intermediate_size:
            return False
        self._runner.fill_experts(fill)
        return True

    def _local_id(self, expert_id: int, *shapes: Sequence[int]) -> int:
        """The expert's place on this rank. Raises CheckpointError for an expert or a width that is not
        expected."""
        if expert_id not in self.local_experts:
            raise CheckpointError(f"expert {expert_id} is not held here, only {self.local_experts}")
        for name, shape, dim in zip(("gate", "up", "down"), shapes, (0, 0, 1), strict=True):
            if shape[dim] != self.card.intermediate_size:
                raise CheckpointError(
                    f"expert {expert_id}: {name} projection is {tuple(shape)}, "
                    f"dimension {dim} should be {self.card.intermediate_size}"
                )
        return expert_id - self.local_experts.start

    def finish_loading(self) -> None:
        """Pack the experts. Raises CheckpointError when the router or an expert is missing."""
        if not self._router.loaded:
            raise CheckpointError(f"layer {self.layer_index}: the router was not loaded")
        self._runner.finish_loading()
        self._loaded = True

    def forward(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        """hidden [n, h], the same on all attention-TP ranks -> [n, h], likewise. Padding rows give zeros.

        n may be 0; every rank of the world must call this for every step.
        """
        if not self._loaded:
            raise RuntimeError(f"layer {self.layer_index}: forward before finish_loading")
        if self._context.layouts[step.phase] is Layout.REPLICATED or self._context.groups.attn_tp.size == 1:
            return self._exchange(hidden, step.live_tokens, step.phase, live_count=step.live_count)
        return self._exchange_share(hidden, step)

    def _exchange(
        self,
        hidden: torch.Tensor,
        live_tokens: int,
        phase: Phase,
        *,
        first_row: int = 0,
        live_count: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """hidden are rows ``first_row : first_row + n`` of the step."""
        routes = self._router.route(hidden, live_tokens, live_count)
        if self.observer is not None:
            routes = self.observer.routed(self.layer_index, first_row, hidden, self._router, routes)
        if self._context.overlap is None:
            combined = self._exchange_whole(hidden, routes, phase)
        else:
            meter, layer = self._context.meter, self.layer_index
            combined = self._context.overlap.run(hidden, routes, phase, self._compute, meter, layer)
            self._overlapped[phase] += 1
        self._dispatches[phase] += 1
        self._combines[phase] += 1
        return combined

    def _exchange_whole(self, hidden: torch.Tensor, routes: Routes, phase: Phase) -> torch.Tensor:
        dispatcher, meter = self._context.dispatcher, self._context.meter
        meter.dispatching()
        dispatched = dispatcher.dispatch(hidden, routes.ids, routes.weights, phase)
        meter.dispatched(self.layer_index, dispatched.rows)
        try:
            results = self._compute(dispatched.rows)
        except BaseException:
            dispatcher.release(dispatched.handle)
            raise
        meter.combining()
        combined = dispatcher.combine(results, dispatched.handle)
        meter.combined()
        return combined

    def _compute(self, rows: ExpertInput) -> torch.Tensor:
        if self._sums_lanes is not None and isinstance(rows, ReplicatedRows) and rows.sums is not None:
            return self._sums_lanes.run_summed(rows, rows.sums)
        return self._runner.run(rows)

    def _exchange_share(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        """Each attention-TP rank sends an equal share of the tokens; the results are gathered."""
        group = self._context.groups.attn_tp
        tokens = hidden.shape[0]
        share = -(-tokens // group.size)
        first = min(group.rank * share, tokens)
        own = hidden[first : first + share]
        live = max(0, min(step.live_tokens - first, own.shape[0]))
        count = None if step.live_count is None else (step.live_count - first).clamp(0, own.shape[0])
        combined = self._exchange(own, live, step.phase, first_row=first, live_count=count)
        if tokens == 0:
            return combined
        if combined.shape[0] < share:
            missing = share - combined.shape[0]
            combined = torch.nn.functional.pad(combined, (0, 0, 0, missing))
        return group.all_gather(combined)[:tokens]

    def observed(self) -> dict[str, object]:
        """The receipt of this layer: what was built for it and how often it was used."""
        dispatcher = self._context.receipt()
        runner = self._runner.observed()
        return {
            "layer": self.layer_index,
            "a2a_backend": dispatcher.name,
            "dispatcher": dispatcher.dispatcher,
            "ranks": dispatcher.ranks,
            "layouts": dict(dispatcher.layouts),
            "capacity": dict(dispatcher.capacity),
            "buffer_bytes": dispatcher.buffer_bytes,
            "dispatches": {phase.value: self._dispatches[phase] for phase in Phase},
            "combines": {phase.value: self._combines[phase] for phase in Phase},
            "overlapped": all(self._overlapped[phase] for phase in Phase),
            "runner_backend": runner.name,
            "runner": runner.runner,
            "runner_calls": runner.calls,
            "weight_format": runner.weight_format,
            "dtype": runner.dtype,
            "weight_bytes": runner.weight_bytes,
            "local_experts": len(self.local_experts),
        }
