"""Runner ``triton``: grouped GEMMs on an NVIDIA GPU, bfloat16 weights."""

from interlock.moe.experts.base import ExpertRunner
from interlock.moe.terms import Layout

RUNNER = ExpertRunner(
    name="triton",
    summary="grouped GEMMs in Triton with gather, SwiGLU and weights fused in; bfloat16 weights",
    layouts=frozenset(Layout),
    weight_formats=frozenset({"float32", "bfloat16", "fp8_block"}),
    activation_dtypes=frozenset({"bfloat16"}),
    row_dtypes=frozenset({"bfloat16", "fp8"}),
    devices=frozenset({"cuda"}),
    packages=("triton",),
    min_capability=(8, 0),
    hidden_multiple=8,
    runner="interlock.moe.experts.triton.runner:TritonRunner",
    capturable=True,
    priority=20,
)
