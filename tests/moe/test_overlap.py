"""Two-batch overlap: the same bits as whole steps, whatever the tokens; planned, seen in receipts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from interlock.errors import Refusal
from interlock.kernels.availability import native_cpu_unavailable
from interlock.kernels.registry import get_kernels
from interlock.moe.a2a.contract import DispatcherSpec
from interlock.moe.conformance.processes import Gpus, run_ranks
from interlock.moe.overlap import half_specs
from interlock.moe.side_work import ThreadSide
from interlock.moe.terms import Layout, Phase
from interlock.options import Options
from interlock.parallel.topology import Groups
from interlock.plan.receipts import check
from interlock.plan.resolve import resolve
from tests.moe import overlap_work
from tests.plan.machines import dense_card, machine, tiny_card
from tests.plan.test_receipts import honest

NATIVE = pytest.mark.skipif(native_cpu_unavailable() is not None, reason=str(native_cpu_unavailable()))


@NATIVE
@pytest.mark.parametrize(("ranks", "attn_dp_size"), [(1, 1), (2, 1), (2, 2), (3, 3), (4, 2)])
def test_halves_give_the_bits_of_whole_steps(ranks: int, attn_dp_size: int) -> None:
    compared = run_ranks(overlap_work.same_bits_as_whole_steps, ranks, attn_dp_size=attn_dp_size)
    assert compared == [len(overlap_work.ARMS) * overlap_work.STEPS] * ranks


@NATIVE
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 16])
def test_idle_ranks_and_single_tokens(tokens: int) -> None:
    run_ranks(overlap_work.tokens_of_one_rank_only, 2, tokens)


@NATIVE
def test_the_second_dispatch_and_the_first_combine_run_beside_experts() -> None:
    assert run_ranks(overlap_work.experts_run_beside_the_exchange, 2)[0] == [
        "dispatch of the first: alone",
        "dispatch of the second: beside",
        "combine of the first: beside",
        "combine of the second: alone",
    ]


@NATIVE
@pytest.mark.parametrize("half", [0, 1])
def test_an_error_of_the_experts_is_told_and_releases_both_halves(half: int) -> None:
    told = run_ranks(overlap_work.experts_that_fail_leave_nothing_pending, 2, half)
    assert told == [f"half {half}"] * 2


def test_work_on_a_thread_keeps_the_callers_mode_and_errors() -> None:
    side = ThreadSide()
    with torch.inference_mode():
        assert side.start(torch.is_inference_mode_enabled).result()
    assert not side.start(torch.is_inference_mode_enabled).result()
    failing = side.start(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failing.result()
    assert side.start(lambda: 1 // 0).abandon() is None
    assert side.start(lambda: 7).abandon() == 7
    side.close()


def options(**changes: object) -> Options:
    fields = {"model": "m", "tp_size": 2, "moe_a2a_backend": "collective", "moe_overlap": "on"}
    return Options.of(**{**fields, **changes})


def test_it_is_off_unless_asked_for() -> None:
    plan = resolve(options(moe_overlap="auto"), tiny_card(), machine())
    assert plan.moe_overlap is False
    assert "no recorded run shows that it wins" in plan.provenance["moe_overlap"].reason
    assert resolve(options(moe_overlap="off"), tiny_card(), machine()).moe_overlap is False


@pytest.mark.parametrize("backend", ["collective", "shared_memory"])
def test_two_halves_hold_about_the_buffers_of_one_step(backend: str) -> None:
    plan = resolve(options(moe_a2a_backend=backend), tiny_card(), machine())
    whole = resolve(options(moe_a2a_backend=backend, moe_overlap="off"), tiny_card(), machine())
    assert plan.moe_overlap is True
    assert plan.moe_prefill_capacity == whole.moe_prefill_capacity
    assert 0.9 * whole.moe_buffer_bytes < plan.moe_buffer_bytes < 1.1 * whole.moe_buffer_bytes
    assert check(plan, honest(plan)) == []


def test_a_layer_that_does_not_overlap_is_a_mismatch() -> None:
    plan = resolve(options(), tiny_card(), machine())
    receipts = honest(plan)
    receipts[1]["moe_layers"][0]["overlapped"] = False
    (found,) = check(plan, receipts)
    assert (found.option, found.rank, found.layer) == ("--moe-overlap", 1, 1)


def test_what_cannot_overlap_is_refused() -> None:
    with pytest.raises(Refusal, match="none does not exchange beside other work") as refused:
        resolve(options(moe_a2a_backend="none"), tiny_card(), machine())
    assert "--moe-overlap off" in refused.value.alternatives
    with pytest.raises(Refusal, match="no experts, so the option would have no effect"):
        resolve(options(moe_a2a_backend="none"), dense_card(), machine())
    with pytest.raises(Refusal, match=r"one token on a rank \(--moe-decode-capacity 1\) has no halves"):
        resolve(options(max_running_requests=1), tiny_card(), machine())


def test_capacities_are_halved_without_loss() -> None:
    spec = DispatcherSpec(
        groups=Groups.single(), experts=(range(4),), rank=0, num_experts=4, top_k=2, hidden_size=8,
        row_dtype="float32", dtype=torch.float32, device=torch.device("cpu"),
        layouts=dict.fromkeys(Phase, Layout.MASKED), capacity={Phase.PREFILL: 7, Phase.DECODE: 2},
        kernels=get_kernels("torch", threads=1),
    )  # fmt: skip
    larger, smaller = half_specs(spec)
    assert (larger.capacity, smaller.capacity) == (
        {Phase.PREFILL: 4, Phase.DECODE: 1},
        {Phase.PREFILL: 3, Phase.DECODE: 1},
    )
    assert replace(larger, capacity=spec.capacity) == spec


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_halves_on_two_streams() -> None:
    compared = run_ranks(overlap_work.near_whole_steps_on_a_gpu, 2, gpus=Gpus.here(2), timeout=120)
    assert compared == [2 * overlap_work.STEPS] * 2
