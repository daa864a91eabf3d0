"""Runner ``triton_fp8``: as ``triton``, but weights stay block-fp8 and activations are quantised (W8A8)."""

from interlock.moe.experts.base import ExpertRunner
from interlock.moe.terms import Layout

RUNNER = ExpertRunner(
    name="triton_fp8",
    summary="grouped fp8 GEMMs in Triton: 128x128 weight blocks, activations quantised in groups of 128",
    layouts=frozenset(Layout),
    weight_formats=frozenset({"fp8_block"}),
    dequantises=False,
    activation_dtypes=frozenset({"bfloat16"}),
    row_dtypes=frozenset({"bfloat16", "fp8"}),
    devices=frozenset({"cuda"}),
    packages=("triton",),
    min_capability=(9, 0),
    max_capability=(9, 9),
    hidden_multiple=128,
    runner="interlock.moe.experts.triton_fp8.runner:TritonFp8Runner",
    capturable=True,
    priority=30,
)
