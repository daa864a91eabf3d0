"""Evidence of ``bench moe`` and ``bench a2a``: parts alone, without a launch plan."""

from __future__ import annotations

from collections.abc import Sequence

from interlock.bench.a2a import A2APoint, A2ARun
from interlock.bench.layer import LayerPoint, LayerShape, Skipped
from interlock.bench.limits import Limits
from interlock.bench.record import evidence_of
from interlock.evidence.record import device_of
from interlock.evidence.schema import Arm, DeviceFacts, Evidence, Measurement, ModelFacts, Scalar
from interlock.plan.facts import MachineFacts


def layer_evidence(
    points: Sequence[LayerPoint | Skipped],
    shape: LayerShape,
    limits: Limits,
    facts: MachineFacts,
    device: DeviceFacts,
    *,
    model: ModelFacts,
    kernels: str,
    threads: int,
) -> Evidence:
    """One arm for each runner and layout."""
    measured = [point for point in points if isinstance(point, LayerPoint)]
    shared: dict[str, Scalar] = {
        "tool": "moe",
        "hidden": shape.hidden,
        "expert_width": shape.expert_width,
        "experts": shape.experts,
        "top_k": shape.top_k,
        "dtype": shape.dtype,
        "bandwidth_gb_per_second": limits.bandwidth / 1e9,
        "peak_gflop_per_second": limits.flops / 1e9,
    }
    measurements = [
        Measurement(
            name="moe_experts",
            arm=f"{point.runner}-{point.layout}",
            value=point.figure.median * 1e6,
            unit="us",
            samples=tuple(seconds * 1e6 for seconds in point.figure.samples),
            conditions={
                **shared,
                "tokens": point.tokens,
                "layout": point.layout,
                "working_set": point.copies * shape.weight_bytes,
                "experts_touched": point.work.touched,
                "weight_bytes": point.work.weight_bytes,
                "bytes": point.work.nbytes,
                "flops": point.work.flops,
                "roofline_us": point.limit * 1e6,
                "share_of_roofline": point.share_of_limit,
            },
        )
        for point in measured
    ]
    names = dict.fromkeys((point.runner, point.layout) for point in measured)
    return evidence_of(
        model=model,
        device=device,
        facts=facts,
        arms=[
            Arm(name=f"{runner}-{layout}", options=f"runner {runner}, layout {layout}, kernels {kernels}, "
                f"threads {threads}")
            for runner, layout in names
        ],
        measurements=measurements,
        notes=[
            f"bandwidth: {limits.read_by}",
            f"peak: {limits.computed_by}",
            *(
                f"{each.runner} {each.layout} at {each.tokens} tokens was not measured: {each.reason}"
                for each in points
                if isinstance(each, Skipped)
            ),
        ],
    )  # fmt: skip


def a2a_evidence(points: Sequence[A2APoint], run: A2ARun, facts: MachineFacts) -> Evidence:
    """One arm for each backend and layout."""
    shape, copies, gpus = run.shape, points[0].copies, run.gpus
    shared: dict[str, Scalar] = {
        "tool": "a2a",
        "ranks": run.ranks,
        "ranks_per_gpu": gpus.per_gpu if gpus else None,
        "hidden": shape.hidden,
        "experts": shape.experts,
        "top_k": shape.top_k,
        "dtype": shape.dtype,
        "rounds": run.rounds,
        "copy_gb_per_second": copies.device / 1e9,
        "peer_copy_gb_per_second": None if copies.peer is None else copies.peer / 1e9,
    }
    return evidence_of(
        model=ModelFacts(name="a2a", family="", architecture="", config_hash="", weight_format=""),
        device=device_of(run.device, run.ranks // (gpus.per_gpu if gpus else 1), facts),
        facts=facts,
        arms=[
            Arm(name=f"{backend}-{layout}", options=f"a2a {backend}, layout {layout}, {run.ranks} ranks")
            for backend, layout in dict.fromkeys((point.backend, point.layout) for point in points)
        ],
        measurements=[
            Measurement(
                name="a2a",
                arm=f"{point.backend}-{point.layout}",
                value=point.figure.median * 1e6,
                unit="us",
                conditions={
                    **shared,
                    "tokens": point.tokens,
                    "layout": point.layout,
                    "part": point.part,
                    "least_us": point.figure.least * 1e6,
                    "most_us": point.figure.most * 1e6,
                    "logical_gb_per_second": point.logical_bandwidth / 1e9,
                    "link_gb_per_second": point.link_bandwidth / 1e9,
                    "share_of_copy": point.share_of_copy,
                    "share_of_peer_copy": point.share_of_link,
                },
            )
            for point in points
        ],
        notes=[
            *filter(None, [gpus.notice if gpus else ""]),
            "seconds of the slowest rank in each round; the median over rounds",
            f"copy bandwidth (read and write): {copies.how}, by one rank alone",
        ],
    )
