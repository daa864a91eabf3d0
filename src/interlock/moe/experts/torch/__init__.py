"""Runner ``torch``: plain torch, one expert after the other; the reference of all others."""

from interlock.moe.experts.base import ExpertRunner
from interlock.moe.terms import Layout

RUNNER = ExpertRunner(
    name="torch",
    summary="plain torch, one expert after the other: the reference, on any device",
    layouts=frozenset(Layout),
    weight_formats=frozenset({"float32", "bfloat16", "fp8_block"}),
    activation_dtypes=frozenset({"float32", "bfloat16"}),
    row_dtypes=frozenset({"float32", "bfloat16", "fp8"}),
    devices=frozenset({"cpu", "cuda"}),
    runner="interlock.moe.experts.torch.runner:TorchRunner",
    priority=0,
)
