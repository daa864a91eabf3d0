"""Time from a shape to a loaded model on one GPU, part by part, without an engine.

    python benchmarks/gpu_load.py [shape:mimo-v2-flash] [layers]

Prints what the plan holds the weights in, seconds to build and to fill them, and bytes of device memory.
"""

from __future__ import annotations

import sys
import time

import torch

from interlock.engine.model_runner import ModelRunner
from interlock.launch import plan_launch
from interlock.options import Options
from interlock.parallel.topology import Groups
from interlock.plan.memory import size


def main(model: str = "shape:mimo-v2-flash", layers: str = "12") -> None:
    """Plan, build, load; each timed to the end of its work on the device."""
    options = Options.of(
        load_format="dummy", num_hidden_layers=int(layers), max_model_len=1024, device="cuda"
    )
    plan = plan_launch(model, options)
    for item in ("kernels", "moe_runner_backend", "attention_weight_format", "expert_weight_format"):
        print(f"{item}: {getattr(plan, item)} ({plan.provenance[item].reason})")
    torch.zeros(1, device="cuda")
    runner = timed("build", lambda: ModelRunner(plan, Groups.single()))
    timed("load", runner.load)
    print(f"planned weights {size(plan.memory.weights)}, allocated {size(torch.cuda.memory_allocated())}")


def timed(what, work):
    """Run ``work`` and say how long it took, the device included."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    result = work()
    torch.cuda.synchronize()
    print(f"{what}: {time.perf_counter() - begin:.2f} s")
    return result


if __name__ == "__main__":
    main(*sys.argv[1:])
