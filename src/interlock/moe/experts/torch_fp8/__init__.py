"""Runner ``torch_fp8``: what the fp8 GPU runners compute, in plain torch on any device; their reference."""

from interlock.moe.experts.base import ExpertRunner
from interlock.moe.terms import Layout

RUNNER = ExpertRunner(
    name="torch_fp8",
    summary="plain torch, block-fp8 weights and activations quantised in groups of 128: a reference, slow",
    layouts=frozenset(Layout),
    weight_formats=frozenset({"fp8_block"}),
    dequantises=False,
    activation_dtypes=frozenset({"float32", "bfloat16"}),
    row_dtypes=frozenset({"float32", "bfloat16", "fp8"}),
    devices=frozenset({"cpu", "cuda"}),
    hidden_multiple=128,
    runner="interlock.moe.experts.torch_fp8.runner:TorchFp8Runner",
    priority=-10,
)
