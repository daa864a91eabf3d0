"""Backend ``symmetric``: one NVLink domain, or one GPU. Ranks write into each other's memory and read there
(torch symmetric memory) with Triton kernels; flags there, not collectives, say what has come."""

from interlock.moe.a2a.backend import A2ABackend
from interlock.moe.a2a.symmetric.shape import buffer_bytes
from interlock.moe.terms import Layout, Phase

BACKEND = A2ABackend(
    name="symmetric",
    summary="one NVLink domain: Triton kernels in peers' memory, no collective in a step",
    layouts={phase: frozenset({Layout.CONTIGUOUS, Layout.MASKED}) for phase in Phase},
    row_dtypes=frozenset({"float32", "bfloat16", "fp8"}),
    devices=frozenset({"cuda"}),
    links=frozenset({"nvlink"}),
    max_ranks=64,
    hidden_multiple=16,
    packages=("triton",),
    capturable=frozenset({Phase.DECODE}),
    fixed_capacity=True,
    min_capability=(8, 0),
    uneven_graphs=True,
    priority=10,
    buffer_bytes=buffer_bytes,
    dispatcher="interlock.moe.a2a.symmetric.dispatcher:Symmetric",
)
