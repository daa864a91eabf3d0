"""What a rank tells about its load: the counts of its MoE layers, once there are new ones."""

from __future__ import annotations

from interlock.engine.messages import PhaseLoad, RankLoad
from interlock.engine.model_runner import ModelRunner
from interlock.moe.terms import Phase


class LoadReport:
    """``Activity.report`` of one rank. Counts from its construction on, which ends the warm-up."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._context = runner.context.moe
        self._steps_told = 0
        self._context.meter.start()

    def __call__(self) -> RankLoad | None:
        """The counts so far; None when nothing was counted since the last call."""
        meter = self._context.meter
        steps = sum(totals.steps for totals in meter.totals.values())
        if steps == self._steps_told or not meter.layers:
            return None
        self._steps_told = steps
        received = meter.received()
        context, graphs = self._context, self._runner.graphs
        held = context.experts[context.rank]

        def phase_load(phase: Phase, capacity: int) -> PhaseLoad:
            totals = meter.totals[phase]
            return PhaseLoad(
                capacity=capacity,
                steps=totals.steps,
                tokens=totals.tokens,
                most_tokens=totals.most_tokens,
                dispatch_seconds=totals.dispatch.seconds,
                dispatch_calls=totals.dispatch.calls,
                combine_seconds=totals.combine.seconds,
                combine_calls=totals.combine.calls,
                rows=received[phase].numpy().astype("<i8", copy=False).tobytes(),
            )

        plan = self._runner.plan
        return RankLoad(
            rank=self._runner.groups.world.rank,
            layers=meter.layers,
            first_expert=held.start,
            experts=len(held),
            is_slice=context.slice_rank > 0,
            sample_every=meter.every,
            prefill=phase_load(Phase.PREFILL, plan.moe_prefill_capacity),
            decode=phase_load(Phase.DECODE, plan.moe_decode_capacity),
            graph_replays=graphs.replays if graphs else 0,
            graph_misses=graphs.misses if graphs else 0,
        )
