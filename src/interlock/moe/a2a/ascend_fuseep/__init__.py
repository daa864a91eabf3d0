"""Backend ``ascend_fuseep``: torch_npu's fused exchange, ``npu_moe_distribute_dispatch`` and ``_combine``.

Written against the interface published for Ascend Extension for PyTorch, for Atlas A2 (800I A2): the limits
below are its. It differs from the contract where the interface does: ids of -1 are not accepted, so unused
tokens are left out and lanes of used tokens must all be used; and combine multiplies by the routing weights.
"""

from interlock.moe.a2a.backend import A2ABackend, BufferShape, Site
from interlock.moe.terms import Layout, Phase

BUFFER_SIZE = "HCCL_BUFFSIZE"
RANKS = (16, 32, 64)
MAX_EXPERTS = 512
MAX_TOKENS = 256


def communication_bytes(shape: BufferShape) -> int:
    """What the group's communication buffer must hold."""
    local = shape.num_experts // shape.ranks
    rows = max(shape.capacity.values()) * shape.ranks * min(local, shape.top_k)
    return 2 * (rows * shape.hidden_size * 2 + (2 << 20))


def buffer_bytes(shape: BufferShape) -> int:
    """The communication buffer, and the rows of one step in and out."""
    local = -(-shape.num_experts // shape.ranks)
    rows = shape.ranks * max(shape.capacity.values()) * min(shape.top_k, local)
    return communication_bytes(shape) + rows * (shape.row_bytes + shape.result_bytes)


def problem(site: Site) -> str | None:
    """Why the operators cannot be used at a site, or None."""
    if site.ep_size is not None and site.ep_size not in RANKS:
        return f"works with {', '.join(map(str, RANKS))} expert-parallel ranks, not {site.ep_size}"
    return None


BACKEND = A2ABackend(
    name="ascend_fuseep",
    summary="torch_npu's fused dispatch and combine on Ascend NPUs (Atlas A2)",
    layouts={phase: frozenset({Layout.CONTIGUOUS}) for phase in Phase},
    row_dtypes=frozenset({"bfloat16"}),
    result_dtypes=frozenset({"bfloat16"}),
    devices=frozenset({"npu"}),
    links=frozenset({"hccs", "rdma"}),
    min_ranks=min(RANKS),
    max_ranks=max(RANKS),
    hidden_multiple=32,
    even_experts=True,
    max_top_k=16,
    max_local_experts=24,
    max_capacity=dict.fromkeys(Phase, MAX_TOKENS),
    applies_weights=True,
    packages=("torch-npu>=2.1",),
    check=problem,
    variables=(BUFFER_SIZE,),
    never_run="Ascend NPUs, which Interlock cannot compute on yet (--device cpu or cuda)",
    buffer_bytes=buffer_bytes,
    dispatcher="interlock.moe.a2a.ascend_fuseep.dispatcher:AscendFuseEp",
)
