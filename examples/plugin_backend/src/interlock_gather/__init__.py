"""Backend ``gather``: every rank gathers all tokens and keeps the rows of its own experts.

This module is the declaration. The planner imports it, so it must not import torch.
"""

from interlock.moe.a2a.backend import A2ABackend, BufferShape
from interlock.moe.terms import Layout, Phase


def buffer_bytes(shape: BufferShape) -> int:
    """Worst case of one dispatch: all tokens of all ranks, their rows by expert, and every lane's result."""
    local = -(-shape.num_experts // shape.ranks)
    worst = 0
    for capacity in shape.capacity.values():
        tokens = shape.ranks * capacity
        rows = tokens * min(shape.top_k, local) + (shape.alignment - 1) * local
        lanes = tokens * shape.top_k
        row = shape.row_bytes + shape.scale_bytes
        worst = max(worst, (tokens + rows) * row + (rows + lanes) * shape.result_bytes)
    return worst


BACKEND = A2ABackend(
    name="gather",
    summary="every rank gathers all tokens and keeps those of its experts; results are all-reduced",
    layouts={phase: frozenset({Layout.CONTIGUOUS}) for phase in Phase},
    row_dtypes=frozenset({"float32", "bfloat16"}),
    devices=frozenset({"cpu", "cuda"}),
    links=frozenset({"shared_memory", "tcp", "nvlink", "pcie", "rdma"}),
    buffer_bytes=buffer_bytes,
    dispatcher="interlock_gather.dispatcher:Gather",
)
