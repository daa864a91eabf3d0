"""What is refused before anything is built: generations of DeepEP, NCCL, GIN, sizes; each has the way out."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.errors import Refusal
from interlock.moe.a2a.backend import BufferShape
from interlock.moe.a2a.deepep import sizes as legacy_sizes
from interlock.moe.a2a.deepep.package import elastic_problem, installed, legacy_problem
from interlock.moe.a2a.deepep_v2 import sizes
from interlock.moe.terms import Layout, Phase
from interlock.options import Options
from interlock.plan.facts import MachineFacts
from interlock.plan.launch_plan import LaunchPlan
from interlock.plan.nccl import NcclLibrary
from interlock.plan.resolve import resolve
from tests.moe import elastic_double, legacy_double
from tests.plan.machines import gpu_machine, mimo_card, mimo_pro_card

GOOD = NcclLibrary(path="/opt/nccl/lib/libnccl.so.2", version="2.30.7")
OLD = NcclLibrary(path="/opt/torch/nvidia/nccl/lib/libnccl.so.2", version="2.28.9", of_torch=True)


def site(
    *,
    deep_ep: str | None = "2.1.0+local",
    environment: dict[str, str] | None = None,
    rdma: tuple[str, ...] = (),
    nccl: tuple[NcclLibrary, ...] = (GOOD, OLD),
    capability: str = "9.0",
    gpus: int = 8,
) -> MachineFacts:
    facts = gpu_machine(gpus=gpus, capability=capability)
    packages = dict(facts.packages) | ({} if deep_ep is None else {"deep_ep": deep_ep})
    return msgspec.structs.replace(
        facts,
        packages=packages,
        environment={"EP_DISABLE_GIN": "1"} if environment is None else environment,
        rdma_devices=rdma,
        nccl=nccl,
    )


def plan(facts: MachineFacts, **asked: object) -> LaunchPlan:
    card = mimo_card(num_hidden_layers=4)
    given = {"tp_size": 8, "moe_a2a_backend": "deepep_v2", **asked}
    return resolve(Options.of(model="m", **given), card, facts)


def refusal(facts: MachineFacts, **asked: object) -> Refusal:
    with pytest.raises(Refusal) as caught:
        plan(facts, **asked)
    assert caught.value.alternatives, "a refusal says what would work"
    return caught.value


def test_the_published_launch_is_planned() -> None:
    """Two machines of eight GPUs, MiMo-V2.5-Pro: hybrid, slabs for decode, everything decided by rules."""
    facts = site(environment={}, rdma=tuple(f"mlx5_{index}" for index in range(8)))
    options = Options.of(
        model="XiaomiMiMo/MiMo-V2.5-Pro",
        tp_size=16,
        nnodes=2,
        attn_dp_size=2,
        dist_init="10.0.0.1:29500",
        moe_a2a_backend="deepep_v2",
        moe_decode_capacity=64,
        max_running_requests=64,
        chunked_prefill_size=4096,
    )
    made = resolve(options, mimo_pro_card(), facts)
    assert (made.ep_size, made.moe_a2a_mode) == (16, "hybrid")
    assert (made.moe_layout_prefill, made.moe_layout_decode) == ("contiguous", "masked")
    assert made.moe_prefill_capacity == 512
    assert made.moe_buffer_bytes > 0


def test_one_machine_is_direct_unless_asked() -> None:
    assert plan(site()).moe_a2a_mode == "direct"
    assert plan(site(), deepep_v2_mode="hybrid").moe_a2a_mode == "hybrid"


def test_direct_does_not_reach_other_machines() -> None:
    facts = site(environment={}, rdma=("mlx5_0",))
    found = refusal(
        facts,
        tp_size=16,
        nnodes=2,
        dist_init="10.0.0.1:29500",
        deepep_v2_mode="direct",
        max_running_requests=64,
    )
    assert found.option == "--deepep-v2-mode"
    assert "--deepep-v2-mode hybrid" in found.alternatives


def test_an_option_of_another_backend_would_have_no_effect() -> None:
    found = refusal(site(), moe_a2a_backend="none", deepep_v2_mode="hybrid")
    assert "belongs to --moe-a2a-backend deepep_v2" in found.rule


@pytest.mark.parametrize(
    ("packages", "elastic", "legacy"),
    [
        ({}, "no DeepEP is installed", "no DeepEP is installed"),
        ({"deep_ep": "1.2.1+73b6ea4"}, "has v1's Buffer only", None),
        ({"deep_ep": "1.1.0"}, "has v1's Buffer only", "1.2 or later"),
        ({"deep_ep": "2.0.0"}, "handles of DeepEP 2.1", None),
        ({"deep_ep": "2.1.0+dd758ca"}, None, None),
        ({"sgl-deep-ep": "0.1.2.post1"}, None, None),
        ({"tokenspeed-deepep": "2.0.0.post20260430"}, "handles of DeepEP 2.1", None),
        ({"deep_ep": "2.5.0"}, "replaced by EPBuffer", "2.5 dropped"),
        ({"deep_ep": "3.0.0"}, "replaced by EPBuffer", "2.5 dropped"),
        ({"deep_ep": "unknown"}, "v1's Buffer only", "1.2 or later"),
    ],
)
def test_generations(packages: dict[str, str], elastic: str | None, legacy: str | None) -> None:
    """Each generation is served, or refused with the version to install."""
    for wanted, found in ((elastic, elastic_problem(packages)), (legacy, legacy_problem(packages))):
        assert (wanted is None) == (found is None)
        if wanted is not None:
            assert wanted in str(found)
            assert "install DeepEP 2.1.0" in str(found)
    assert (installed(packages) is None) == (not packages)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (site(deep_ep=None), ("no DeepEP is installed", "install DeepEP 2.1.0")),
        (site(deep_ep="2.5.1"), ("EPBuffer", "2.5.1 is installed", "install DeepEP 2.1.0")),
        (site(environment={}), ("GIN", "set EP_DISABLE_GIN=1")),
        (site(nccl=(OLD, GOOD)), ("2.30.4", "2.28.9", "LD_PRELOAD=/opt/nccl/lib/libnccl.so.2")),
        (site(nccl=(OLD,)), ("2.30.4", "pip install", "LD_PRELOAD")),
        (site(capability="8.0"), ("compute capability 9.0 or more", "8.0")),
    ],
)
def test_a_machine_that_cannot_is_refused_by_what_it_lacks(
    facts: MachineFacts, words: tuple[str, ...]
) -> None:
    """A12: GIN without RDMA, an NCCL that is too old, no package, another generation, an old GPU."""
    found = refusal(facts)
    assert found.option == "--moe-a2a-backend"
    for word in words:
        assert word in found.rule


def test_two_versions_of_nccl_are_told_apart() -> None:
    """Kernels are compiled with the headers of EP_NCCL_ROOT_DIR, and run with the NCCL that is loaded."""
    newer = NcclLibrary(path="/opt/newer/lib/libnccl.so.2", version="2.30.9")
    environment = {"EP_DISABLE_GIN": "1", "EP_NCCL_ROOT_DIR": "/opt/newer"}
    found = refusal(site(nccl=(GOOD, newer), environment=environment))
    for word in ("2.30.9", "2.30.7", "EP_NCCL_ROOT_DIR=/opt/newer", "give both one version"):
        assert word in found.rule


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        (site(environment={"EP_DISABLE_GIN": "1"}, rdma=("mlx5_0",)), "unset EP_DISABLE_GIN"),
        (site(environment={}), "/sys/class/infiniband"),
    ],
)
def test_several_machines_need_gin(facts: MachineFacts, word: str) -> None:
    found = refusal(facts, tp_size=16, nnodes=2, dist_init="10.0.0.1:29500", max_running_requests=64)
    assert word in found.rule


def test_t_too_small_for_the_chunk_names_both() -> None:
    """A06: T follows from the scheduler's limits; a smaller one is refused before anything is built."""
    found = refusal(site(), moe_prefill_capacity=128, chunked_prefill_size=8192)
    assert found.option == "--moe-prefill-capacity"
    assert "--moe-prefill-capacity 1024" in found.alternatives
    found = refusal(site(), moe_decode_capacity=4, max_running_requests=64)
    assert found.option == "--moe-decode-capacity"


def test_v1_limits() -> None:
    found = refusal(site(), moe_a2a_backend="deepep", max_running_requests=8192, chunked_prefill_size=512)
    assert found.option == "--moe-decode-capacity"
    assert "at most 508 tokens" in found.rule
    assert plan(site(deep_ep="1.2.1"), moe_a2a_backend="deepep", max_running_requests=64).ep_size == 8


@pytest.mark.parametrize("backend", ["mooncake", "ascend_fuseep"])
def test_what_is_absent_is_refused_in_one_line(backend: str) -> None:
    found = refusal(site(), moe_a2a_backend=backend)
    assert "\n" not in found.rule
    assert "mooncake-transfer-engine-cuda13" in found.rule or "runs on npu, not on cuda" in found.rule


def test_what_can_be_captured_is_and_nothing_else() -> None:
    """I02: decode of both DeepEPs runs as graphs, prefill never; what waits for the host is refused."""
    for backend in ("deepep_v2", "deepep"):
        assert plan(site(), moe_a2a_backend=backend, max_running_requests=64).cuda_graph_sizes
    facts = site()
    packages = {**facts.packages, "mooncake-transfer-engine-cuda13": "0.3.14"}
    facts = msgspec.structs.replace(facts, packages=packages)
    small = {"moe_a2a_backend": "mooncake", "max_running_requests": 64, "chunked_prefill_size": 512}
    assert plan(facts, **small).cuda_graph_sizes == ()
    found = refusal(facts, cuda_graph_max_batch=8, **small)
    assert "--moe-a2a-backend mooncake cannot be captured" in found.rule


class Group:
    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def size(self) -> int:
        return self.ranks


@given(
    ranks=st.sampled_from([2, 4, 8, 16, 32]),
    nodes=st.sampled_from([1, 2, 4]),
    tokens=st.integers(1, 9000),
    hidden=st.integers(1, 32).map(lambda blocks: blocks * 256),
    k=st.integers(1, 32),
    fp8=st.booleans(),
)
def test_elastic_bytes_are_the_librarys(
    ranks: int, nodes: int, tokens: int, hidden: int, k: int, fp8: bool
) -> None:
    """The plan's formula against the library's (an independent transcription of it), both modes."""
    if ranks % nodes or ranks == nodes:
        return
    hybrid = nodes > 1
    shape = BufferShape(
        ranks=ranks,
        num_experts=ranks,
        top_k=k,
        hidden_size=hidden,
        row_bytes=hidden * 2,
        scale_bytes=0,
        result_bytes=hidden * 2,
        capacity={Phase.PREFILL: tokens, Phase.DECODE: 1},
        layouts={Phase.PREFILL: Layout.CONTIGUOUS, Phase.DECODE: Layout.MASKED},
        nodes=nodes,
        mode="hybrid" if hybrid else "direct",
    )

    class OnThisMany(elastic_double.ElasticBuffer):
        pass

    OnThisMany.nodes = nodes
    wanted = OnThisMany.get_buffer_size_hint(
        Group(ranks), tokens, hidden, k, fp8, allow_hybrid_mode=hybrid, allow_multiple_reduction=False
    )
    assert sizes.symmetric_bytes(shape, tokens, fp8=fp8) == wanted


def test_a_published_size() -> None:
    """1,218,445,312 bytes: 2 x 8 ranks, T = 4096, h = 7168, bfloat16, k = 8 (a public report), with sums."""
    OnTwo = type("OnTwo", (elastic_double.ElasticBuffer,), {"nodes": 2})
    assert OnTwo.get_buffer_size_hint(Group(16), 4096, 7168, 8) == 1218445312


@given(
    ranks=st.sampled_from([2, 4, 8]),
    tokens=st.integers(1, 126).map(lambda quarter: 4 * quarter),
    hidden=st.sampled_from(legacy_sizes.HIDDEN),
    local=st.integers(1, 48),
)
def test_v1_bytes_are_the_librarys(ranks: int, tokens: int, hidden: int, local: int) -> None:
    buffer = legacy_double.Buffer
    experts = ranks * local
    assert legacy_sizes.low_latency_bytes(tokens, hidden, experts) == buffer.get_low_latency_rdma_size_hint(
        tokens, hidden, ranks, experts
    )
    config = buffer.get_dispatch_config(ranks)
    assert legacy_sizes.nvlink_bytes(ranks, 2 * hidden) == config.get_nvl_buffer_size_hint(2 * hidden, ranks)
