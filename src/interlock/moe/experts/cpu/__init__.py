"""Runner ``cpu``: one fused kernel call a layer, rows read and written in place."""

from interlock.moe.experts.base import ExpertRunner
from interlock.moe.terms import Layout

RUNNER = ExpertRunner(
    name="cpu",
    summary="one fused kernel call a layer on packed float32 or bfloat16 weights",
    layouts=frozenset(Layout),
    weight_formats=frozenset({"float32", "bfloat16", "fp8_block"}),
    activation_dtypes=frozenset({"float32", "bfloat16"}),
    row_dtypes=frozenset({"float32", "bfloat16", "fp8"}),
    devices=frozenset({"cpu"}),
    kernels=frozenset({"cpu", "torch"}),
    runner="interlock.moe.experts.cpu.runner:CpuRunner",
    row_invariant=True,
    priority=20,
)
