"""Backend ``collective``: torch ``all_to_all_single``, on gloo or NCCL. The oracle of the others."""

from interlock.moe.a2a.backend import A2ABackend, BufferShape
from interlock.moe.terms import Layout, Phase


def buffer_bytes(shape: BufferShape) -> int:
    """Worst case of one dispatch: every lane of every rank comes here, in the phase that needs most."""
    local = -(-shape.num_experts // shape.ranks)
    worst = 0
    for phase, capacity in shape.capacity.items():
        sent = capacity * shape.top_k
        received = shape.ranks * capacity * min(shape.top_k, local)
        rows = received + (shape.alignment - 1) * local
        if shape.layouts[phase] == Layout.MASKED:
            rows = local * shape.ranks * capacity
        row = shape.row_bytes + shape.scale_bytes
        worst = max(worst, (sent + received + rows) * row + (rows + received + sent) * shape.result_bytes)
    return worst


BACKEND = A2ABackend(
    name="collective",
    summary="torch all_to_all_single over gloo or NCCL: works everywhere, the oracle of the others",
    layouts={phase: frozenset({Layout.CONTIGUOUS, Layout.MASKED}) for phase in Phase},
    row_dtypes=frozenset({"float32", "bfloat16", "fp8"}),
    devices=frozenset({"cpu", "cuda"}),
    links=frozenset({"shared_memory", "tcp", "nvlink", "pcie", "rdma"}),
    overlap=True,
    buffer_bytes=buffer_bytes,
    dispatcher="interlock.moe.a2a.collective.dispatcher:Collective",
)
