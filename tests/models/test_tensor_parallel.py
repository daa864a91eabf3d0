"""The model cut over ranks (threads here): the same log-probabilities, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from interlock.demo.tiny import TinySpec
from interlock.kernels.availability import native_cpu_unavailable
from tests.harness import build_model, run_chunks
from tests.models.prompts import PROMPT, TOLERANCE, distance
from tests.thread_groups import run_ranks
from tests.tiny import flash, tiny_folder, v25

CHUNKS = [16, 17, 1, 6]
# 6 query heads over 3 ranks; 320 and 160 wide MLPs and 512 tokens, which 3 does not divide
THREE = flash(num_heads=6, num_kv_heads=3, swa_num_kv_heads=6, head_dim=24, v_head_dim=16)


def run_world(spec: TinySpec, size: int, **plan: Any) -> list[torch.Tensor]:
    folder = tiny_folder(spec)
    topology = {name: plan.get(name, 1) for name in ("attn_dp_size", "ep_size")}
    return run_ranks(
        size,
        lambda groups: run_chunks(build_model(folder, groups=groups, tp_size=size, **plan), PROMPT, CHUNKS),
        **topology,
    )


@pytest.mark.parametrize(
    ("spec", "size"),
    [
        (v25(), 2),
        (v25(), 4),
        (v25(), 8),
        (v25(qkv="plain"), 4),
        (flash(fp8=True), 4),
        (flash(num_kv_heads=1, swa_num_kv_heads=2), 4),
        (THREE, 3),
        (TinySpec.qwen3_moe(), 2),
        (TinySpec.qwen3_moe(dense_layers=1, tie_word_embeddings=True), 4),
    ],
    ids=[
        "v25-2",
        "v25-4",
        "v25-8",
        "plain-4",
        "split-fp8-4",
        "few-kv-4",
        "uneven-3",
        "qwen-2",
        "qwen-tied-4",
    ],
)
def test_ranks_agree_with_one_process(spec: TinySpec, size: int) -> None:
    """E10, H01, D01: sinks, kv heads (replicated when ranks outnumber them) and blocks are cut right."""
    single = run_chunks(build_model(tiny_folder(spec)), PROMPT, CHUNKS)
    for rows in run_world(spec, size):
        assert distance(rows, single) <= TOLERANCE


@pytest.mark.parametrize("size", [2, 4])
def test_experts_spread_over_ranks_agree(size: int) -> None:
    single = run_chunks(build_model(tiny_folder(v25())), PROMPT, CHUNKS)
    for rows in run_world(v25(), size, ep_size=size):
        assert distance(rows, single) <= TOLERANCE


@pytest.mark.skipif(native_cpu_unavailable() is not None, reason=f"native: {native_cpu_unavailable()}")
@pytest.mark.parametrize(("spec", "size"), [(v25(), 2), (v25(), 4), (TinySpec.qwen3_moe(), 4)])
def test_deterministic_mode_has_the_same_bits_for_any_number_of_ranks(spec: TinySpec, size: int) -> None:
    """B21: row-parallel linears gather their input instead of adding partial sums."""
    plan = {"deterministic": True, "kernels": "cpu", "moe_runner_backend": "cpu"}
    single = run_chunks(build_model(tiny_folder(spec), **plan), PROMPT)
    for rows in run_world(spec, size, ep_size=size, **plan):
        assert torch.equal(rows, single)


@pytest.mark.parametrize("size", [2, 4])
def test_deterministic_mode_is_right(size: int) -> None:
    single = run_chunks(build_model(tiny_folder(v25())), PROMPT, CHUNKS)
    for rows in run_world(v25(), size, deterministic=True, ep_size=size):
        assert distance(rows, single) <= TOLERANCE


def test_deterministic_mode_is_right_where_sizes_do_not_divide() -> None:
    single = run_chunks(build_model(tiny_folder(THREE)), PROMPT, CHUNKS)
    for rows in run_world(THREE, 3, deterministic=True):
        assert distance(rows, single) <= TOLERANCE
