"""Backend ``deepep_v2``: DeepEP's ElasticBuffer over NCCL's device API, NVLink within a machine and RDMA
between machines.

Tokens travel once to each rank, are expanded there to their experts in our order, and come home one row a
lane: the library adds a token's lanes at its home in ascending order in float32 and rounds once (up to two
lanes in bfloat16, which gives the same value), so results equal those of ``collective`` bit for bit. Sums on
the way (``allow_multiple_reduction``) would move fewer rows and round twice: they are not used.
"""

from interlock.moe.a2a.backend import A2ABackend, Modes
from interlock.moe.a2a.deepep.package import DISTRIBUTIONS
from interlock.moe.a2a.deepep_v2.fitness import VARIABLES, problem
from interlock.moe.a2a.deepep_v2.sizes import (
    DIRECT,
    HYBRID,
    MAX_LOCAL_EXPERTS,
    MAX_RANKS,
    MAX_TOP_K,
    buffer_bytes,
)
from interlock.moe.terms import Layout, Phase

BACKEND = A2ABackend(
    name="deepep_v2",
    summary="DeepEP's ElasticBuffer: NVLink and RDMA through NCCL's device API, kernels compiled at start",
    layouts={Phase.PREFILL: frozenset({Layout.CONTIGUOUS}), Phase.DECODE: frozenset({Layout.MASKED})},
    row_dtypes=frozenset({"bfloat16", "fp8"}),
    result_dtypes=frozenset({"bfloat16"}),
    devices=frozenset({"cuda"}),
    links=frozenset({"nvlink", "rdma"}),
    min_ranks=2,
    max_ranks=MAX_RANKS,
    hidden_multiple=256,
    even_experts=True,
    max_top_k=MAX_TOP_K,
    max_local_experts=MAX_LOCAL_EXPERTS,
    min_capability=(9, 0),
    capturable=frozenset({Phase.DECODE}),
    fixed_capacity=True,
    modes=Modes(option="deepep_v2_mode", one_node=(DIRECT, HYBRID), several_nodes=(HYBRID,)),
    compiles_sizes=True,
    packages=("triton",),
    check=problem,
    distributions=DISTRIBUTIONS,
    variables=VARIABLES,
    buffer_bytes=buffer_bytes,
    dispatcher="interlock.moe.a2a.deepep_v2.dispatcher:DeepEpV2",
)
