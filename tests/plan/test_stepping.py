"""Decode graphs are planned only where everything within a step can be captured."""

from __future__ import annotations

from typing import Any

import pytest

from interlock.errors import Refusal
from interlock.options import Options
from interlock.plan.launch_plan import LaunchPlan
from interlock.plan.resolve import resolve
from tests.plan.machines import gpu_machine, tiny_card


def plan(**options: Any) -> LaunchPlan:
    return resolve(Options.of(model="m", **options), tiny_card(), gpu_machine(1))


@pytest.mark.parametrize(
    ("options", "runner"),
    [
        ({"dtype": "float32"}, "torch"),
        ({"dtype": "bfloat16", "quantization": "none", "moe_runner_backend": "torch"}, "torch"),
        ({"dtype": "bfloat16", "quantization": "fp8", "moe_runner_backend": "torch_fp8"}, "torch_fp8"),
    ],
)
def test_a_runner_that_waits_for_the_device_leaves_no_graphs(options: dict[str, Any], runner: str) -> None:
    """``auto`` once planned graphs beside the reference runner, which float32 takes: the capture failed."""
    made = plan(**options)
    assert (made.kernels, made.moe_runner_backend) == ("triton", runner)
    assert made.cuda_graph_sizes == ()
    reason = f"--moe-runner-backend {runner} waits for the device within a step"
    assert made.provenance["cuda_graph_sizes"].reason == reason
    with pytest.raises(Refusal, match=reason):
        plan(**options, cuda_graph_max_batch=8)


@pytest.mark.parametrize(("quantization", "runner"), [("none", "triton"), ("fp8", "triton_fp8")])
def test_our_own_runners_are_captured(quantization: str, runner: str) -> None:
    made = plan(dtype="bfloat16", quantization=quantization)
    assert made.moe_runner_backend == runner
    assert made.cuda_graph_sizes
