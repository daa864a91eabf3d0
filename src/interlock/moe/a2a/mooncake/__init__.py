"""Backend ``mooncake``: Mooncake EP, whose buffer has DeepEP's low-latency interface in both phases.

Written against ``mooncake.mooncake_ep_buffer.Buffer`` of ``mooncake-transfer-engine-cuda13`` 0.3.14. Every
rank keeps room for E * T rows twice, so prefill wants small chunks (``--chunked-prefill-size``).
"""

from interlock.moe.a2a.backend import A2ABackend, BufferShape, Site
from interlock.moe.a2a.low_latency_sizes import library_capacity
from interlock.moe.terms import Layout, Phase

PACKAGE = "mooncake-transfer-engine-cuda13"


def region_bytes(tokens: int, hidden: int, experts: int) -> int:
    """Upper bound of the library's ``get_ep_buffer_size_hint``: two sets of send and receive rooms."""
    message = 16 + 2 * hidden + 4 * (hidden // 128)
    sets = 2 * (2 * experts * tokens * message + 4 * experts * 2)
    return -(-sets // (2 << 20)) * (2 << 20)


def buffer_bytes(shape: BufferShape) -> int:
    """The registered region for the larger T, and the slabs of one step."""
    tokens = library_capacity(max(shape.capacity.values()))
    local = -(-shape.num_experts // shape.ranks)
    slab = local * shape.ranks * tokens * (shape.row_bytes + 8)
    return region_bytes(tokens, shape.hidden_size, shape.num_experts) + slab


def problem(site: Site) -> str | None:
    """Why Mooncake EP cannot be used at a site, or None."""
    if not site.facts.rdma_devices and site.nnodes > 1:
        return "needs RDMA devices between machines, and this one has none in /sys/class/infiniband"
    return None


BACKEND = A2ABackend(
    name="mooncake",
    summary="Mooncake EP over RDMA and NVLink: slabs in both phases, tolerates ranks that fall silent",
    layouts={phase: frozenset({Layout.MASKED}) for phase in Phase},
    row_dtypes=frozenset({"bfloat16"}),
    result_dtypes=frozenset({"bfloat16"}),
    devices=frozenset({"cuda"}),
    links=frozenset({"nvlink", "rdma"}),
    min_ranks=2,
    hidden_multiple=128,
    even_experts=True,
    max_top_k=11,
    min_capability=(9, 0),
    fixed_capacity=True,
    ordered_rows=False,
    packages=(f"{PACKAGE}>=0.3.14",),
    check=problem,
    never_run="GPUs that RDMA devices or NVLink join",
    buffer_bytes=buffer_bytes,
    dispatcher="interlock.moe.a2a.mooncake.dispatcher:MooncakeEp",
)
