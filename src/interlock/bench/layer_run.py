"""A whole run of ``bench moe``: sizes, kernels, limits, points, evidence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from interlock.bench.layer import DTYPES, LayerPoint, LayerShape, Skipped, choose_runners, run_layer
from interlock.bench.limits import Limits, measure_limits
from interlock.bench.parts_record import layer_evidence
from interlock.demo import resolve_model
from interlock.demo.shapes import shape_folder
from interlock.errors import Refusal
from interlock.evidence.record import device_of
from interlock.evidence.schema import Evidence, ModelFacts
from interlock.kernels.availability import native_cpu_unavailable
from interlock.kernels.base import Kernels
from interlock.kernels.registry import get_kernels
from interlock.models.card_reader import read_model_card
from interlock.moe.experts.base import ExpertRunner
from interlock.plan.facts import MachineFacts

DEFAULT_SHAPE = LayerShape(hidden=576, expert_width=128, experts=24, top_k=12, dtype="float32")
"""The demo's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRun:
    """What ``bench moe`` was asked for. ``working_set`` in bytes; empty ``runners``: all that fit."""

    shape: LayerShape
    tokens: tuple[int, ...]
    runners: tuple[str, ...]
    device: str
    kernels: str | None
    threads: int
    working_set: int
    rounds: int
    seed: int


def layer_shape(
    model: str | None,
    *,
    hidden: int | None,
    expert_width: int | None,
    experts: int | None,
    top_k: int | None,
    dtype: str | None,
    local_experts: int | None = None,
) -> tuple[LayerShape, ModelFacts]:
    """Sizes of a model's MoE layers (the demo's without a model), each replaced by the one that is given.

    ``local_experts`` are held here, of ``experts`` that tokens choose from.

    Raises:
        Refusal: a model without experts, more experts a token or here than there are, or an unknown dtype.
    """
    base = DEFAULT_SHAPE
    facts = ModelFacts(name="layer", family="", architecture="", config_hash="", weight_format="")
    if model is not None:
        card = read_model_card(shape_folder(model) or resolve_model(model))
        if card.experts is None:
            raise Refusal(option="MODEL", given=model, rule="has no experts to measure")
        base = LayerShape(
            hidden=card.hidden_size,
            expert_width=card.experts.intermediate_size,
            experts=card.experts.num_experts,
            top_k=card.experts.top_k,
            dtype=card.dtype,
        )
        facts = ModelFacts(
            name=model.rstrip("/").rpartition("/")[2],
            family=card.family,
            architecture=card.architecture,
            config_hash=card.config_hash,
            weight_format=card.weight_format,
            parameters=card.parameters,
        )
    shape = LayerShape(
        hidden=hidden or base.hidden,
        expert_width=expert_width or base.expert_width,
        experts=experts or base.experts,
        top_k=top_k or base.top_k,
        dtype=dtype or base.dtype,
    )
    if local_experts is not None:
        if local_experts > shape.experts:
            raise Refusal(
                option="--local-experts", given=local_experts, rule=f"there are only {shape.experts} experts"
            )
        shape = replace(shape, experts=local_experts, routed=shape.experts)
    if shape.top_k > shape.model_experts:
        raise Refusal(
            option="--top-k",
            given=shape.top_k,
            rule=f"a token cannot go to more than {shape.model_experts} experts",
        )
    if shape.dtype not in DTYPES:
        raise Refusal(option="--dtype", given=shape.dtype, rule=f"is none of {', '.join(DTYPES)}")
    return shape, facts


def measure_layer(
    run: LayerRun, facts: MachineFacts, model: ModelFacts, tick: Callable[[str], None]
) -> tuple[list[LayerPoint | Skipped], Limits, Evidence]:
    """Measure the device's limits, then every point.

    Raises:
        Refusal: a device that is not here, or no runner for it.
    """
    if run.device == "cuda" and not torch.cuda.is_available():
        raise Refusal(
            option="--device", given="cuda", rule="torch sees no GPU here", alternatives=("--device cpu",)
        )
    device = torch.device(run.device)
    name = run.kernels or _fastest_kernels(run.device)
    kernels = get_kernels(name, threads=run.threads)
    runners = choose_runners(run.runners, run.device, name, run.shape.dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(run.threads if name == "torch" else 1)
    try:
        with torch.inference_mode():
            tick("bandwidth and peak of the device")
            if run.device == "cuda" and name == "triton":
                points, limits = _measure_cuda(run, runners, kernels, tick)
            else:
                limits = measure_limits(kernels, device, DTYPES[run.shape.dtype], run.threads)
                points = _measure_here(run, runners, kernels, device, limits, tick)
    finally:
        torch.set_num_threads(before)
    evidence = layer_evidence(
        points,
        run.shape,
        limits,
        facts,
        device_of(run.device, 1, facts),
        model=model,
        kernels=name,
        threads=run.threads,
    )
    return points, limits, evidence


def _measure_here(
    run: LayerRun,
    runners: Sequence[ExpertRunner],
    kernels: Kernels,
    device: torch.device,
    limits: Limits,
    tick: Callable[[str], None],
) -> list[LayerPoint | Skipped]:
    """The experts alone, in every layout."""
    if run.shape.routed is not None:
        raise Refusal(
            option="--local-experts",
            given=run.shape.experts,
            rule="is measured with the whole layer, which needs --device cuda and --kernels triton",
        )
    return list(
        run_layer(
            run.shape,
            runners,
            run.tokens,
            kernels,
            device,
            limits,
            rounds=run.rounds,
            working_set=run.working_set,
            seed=run.seed,
            tick=tick,
        )
    )


def _measure_cuda(
    run: LayerRun, runners: Sequence[ExpertRunner], kernels: Kernels, tick: Callable[[str], None]
) -> tuple[list[LayerPoint | Skipped], Limits]:
    """The whole layer, by runners that can be captured in a graph (all but those that run on a CPU too)."""
    from interlock.bench.layer_cuda import cuda_limits, run_cuda_layer

    limits = cuda_limits()
    written_for_it = [runner for runner in runners if "cpu" not in runner.devices]
    points = run_cuda_layer(
        run.shape, written_for_it, run.tokens, kernels, limits, rounds=run.rounds, seed=run.seed, tick=tick
    )
    return list(points), limits


def _fastest_kernels(device: str) -> str:
    """The kernel set with the highest priority that works on ``device``."""
    if device == "cpu":
        return "torch" if native_cpu_unavailable() else "cpu"
    from interlock.kernels.registry import KERNEL_SETS

    return "triton" if "triton" in KERNEL_SETS else "torch"
