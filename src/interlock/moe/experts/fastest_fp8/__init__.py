"""Runner ``fastest_fp8``: one set of fp8 weights, and for each number of rows the runner measured fastest."""

from interlock.moe.experts.base import ExpertRunner
from interlock.moe.experts.deep_gemm import ALIGNMENT, PACKAGES
from interlock.moe.terms import Layout

FEW, MANY = "triton_fp8", "deep_gemm"
"""The two runners it chooses between; both read the same weights."""

RUNNER = ExpertRunner(
    name="fastest_fp8",
    summary=f"{FEW} for few rows, {MANY} for many, on one set of weights, by stored measurements",
    layouts=frozenset(Layout),
    weight_formats=frozenset({"fp8_block"}),
    dequantises=False,
    activation_dtypes=frozenset({"bfloat16"}),
    row_dtypes=frozenset({"bfloat16", "fp8"}),
    devices=frozenset({"cuda"}),
    packages=PACKAGES,
    alignment=ALIGNMENT,
    min_capability=(9, 0),
    max_capability=(9, 9),
    hidden_multiple=128,
    runner="interlock.moe.experts.fastest_fp8.runner:FastestFp8Runner",
    capturable=True,
    priority=40,
)
