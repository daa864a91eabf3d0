"""Runner ``flashinfer_trtllm``: the TensorRT-LLM kernels that FlashInfer brings, for Blackwell GPUs.

Declared so that the planner can say why it does not serve here. Its kernels exist for compute capability
10.x only and want weights shuffled for them; this version has no adapter, since there was no such GPU to
prove one on.
"""

from interlock.moe.experts.base import ExpertRunner
from interlock.moe.terms import Layout

RUNNER = ExpertRunner(
    name="flashinfer_trtllm",
    summary="FlashInfer's TensorRT-LLM kernels for Blackwell GPUs; declared, no adapter in this version",
    layouts=frozenset({Layout.REPLICATED}),
    weight_formats=frozenset({"fp8_block"}),
    dequantises=False,
    activation_dtypes=frozenset({"bfloat16"}),
    row_dtypes=frozenset({"bfloat16"}),
    devices=frozenset({"cuda"}),
    packages=("flashinfer-python>=0.6",),
    min_capability=(10, 0),
    max_capability=(10, 9),
    hidden_multiple=128,
    missing="no adapter in this version: none could be proven without a Blackwell GPU",
    runner="",
    priority=5,
)
