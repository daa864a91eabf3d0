"""Backend ``none``: no exchange of tokens. Every rank computes its experts, or its slices of all experts,
for all tokens, and an all-reduce adds the results."""

from interlock.moe.a2a.backend import A2ABackend, BufferShape
from interlock.moe.terms import Layout, Phase


def buffer_bytes(shape: BufferShape) -> int:
    """Rows of all ranks in and one result for each lane out, for the larger phase."""
    tokens = max(shape.capacity.values()) * shape.ranks
    return tokens * (shape.row_bytes + shape.scale_bytes + shape.top_k * shape.result_bytes)


BACKEND = A2ABackend(
    name="none",
    summary="no exchange: experts or slices of them on every rank, then an all-reduce",
    layouts={phase: frozenset({Layout.REPLICATED}) for phase in Phase},
    row_dtypes=frozenset({"float32", "bfloat16"}),
    devices=frozenset({"cpu", "cuda"}),
    links=frozenset({"shared_memory", "tcp", "nvlink", "pcie", "rdma"}),
    requires_full_ep=False,
    buffer_bytes=buffer_bytes,
    capturable=frozenset(Phase),
    dispatcher="interlock.moe.a2a.none.dispatcher:NoExchange",
)
