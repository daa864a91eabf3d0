"""What rank processes of the GPU tests do; a module they can import. The group is gloo's: no NCCL needed."""

from __future__ import annotations

import os
import random
import time

import torch

from interlock.errors import EngineDeadError
from interlock.kernels.registry import get_kernels
from interlock.moe.a2a.checked import buffer_shape
from interlock.moe.a2a.contract import ContractError, DispatcherSpec
from interlock.moe.a2a.rows import MaskedRows
from interlock.moe.a2a.symmetric import BACKEND
from interlock.moe.a2a.symmetric.dispatcher import Symmetric
from interlock.moe.conformance.backend_suite import RankFindings, run_backend_suite
from interlock.moe.placement import place
from interlock.moe.terms import Layout, Phase
from interlock.parallel.topology import Groups
from interlock.plan.rehearsal import ENVIRONMENT

EXPERTS, TOP_K, WIDTH, TOKENS = 16, 4, 256, 16


def spec_for(groups: Groups, timeout: float = 60.0) -> DispatcherSpec:
    """Ranks of one GPU. ``timeout`` seconds are the device's."""
    os.environ.update(ENVIRONMENT)
    return DispatcherSpec(
        groups=groups,
        experts=place(EXPERTS, groups.ep.size),
        rank=groups.ep.rank,
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden_size=WIDTH,
        row_dtype="bfloat16",
        dtype=torch.bfloat16,
        device=torch.device("cuda", 0),
        layouts={Phase.PREFILL: Layout.CONTIGUOUS, Phase.DECODE: Layout.MASKED},
        capacity={Phase.PREFILL: 24, Phase.DECODE: TOKENS},
        kernels=get_kernels("torch", threads=1),
        alignment=8,
        timeout=timeout,
        ranks_per_gpu=groups.ep.size,
    )


def conformance(groups: Groups, cases: int, seed: int) -> RankFindings:
    os.environ.update(ENVIRONMENT)
    ranks = groups.ep.size
    return run_backend_suite(BACKEND, groups, device="cuda", cases=cases, seed=seed, ranks_per_gpu=ranks)


def bytes_allocated(groups: Groups) -> tuple[int, int]:
    """(of the receipt, of the plan's formula)."""
    dispatcher = Symmetric(spec_for(groups))
    found = dispatcher.observed().buffer_bytes
    dispatcher.close()
    return found, BACKEND.buffer_bytes(buffer_shape(dispatcher.spec))


def late_rank(groups: Groups, seconds: float) -> str:
    """Rank 1 does not dispatch in time; what the others are told, and how long it took them."""
    dispatcher = Symmetric(spec_for(groups, timeout=seconds))
    hidden = torch.zeros(3, WIDTH, dtype=torch.bfloat16, device="cuda")
    ids = torch.tensor([[0, 4, 8, 12]] * 3, device="cuda")
    weights = torch.ones(3, TOP_K, device="cuda")
    dispatched = dispatcher.dispatch(hidden, ids, weights, Phase.DECODE)
    dispatcher.combine(torch.zeros_like(dispatched.rows.rows), dispatched.handle)
    torch.cuda.synchronize()
    groups.ep.barrier()
    if groups.ep.rank == 1:
        time.sleep(3 * seconds)
        return "late"
    try:
        dispatcher.dispatch(hidden, ids, weights, Phase.PREFILL)
    except EngineDeadError as error:
        return str(error)
    return "no error"


def contiguous_capture(groups: Groups) -> str:
    """What a capture of the layout that the host must wait for is told."""
    dispatcher = Symmetric(spec_for(groups))
    graph = torch.cuda.CUDAGraph()
    hidden = torch.zeros(1, WIDTH, dtype=torch.bfloat16, device="cuda")
    ids = torch.full((1, TOP_K), -1, device="cuda")
    try:
        with torch.cuda.graph(graph):
            dispatcher.dispatch(hidden, ids, torch.zeros(1, TOP_K, device="cuda"), Phase.PREFILL)
    except ContractError as error:
        return str(error)
    return "no error"


def graph_replays(groups: Groups, replays: int) -> tuple[int, list[int]]:
    """Replay captured decode steps; the numbers of those that differ from eager ones.

    Every rank chooses the smallest of its graphs that holds its own tokens, so that ranks replay graphs of
    different sizes in one step; a rank without tokens runs it eagerly. Results of even sizes lie where
    they are read from, others are copied there.
    """
    dispatcher = Symmetric(spec_for(groups))
    pick, shared = random.Random(groups.ep.rank), random.Random(0)
    hidden = torch.zeros(TOKENS, WIDTH, dtype=torch.bfloat16, device="cuda")
    ids = torch.full((TOKENS, TOP_K), -1, device="cuda")
    weights = torch.zeros(TOKENS, TOP_K, device="cuda")

    def step(size: int) -> torch.Tensor:
        dispatched = dispatcher.dispatch(hidden[:size], ids[:size], weights[:size], Phase.DECODE)
        rows = dispatched.rows
        assert isinstance(rows, MaskedRows)
        assert rows.weights is not None
        results = (rows.rows.float() * rows.weights.unsqueeze(-1) * 1.5).to(torch.bfloat16)
        if size % 2 == 0:
            assert rows.results is not None
            results = rows.results.copy_(results)
        return dispatcher.combine(results, dispatched.handle)

    def fill(case: tuple[torch.Tensor, ...]) -> None:
        for value, target in zip(case, (hidden, ids, weights), strict=True):
            target.copy_(value)

    counts, cases, wanted = [], [], []
    for _ in range(24):
        idle = shared.randrange(groups.ep.size) == groups.ep.rank
        tokens = 0 if idle else pick.randint(1, TOKENS)
        routes = torch.rand(TOKENS, EXPERTS).argsort(1)[:, :TOP_K].sort(1).values
        routes[tokens:] = -1
        counts.append(tokens)
        cases.append((torch.randn(TOKENS, WIDTH).bfloat16(), routes, torch.rand(TOKENS, TOP_K)))
        fill(cases[-1])
        wanted.append(step(tokens).clone())
    graphs = {}
    for size in (4, 9, TOKENS):
        step(size)
    torch.cuda.synchronize()
    groups.ep.barrier()
    for size in (4, 9, TOKENS):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step(size)
        graphs[size] = (graph, out)
    groups.ep.barrier()
    wrong = []
    for number in range(replays):
        which = shared.randrange(len(cases))
        tokens = counts[which]
        fill(cases[which])
        if tokens:
            graph, out = graphs[min(size for size in graphs if size >= tokens)]
            graph.replay()
        else:
            out = step(0)
        if not torch.equal(out[:tokens].view(torch.int16), wanted[which].view(torch.int16)):
            wrong.append(number)
    dispatcher.check()
    dispatcher.close()
    return replays, wrong


def layers_in_a_row(groups: Groups, steps: int) -> int:
    """Ten layers of experts that multiply by 2, -1 and 0.5 in turn, without a wait; tokens that are wrong.

    Layers alternate between the layouts, which share the buffers.
    """
    dispatcher = Symmetric(spec_for(groups))
    generator = torch.Generator("cuda").manual_seed(groups.ep.rank)
    weights = torch.zeros(TOKENS, TOP_K, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for step in range(steps):
        x = torch.randint(-8, 9, (TOKENS, WIDTH), generator=generator, device="cuda").bfloat16()
        ids = torch.full((TOKENS, TOP_K), -1, device="cuda")
        hidden = x
        for layer in range(10):
            ids[:, layer % TOP_K] = torch.randint(0, EXPERTS, (TOKENS,), generator=generator, device="cuda")
            ids[:, (layer - 1) % TOP_K] = -1
            phase = Phase.PREFILL if (step + layer) % 5 == 0 else Phase.DECODE
            dispatched = dispatcher.dispatch(hidden, ids, weights, phase)
            hidden = dispatcher.combine(dispatched.rows.rows * (2.0, -1.0, 0.5)[layer % 3], dispatched.handle)
        wrong += (hidden != -2 * x).any(dim=1).sum()
    dispatcher.check()
    dispatcher.close()
    return int(wrong)
