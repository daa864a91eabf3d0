"""What ``bench a2a`` measures, counts and refuses."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interlock.bench.a2a import A2APoint, A2ARun, arms_for, choose_gpus, run_a2a, shape_of
from interlock.bench.a2a_ranks import A2AShape, Traffic
from interlock.bench.copy_speed import CopySpeed, measure_copies
from interlock.bench.parts_record import a2a_evidence
from interlock.bench.statistics import Figure
from interlock.errors import Refusal
from interlock.evidence.record import said_rehearsals
from interlock.moe.conformance.processes import Gpus
from interlock.moe.placement import place
from interlock.plan.nccl import NcclLibrary
from tests.plan.machines import gpu_machine, machine

SMALL = A2AShape(hidden=16, experts=4, top_k=2)


def a_run(**changes: object) -> A2ARun:
    fields = {"shape": SMALL, "ranks": 2, "tokens": (1, 3), "rounds": 2}
    return A2ARun(**{**fields, **changes})  # type: ignore[arg-type]


def test_parts_over_two_real_ranks() -> None:
    """Every part of every arm has one time a round, of the slowest rank, and rows that went somewhere."""
    run = a_run()
    arms = arms_for(run, ["collective"], machine())
    assert {(arm.layout, arm.phase) for arm in arms} == {("contiguous", "prefill"), ("masked", "decode")}
    points = run_a2a(arms, run)
    assert len(points) == 2 * 2 * 3
    assert {point.part for point in points} == {"both", "dispatch", "combine"}
    for point in points:
        assert len(point.figure.samples) == 2
        assert point.figure.least > 0
        assert point.traffic.logical("dispatch") == point.tokens * 2 * 16 * 4
        assert point.traffic.link("both") <= point.traffic.logical("both")
        assert 0 < point.share_of_copy < 10
        assert point.share_of_link is None


@given(tokens=st.integers(0, 20), ranks=st.integers(1, 5), top_k=st.integers(1, 4), seed=st.integers(0, 999))
def test_bytes_are_those_of_a_plain_loop(tokens: int, ranks: int, top_k: int, seed: int) -> None:
    shape = A2AShape(hidden=256, experts=9, top_k=top_k, dtype="fp8")
    assert (shape.row_bytes, shape.result_bytes) == (256 + 8, 512)
    held, generator = place(9, ranks), torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, 9, generator=generator).argsort(dim=1)[:, :top_k].sort(dim=1).values
    owners = [[next(r for r in range(ranks) if int(e) in held[r]) for e in row] for row in ids]
    away = sum(len({owner for owner in row if owner != 0}) for row in owners)
    found = Traffic.of(ids, held, 0, shape)
    assert found == Traffic(tokens * top_k * 264, tokens * top_k * 512, away * 264, away * 512)
    assert found.logical("graph") == found.logical("both") == tokens * top_k * (264 + 512)


def test_what_cannot_run_says_why() -> None:
    with pytest.raises(Refusal, match="none exchanges no rows: every rank holds all tokens"):
        arms_for(a_run(), ["none"], machine())
    with pytest.raises(Refusal, match="shared_memory works with at most 64"):
        arms_for(a_run(ranks=65), ["shared_memory"], machine())
    gpus = a_run(gpus=Gpus(2), shape=SMALL)
    with pytest.raises(Refusal, match="shared_memory runs on cpu, not on cuda"):
        arms_for(gpus, ["shared_memory"], gpu_machine(1))
    assert "collective" in {arm.backend for arm in arms_for(gpus, [], gpu_machine(1))}


def test_gpus_are_shared_only_when_asked_to() -> None:
    assert choose_gpus(None, 4, 1, machine()) is None
    assert choose_gpus("cpu", 4, 1, gpu_machine(1)) is None
    assert choose_gpus(None, 4, 1, gpu_machine(4)) == Gpus(1)
    assert choose_gpus("cuda", 4, 4, gpu_machine(1)) == Gpus(4)
    with pytest.raises(Refusal, match="cannot be spread 1 to a GPU over 1 GPUs") as refused:
        choose_gpus("cuda", 4, 1, gpu_machine(1))
    assert "--ranks-per-gpu 4" in refused.value.alternatives
    with pytest.raises(Refusal, match="on a CPU the ranks share the machine without"):
        choose_gpus(None, 4, 4, machine())
    old = (NcclLibrary(path="/n/libnccl.so.2", version="2.28.9", of_torch=True),)
    with pytest.raises(Refusal, match=r"NCCL 2\.30 or later"):
        choose_gpus("cuda", 4, 4, msgspec.structs.replace(gpu_machine(1), nccl=old))


def test_sizes_follow_the_device() -> None:
    none = {"hidden": None, "experts": None, "top_k": None, "dtype": None}
    assert shape_of("cpu", **none).dtype == "float32"
    assert shape_of("cuda", **none) == A2AShape(hidden=4096, experts=256, top_k=8, dtype="bfloat16")
    with pytest.raises(Refusal, match="more than 4 experts"):
        shape_of("cpu", hidden=8, experts=4, top_k=5, dtype=None)
    with pytest.raises(Refusal, match="none of float32, bfloat16, fp8"):
        shape_of("cpu", **{**none, "dtype": "int4"})


def test_evidence_of_ranks_that_share_says_so_and_counts_their_bytes_together() -> None:
    run = a_run(gpus=Gpus(2), shape=A2AShape(hidden=64, experts=4, top_k=2, dtype="bfloat16"))
    traffic = Traffic(1000.0, 1000.0, 250.0, 250.0)
    copies = CopySpeed(device=1e6, peer=None, how="copying")
    point = A2APoint("collective", "masked", 3, "both", Figure((0.01,)), traffic, copies, 2)
    assert point.logical_bandwidth == pytest.approx(2e5)
    assert point.link_bandwidth == pytest.approx(5e4)
    assert point.share_of_copy == pytest.approx(0.8)
    evidence = a2a_evidence([point], run, gpu_machine(1))
    assert said_rehearsals(evidence) == ("rehearsal: 2 ranks share a GPU; not a speed measurement",)
    assert evidence.device.count == 1
    assert evidence.measurements[0].conditions["share_of_copy"] == pytest.approx(0.8)


def test_a_copy_takes_time() -> None:
    found = measure_copies(torch.device("cpu"))
    assert 1e6 < found.device < 1e13
    assert found.peer is None
