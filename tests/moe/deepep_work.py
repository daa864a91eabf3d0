"""What rank processes of the DeepEP tests do; a module that they can import."""

from __future__ import annotations

import random
import sys
from dataclasses import replace

import torch

from interlock.kernels.registry import get_kernels
from interlock.moe.a2a import deepep as legacy
from interlock.moe.a2a import mooncake
from interlock.moe.a2a.contract import DispatcherSpec
from interlock.moe.a2a.deepep.dispatcher import DeepEp
from interlock.moe.a2a.deepep_v2 import BACKEND
from interlock.moe.a2a.deepep_v2.dispatcher import DeepEpV2
from interlock.moe.a2a.mooncake.dispatcher import MooncakeEp
from interlock.moe.a2a.rows import MaskedRows
from interlock.moe.conformance.backend_suite import RankFindings, run_backend_suite
from interlock.moe.placement import place
from interlock.moe.terms import Layout, Phase
from interlock.parallel.topology import Groups
from tests.moe import elastic_double, legacy_double

ON_CPU = replace(
    BACKEND, devices=frozenset({"cpu"}), dispatcher="tests.moe.deepep_work:ElasticOnCpu", packages=()
)


class ElasticOnCpu(DeepEpV2):
    """The adapter as it is, on a machine without a GPU."""

    def __init__(self, spec: DispatcherSpec) -> None:
        super().__init__(spec, ON_CPU)


LEGACY_ON_CPU = replace(
    legacy.BACKEND, devices=frozenset({"cpu"}), dispatcher="tests.moe.deepep_work:LegacyOnCpu"
)
MOONCAKE_ON_CPU = replace(
    mooncake.BACKEND, devices=frozenset({"cpu"}), dispatcher="tests.moe.deepep_work:MooncakeOnCpu"
)


class LegacyOnCpu(DeepEp):
    def __init__(self, spec: DispatcherSpec) -> None:
        super().__init__(spec, LEGACY_ON_CPU)


class MooncakeOnCpu(MooncakeEp):
    def __init__(self, spec: DispatcherSpec) -> None:
        super().__init__(spec, MOONCAKE_ON_CPU)


def conformance(groups: Groups, cases: int, seed: int) -> RankFindings:
    sys.modules["deep_ep"] = elastic_double.module()
    return run_backend_suite(ON_CPU, groups, device="cpu", cases=cases, seed=seed)


def legacy_conformance(groups: Groups, cases: int, seed: int) -> RankFindings:
    sys.modules["deep_ep"] = legacy_double.deep_ep()
    return run_backend_suite(LEGACY_ON_CPU, groups, device="cpu", cases=cases, seed=seed)


def mooncake_conformance(groups: Groups, cases: int, seed: int) -> RankFindings:
    sys.modules["mooncake.mooncake_ep_buffer"] = legacy_double.mooncake()
    return run_backend_suite(MOONCAKE_ON_CPU, groups, device="cpu", cases=cases, seed=seed)


def graph_replays(groups: Groups, replays: int) -> tuple[int, list[int], str]:
    """Capture dispatch, an expert and combine once, replay with other tokens; what differs from eager.

    Returns:
        (replays done, numbers of those that differ, the receipt's mode).
    """
    experts, top_k, hidden_size, decode = 16, 4, 256, 16
    device = torch.device("cuda")
    spec = DispatcherSpec(
        groups=groups,
        experts=place(experts, groups.ep.size),
        rank=groups.ep.rank,
        num_experts=experts,
        top_k=top_k,
        hidden_size=hidden_size,
        row_dtype="bfloat16",
        dtype=torch.bfloat16,
        device=device,
        layouts={Phase.PREFILL: Layout.CONTIGUOUS, Phase.DECODE: Layout.MASKED},
        capacity={Phase.PREFILL: 24, Phase.DECODE: decode},
        kernels=get_kernels("torch", threads=1),
        alignment=8,
        mode="direct",
        ranks_per_gpu=groups.ep.size,
    )
    dispatcher = DeepEpV2(spec)
    pick = random.Random(groups.ep.rank)
    shared = random.Random(0)
    hidden = torch.zeros(decode, hidden_size, dtype=torch.bfloat16, device=device)
    ids = torch.full((decode, top_k), -1, device=device)
    weights = torch.zeros(decode, top_k, device=device)

    def step() -> torch.Tensor:
        dispatched = dispatcher.dispatch(hidden, ids, weights, Phase.DECODE)
        rows = dispatched.rows
        assert isinstance(rows, MaskedRows)
        assert rows.weights is not None
        results = (rows.rows.float() * rows.weights.unsqueeze(-1) * 1.5).to(torch.bfloat16)
        return dispatcher.combine(results, dispatched.handle)

    cases = []
    for _ in range(24):
        idle = shared.randrange(groups.ep.size) == groups.ep.rank
        tokens = 0 if idle else pick.randint(1, decode)
        routes = torch.rand(decode, experts).argsort(1)[:, :top_k].sort(1).values
        routes[tokens:] = -1
        cases.append((torch.randn(decode, hidden_size).bfloat16(), routes, torch.rand(decode, top_k)))
    wanted = []
    for case in cases:
        fill(case, hidden, ids, weights)
        wanted.append(step().clone())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    groups.ep.barrier()
    with torch.cuda.graph(graph, stream=stream):
        out = step()
    groups.ep.barrier()
    wrong = []
    for number in range(replays):
        which = shared.randrange(len(cases))
        fill(cases[which], hidden, ids, weights)
        graph.replay()
        if not torch.equal(out.view(torch.int16), wanted[which].view(torch.int16)):
            wrong.append(number)
    mode = dispatcher.observed().mode
    torch.cuda.synchronize()
    dispatcher.close()
    return replays, wrong, mode


def fill(case: tuple[torch.Tensor, ...], *places: torch.Tensor) -> None:
    for value, target in zip(case, places, strict=True):
        target.copy_(value)
