"""Runner ``flashinfer_cutlass``: FlashInfer's fused MoE on CUTLASS, block-fp8 weights on Hopper GPUs.

Limits as the library states them (flashinfer 0.7: "FP8 block scaling" is there for compute capability 9.0
only, with CUDA 12.8 or newer). It sums a token's lanes itself, so it takes replicated rows; other layouts
have no entry point that leaves their rows in place.
"""

from interlock.moe.experts.base import ExpertRunner
from interlock.moe.terms import Layout

PACKAGES = ("flashinfer-python>=0.6", "triton")

RUNNER = ExpertRunner(
    name="flashinfer_cutlass",
    summary="FlashInfer's fused MoE (CUTLASS), block-fp8 weights; compiles for minutes at its first start",
    layouts=frozenset({Layout.REPLICATED}),
    weight_formats=frozenset({"fp8_block"}),
    dequantises=False,
    activation_dtypes=frozenset({"bfloat16"}),
    row_dtypes=frozenset({"bfloat16"}),
    devices=frozenset({"cuda"}),
    packages=PACKAGES,
    min_capability=(9, 0),
    max_capability=(9, 0),
    hidden_multiple=128,
    runner="interlock.moe.experts.flashinfer_cutlass.runner:FlashInferCutlassRunner",
    priority=10,
)
