"""Runner ``deep_gemm``: the grouped fp8 GEMMs of DeepGEMM, for many tokens on Hopper GPUs."""

from interlock.moe.experts.base import ExpertRunner
from interlock.moe.terms import Layout

ALIGNMENT = 128
"""Rows of a block of its contiguous GEMMs: each expert's rows start at a multiple."""

PACKAGES = ("sgl-deep-gemm>=0.1.4,<0.2", "triton")

RUNNER = ExpertRunner(
    name="deep_gemm",
    summary="DeepGEMM's grouped fp8 GEMMs with our own kernels around them; compiles at start (needs nvcc)",
    layouts=frozenset(Layout),
    weight_formats=frozenset({"fp8_block"}),
    dequantises=False,
    activation_dtypes=frozenset({"bfloat16"}),
    row_dtypes=frozenset({"bfloat16", "fp8"}),
    devices=frozenset({"cuda"}),
    packages=PACKAGES,
    alignment=ALIGNMENT,
    rounds_gate_up=True,
    min_capability=(9, 0),
    max_capability=(9, 9),
    hidden_multiple=128,
    runner="interlock.moe.experts.deep_gemm.runner:DeepGemmRunner",
    capturable=True,
    priority=25,
)
