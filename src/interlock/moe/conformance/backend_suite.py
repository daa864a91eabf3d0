"""What one rank does in the suite of an a2a backend: settings, cases, and misuse in between.

Every rank makes the same cases, takes its own part, and checks what it received and what came home against
the loop oracle. All ranks must call ``run_backend_suite`` with equal arguments.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from interlock.kernels.registry import get_kernels
from interlock.moe.a2a.backend import A2ABackend
from interlock.moe.a2a.contract import ContractError, Dispatcher, DispatcherSpec
from interlock.moe.conformance.cases import Case, Setting, make_case, settings
from interlock.moe.conformance.oracle import DTYPES, combined
from interlock.moe.conformance.received import Mismatch, check_received, computed
from interlock.moe.placement import place
from interlock.moe.terms import Layout
from interlock.parallel.topology import Groups
from interlock.plugins import load_symbol

CASES_OF_A_SETTING = 12
SETTINGS = 16
"""Combinations of layouts and dtypes that even a run of few cases walks over, where a backend has as many."""
MAX_FAILURES = 10


@dataclass(slots=True)
class RankFindings:
    """What one rank found."""

    cases: int = 0
    checks: int = 0
    failures: list[str] = field(default_factory=list)
    coverage: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


def run_backend_suite(
    backend: A2ABackend, groups: Groups, *, device: str, cases: int, seed: int, ranks_per_gpu: int = 1
) -> RankFindings:
    """Run ``cases`` random cases as rank ``groups.ep.rank`` of ``groups.ep.size``."""
    found = RankFindings()
    started = time.monotonic()
    walk = settings(backend, groups.ep.size, seed)
    each = CASES_OF_A_SETTING
    if not backend.compiles_sizes:
        each = min(each, max(2, cases // SETTINGS))
    while found.cases < cases and len(found.failures) < MAX_FAILURES:
        count = min(each, cases - found.cases)
        _run_setting(backend, next(walk), groups, device, ranks_per_gpu, count, seed, found)
    found.seconds = time.monotonic() - started
    return found


def _run_setting(
    backend: A2ABackend,
    setting: Setting,
    groups: Groups,
    device: str,
    ranks_per_gpu: int,
    cases: int,
    seed: int,
    found: RankFindings,
) -> None:
    rank = groups.ep.rank
    dispatcher: Dispatcher = load_symbol(backend.dispatcher)(_spec(setting, groups, device, ranks_per_gpu))
    try:
        for number in range(cases):
            case = make_case(setting, number, seed)
            label = f"[{case.label}, seed {seed}]"
            found.cases += 1
            found.coverage.update(_properties(case, setting))
            try:
                _run_case(backend, dispatcher, case, setting, rank, device, found)
            except Mismatch as mismatch:
                found.failures.append(f"rank {rank}: {mismatch} {label}")
            try:
                if number == 0:
                    _run_misuse(dispatcher, case, setting, rank, device, found)
            except Mismatch as mismatch:
                # The dispatcher did what it should have refused: its state means nothing any more.
                found.failures.append(f"rank {rank}: {mismatch} {label}")
                return
        _check_receipt(backend, dispatcher, setting, found)
    finally:
        dispatcher.close()


def _spec(setting: Setting, groups: Groups, device: str, ranks_per_gpu: int) -> DispatcherSpec:
    return DispatcherSpec(
        groups=groups,
        experts=place(setting.num_experts, setting.ranks),
        rank=groups.ep.rank,
        num_experts=setting.num_experts,
        top_k=setting.top_k,
        hidden_size=setting.hidden_size,
        row_dtype=setting.row_dtype,
        dtype=DTYPES[setting.dtype],
        device=torch.device(device),
        layouts=dict(setting.layouts),
        capacity=dict(setting.capacity),
        kernels=get_kernels("torch", threads=1),
        alignment=setting.alignment,
        deterministic=setting.deterministic,
        timeout=30.0 if device == "cpu" else 120.0,
        ranks_per_gpu=ranks_per_gpu,
        validate=setting.validate,
    )


def _inputs(
    case: Case, rank: int, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    scales = case.scales[rank]
    return (
        case.hidden[rank].to(device),
        case.ids[rank].to(device),
        case.weights[rank].to(device),
        None if scales is None else scales.to(device),
    )


def _run_case(
    backend: A2ABackend,
    dispatcher: Dispatcher,
    case: Case,
    setting: Setting,
    rank: int,
    device: str,
    found: RankFindings,
) -> None:
    """A mismatch on this rank must not keep it from the collective calls of the case."""
    hidden, ids, weights, scales = _inputs(case, rank, device)
    dispatched = dispatcher.dispatch(hidden, ids, weights, case.phase, scales=scales)
    layout = dict(setting.layouts)[case.phase]
    problem: Mismatch | None = None
    if dispatched.rows.layout is not layout:
        problem = Mismatch(f"rows came {dispatched.rows.layout}, {layout} was asked for")
    try:
        check_received(dispatched.rows, case, setting, rank, ordered=backend.ordered_rows)
        results = computed(dispatched.rows, setting, rank)
    except Mismatch as mismatch:
        problem = problem or mismatch
        results = _blank_results(dispatched.rows, setting)
    out = dispatcher.combine(results, dispatched.handle)
    found.checks += 2
    if problem is not None:
        raise problem
    wanted = combined(case, setting, rank)
    if out.shape != wanted.shape or out.dtype != wanted.dtype:
        raise Mismatch(
            f"combined {tuple(out.shape)} {out.dtype}, should be {tuple(wanted.shape)} {wanted.dtype}"
        )
    wrong = (out.cpu() != wanted).any(dim=1).nonzero().flatten().tolist()
    if wrong:
        raise Mismatch(f"combined tokens {wrong} are wrong")


def _blank_results(rows: object, setting: Setting) -> torch.Tensor:
    tensor: torch.Tensor = rows.rows  # type: ignore[attr-defined]
    lead = getattr(rows, "ids", tensor[..., 0]).shape
    return torch.zeros(*lead, setting.hidden_size, dtype=DTYPES[setting.dtype], device=tensor.device)


def _run_misuse(
    dispatcher: Dispatcher, case: Case, setting: Setting, rank: int, device: str, found: RankFindings
) -> None:
    """All ranks misuse the dispatcher in the same ways; each must be refused before anything is sent."""
    hidden, ids, weights, scales = _inputs(case, rank, device)
    capacity = dict(setting.capacity)[case.phase]

    def refused(what: str, call: Callable[[], object]) -> None:
        found.checks += 1
        found.coverage[f"misuse: {what}"] += 1
        try:
            call()
        except ContractError:
            return
        raise Mismatch(f"misuse was not refused with a ContractError: {what}")

    too_many = torch.zeros(capacity + 1, setting.hidden_size, device=device).to(hidden.dtype)
    lanes = torch.full((capacity + 1, setting.top_k), -1, device=device)
    many_scales = None if scales is None else torch.ones(capacity + 1, scales.shape[1], device=device)
    refused(
        "n > T",
        lambda: dispatcher.dispatch(too_many, lanes, lanes.float(), case.phase, scales=many_scales),
    )
    refused("int32 ids", lambda: dispatcher.dispatch(hidden, ids.int(), weights, case.phase, scales=scales))
    refused(
        "narrow rows",
        lambda: dispatcher.dispatch(hidden[:, :-1], ids, weights, case.phase, scales=scales),
    )
    dispatched = dispatcher.dispatch(hidden, ids, weights, case.phase, scales=scales)
    results = _blank_results(dispatched.rows, setting)
    refused(
        "dispatch before combine",
        lambda: dispatcher.dispatch(hidden, ids, weights, case.phase, scales=scales),
    )
    dispatcher.combine(results, dispatched.handle)
    refused("combine twice", lambda: dispatcher.combine(results, dispatched.handle))
    abandoned = dispatcher.dispatch(hidden, ids, weights, case.phase, scales=scales)
    dispatcher.release(abandoned.handle)
    refused("combine after release", lambda: dispatcher.combine(results, abandoned.handle))


def _check_receipt(
    backend: A2ABackend, dispatcher: Dispatcher, setting: Setting, found: RankFindings
) -> None:
    receipt = dispatcher.observed()
    found.checks += 1
    expected = {"name": backend.name, "ranks": setting.ranks, "dispatcher": backend.dispatcher}
    for field_name, value in expected.items():
        if getattr(receipt, field_name) != value:
            found.failures.append(
                f"receipt: {field_name} is {getattr(receipt, field_name)!r}, should be {value!r} [{setting}]"
            )
    if receipt.combines == 0 or receipt.dispatches < receipt.combines:
        found.failures.append(
            f"receipt: {receipt.dispatches} dispatches, {receipt.combines} combines [{setting}]"
        )


def _properties(case: Case, setting: Setting) -> list[str]:
    tokens, capacity = case.tokens, dict(setting.capacity)[case.phase]
    layout: Layout = dict(setting.layouts)[case.phase]
    names = [layout.value, setting.row_dtype, case.pattern, case.phase.value]
    if setting.num_experts % setting.ranks:
        names.append("uneven experts")
    for name, holds in (
        ("n = 0 on a rank", 0 in tokens),
        ("n = 1 on a rank", 1 in tokens),
        ("n = T - 1 on a rank", capacity - 1 in tokens),
        ("n = T on a rank", capacity in tokens),
        ("all ranks idle", not any(tokens)),
        ("n differs between ranks", len(set(tokens)) > 1),
    ):
        if holds:
            names.append(name)
    return names
