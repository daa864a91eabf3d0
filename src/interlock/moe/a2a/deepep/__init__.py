"""Backend ``deepep``: DeepEP v1's Buffer (NVSHMEM): normal kernels for prefill, low latency for decode.

Sums of v1's normal mode are not the contract's, so it is given nothing to add: in prefill each lane travels
as a token of its own and is added at home (``k`` rows a token instead of one for each rank). In decode the
library adds lanes in ascending order in float32 with weights of one, which is the contract's sum.
"""

from interlock.moe.a2a.backend import A2ABackend, Site
from interlock.moe.a2a.deepep.package import DISTRIBUTIONS, legacy_problem
from interlock.moe.a2a.deepep.sizes import HIDDEN, NVLINK_PEERS, RANKS, buffer_bytes
from interlock.moe.terms import Layout, Phase

DEFAULT_DEPTH = 1024
"""NVSHMEM_QP_DEPTH where nobody sets it."""
MAX_TOKENS = DEFAULT_DEPTH // 2 - 4
"""A queue must hold 2 (T + 1) messages, and T is rounded up to a multiple of 4."""


def problem(site: Site) -> str | None:
    """Why Buffer cannot be built at a site, or None."""
    found = legacy_problem(site.facts.packages)
    if found is not None:
        return found
    if site.ep_size is not None and site.ep_size not in RANKS:
        return f"has settings for {', '.join(map(str, RANKS))} ranks, not {site.ep_size}"
    if site.ep_size is not None and site.nnodes > 1 and site.ep_size != NVLINK_PEERS * site.nnodes:
        return f"takes {NVLINK_PEERS} ranks of each machine, not {site.ep_size // site.nnodes}"
    if site.nnodes > 1 and not site.facts.rdma_devices:
        return "needs RDMA devices between machines, and this one has none in /sys/class/infiniband"
    return None


BACKEND = A2ABackend(
    name="deepep",
    summary="DeepEP v1's Buffer over NVSHMEM: normal kernels for prefill, low latency for decode",
    layouts={Phase.PREFILL: frozenset({Layout.CONTIGUOUS}), Phase.DECODE: frozenset({Layout.MASKED})},
    row_dtypes=frozenset({"bfloat16"}),
    result_dtypes=frozenset({"bfloat16"}),
    devices=frozenset({"cuda"}),
    links=frozenset({"nvlink", "rdma"}),
    min_ranks=2,
    max_ranks=max(RANKS),
    hidden_multiple=512,
    hidden_sizes=HIDDEN,
    even_experts=True,
    max_top_k=11,
    max_capacity={Phase.DECODE: MAX_TOKENS},
    min_capability=(9, 0),
    capturable=frozenset({Phase.DECODE}),
    fixed_capacity=True,
    ordered_rows=False,
    check=problem,
    distributions=DISTRIBUTIONS,
    never_run="GPUs with NVSHMEM (low latency also wants IBGDA or NVLink between all ranks)",
    buffer_bytes=buffer_bytes,
    dispatcher="interlock.moe.a2a.deepep.dispatcher:DeepEp",
)
