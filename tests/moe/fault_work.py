"""Faults that two ranks meet while they build or use an adapter; each returns what it was told."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch

from interlock.errors import InterlockError
from interlock.kernels.registry import get_kernels
from interlock.moe.a2a import ascend_fuseep
from interlock.moe.a2a.ascend_fuseep.dispatcher import AscendFuseEp
from interlock.moe.a2a.contract import ContractError, DispatcherSpec
from interlock.moe.a2a.rows import ContiguousRows
from interlock.moe.placement import place
from interlock.moe.terms import Layout, Phase
from interlock.parallel.topology import Groups
from tests.moe import elastic_double, legacy_double, npu_double
from tests.moe.deepep_work import ElasticOnCpu, MooncakeOnCpu

ASCEND_ON_CPU = replace(
    ascend_fuseep.BACKEND,
    devices=frozenset({"cpu"}),
    min_ranks=2,
    dispatcher="tests.moe.fault_work:AscendOnCpu",
)


class AscendOnCpu(AscendFuseEp):
    def __init__(self, spec: DispatcherSpec) -> None:
        super().__init__(spec, ASCEND_ON_CPU)

    def _group_name(self) -> str:
        npu_double.GROUPS["ep"] = self.spec.groups.ep.process_group  # type: ignore[attr-defined]
        return "ep"


def spec_of(groups: Groups, **changes: Any) -> DispatcherSpec:
    fields: dict[str, Any] = {
        "groups": groups,
        "experts": place(8, groups.ep.size),
        "rank": groups.ep.rank,
        "num_experts": 8,
        "top_k": 2,
        "hidden_size": 256,
        "row_dtype": "bfloat16",
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "layouts": {Phase.PREFILL: Layout.CONTIGUOUS, Phase.DECODE: Layout.MASKED},
        "capacity": {Phase.PREFILL: 8, Phase.DECODE: 4},
        "kernels": get_kernels("torch", threads=1),
        "mode": "direct",
    }
    return DispatcherSpec(**(fields | changes))


def told(build: Any, spec: DispatcherSpec) -> str:
    try:
        build(spec)
    except InterlockError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def elastic_build(groups: Groups, fault: str) -> str:
    """Build with one thing wrong."""
    sys.modules["deep_ep"] = library = elastic_double.module()
    kind = type("Faulty", (elastic_double.ElasticBuffer,), {})
    library.__dict__["ElasticBuffer"] = kind
    if fault == "gin":
        kind.gin = False  # type: ignore[attr-defined]
    elif fault == "no nvlink":
        kind.all_nvlink = False  # type: ignore[attr-defined]
    elif fault == "narrow ids":
        library.__dict__["topk_idx_t"] = torch.int32
    elif fault == "next generation":
        del library.__dict__["ElasticBuffer"]
        library.__dict__["EPBuffer"] = kind
    elif fault == "not importable":
        sys.modules["deep_ep"] = None  # type: ignore[assignment]
    elif fault == "nccl":

        def mismatch(self: object, *arguments: object, **named: object) -> None:
            raise RuntimeError(
                "Assertion error: Prior to NCCL 2.31, compile-time and runtime versions must be the same"
            )

        kind.__init__ = mismatch  # type: ignore[method-assign]
    return told(ElasticOnCpu, spec_of(groups, capacity={Phase.PREFILL: 4096, Phase.DECODE: 4}))


def elastic_calls(groups: Groups) -> tuple[list[Any], list[str]]:
    """What the library was asked for: the warm-up, an idle rank's prefill, decode; and errors on misuse."""
    sys.modules["deep_ep"] = elastic_double.module()
    dispatcher = ElasticOnCpu(spec_of(groups))
    (buffer,) = elastic_double.ElasticBuffer.alive
    buffer.calls.clear()
    idle = groups.ep.rank == 1
    n = 0 if idle else 3
    hidden = torch.ones(n, 256, dtype=torch.bfloat16)
    ids = torch.tensor([[0, 5]] * n, dtype=torch.int64).view(n, 2)
    for phase in Phase:
        dispatched = dispatcher.dispatch(hidden, ids, torch.ones(n, 2), phase)
        flat = dispatched.rows.rows
        out = dispatcher.combine(flat, dispatched.handle)
        assert out.shape == (n, 256)
        assert bool((out == 2.0).all())
    errors = []
    try:
        dispatcher.combine(flat, dispatched.handle)
    except ContractError as error:
        errors.append(str(error))

    def late(*arguments: object, **named: object) -> None:
        raise RuntimeError("Dispatch CPU wait: CPU side received count (scaleup: 0): -4 0 # -1 -1 -1 -1")

    buffer.dispatch = late
    try:
        dispatcher.dispatch(hidden, ids, torch.ones(n, 2), Phase.PREFILL)
    except InterlockError as error:
        errors.append(f"{type(error).__name__}: {error}")
    dispatcher.close()
    return buffer.calls, errors


def mooncake_silence(groups: Groups) -> str:
    sys.modules["mooncake.mooncake_ep_buffer"] = legacy_double.mooncake()
    legacy_double.MooncakeBuffer.silent = (1,)
    layouts = dict.fromkeys(Phase, Layout.MASKED)
    dispatcher = MooncakeOnCpu(spec_of(groups, layouts=layouts, mode="", timeout=2.0))
    try:
        dispatcher.dispatch(
            torch.ones(1, 256, dtype=torch.bfloat16), torch.tensor([[0, 5]]), torch.ones(1, 2), Phase.DECODE
        )
    except InterlockError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        legacy_double.MooncakeBuffer.silent = ()
    return ""


def ascend_exchange(groups: Groups) -> list[str]:
    """Rows of three tokens (one unused, one rank idle) there and back; what is refused."""
    sys.modules["torch_npu"] = npu_double.module()
    layouts = dict.fromkeys(Phase, Layout.CONTIGUOUS)
    dispatcher = AscendOnCpu(spec_of(groups, layouts=layouts, mode="", alignment=4))
    rank = groups.ep.rank
    problems = []
    for idle in (None, 1):
        n = 0 if rank == idle else 3
        hidden = (torch.arange(3)[:n].view(-1, 1) + 1.0 + 10 * rank).repeat(1, 256).to(torch.bfloat16)
        ids = torch.tensor([[0, 5], [-1, -1], [3, 4]])[:n]
        weights = torch.tensor([[0.5, 2.0], [torch.nan, torch.nan], [1.0, 0.25]])[:n]
        dispatched = dispatcher.dispatch(hidden, ids, weights, Phase.PREFILL)
        rows = dispatched.rows
        assert isinstance(rows, ContiguousRows)
        if rows.weights is not None or rows.rows.shape[0] % 4:
            problems.append("layout")
        results = torch.full_like(rows.rows, torch.nan)
        for expert, (end, count) in enumerate(zip(rows.psum.tolist(), rows.counts.tolist(), strict=True)):
            results[end - count : end] = rows.rows[end - count : end] * (1 + expert + 4 * rank)
        out = dispatcher.combine(results, dispatched.handle)
        wanted = [0.5 * 1 + 2.0 * 6, 0.0, 1.0 * 4 + 0.25 * 5]
        for token in range(n):
            if not bool((out[token] == float(hidden[token, 0]) * wanted[token]).all()):
                problems.append(f"token {token} is {float(out[token, 0])}")
    try:
        dispatcher.dispatch(
            torch.ones(1, 256, dtype=torch.bfloat16), torch.tensor([[0, -1]]), torch.ones(1, 2), Phase.DECODE
        )
    except ContractError as error:
        if "all k experts" not in str(error):
            problems.append(str(error))
    else:
        problems.append("half a token was sent")
    return problems
