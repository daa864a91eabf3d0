"""Backend ``shared_memory``: one host, CPU. Every rank owns fixed-capacity slots in POSIX shared memory into
which its peers write; flags, not collectives, say when they are filled."""

from interlock.moe.a2a.backend import A2ABackend
from interlock.moe.a2a.shared_memory.shape import buffer_bytes
from interlock.moe.terms import Layout, Phase

BACKEND = A2ABackend(
    name="shared_memory",
    summary="one host, CPU: one-sided writes into fixed-capacity shared memory, no collective in a step",
    layouts={phase: frozenset({Layout.CONTIGUOUS, Layout.MASKED}) for phase in Phase},
    row_dtypes=frozenset({"float32", "bfloat16", "fp8"}),
    devices=frozenset({"cpu"}),
    links=frozenset({"shared_memory"}),
    max_ranks=64,
    native=True,
    fixed_capacity=True,
    overlap=True,
    buffer_bytes=buffer_bytes,
    dispatcher="interlock.moe.a2a.shared_memory.dispatcher:SharedMemory",
)
