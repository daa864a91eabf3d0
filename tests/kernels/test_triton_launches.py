"""Launch arguments of the persistent kernels: each goes to its parameter. Needs Triton, no GPU."""

from __future__ import annotations

import inspect
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from interlock.kernels.triton.expert_tensors import ExpertTensors, quantise_blocks
from interlock.kernels.triton.row_blocks import reference_lists
from tests.kernels.cases import paged_case
from tests.kernels.triton_cases import random_routes

pytest.importorskip("triton", reason="Triton is not installed: torch's CPU builds bring none")

from interlock.kernels.triton import (
    attention,
    pipelined,
    pipelined_gemm,
    placement_kernels,
)
from interlock.kernels.triton.attention_tiles import AttentionTile

HIDDEN, INTER, EXPERTS, PROGRAMS = 256, 128, 3, 132


class Recorder:
    """Stands in for a kernel: binds the launch to the kernel's parameters."""

    def __init__(self, kernel) -> None:
        self._signature = inspect.signature(kernel.fn)
        self.launches: list[tuple[tuple[int, ...], dict[str, object]]] = []

    def __getitem__(self, grid):
        def launch(*args, num_warps: int, launch_pdl: bool = False, **named) -> None:
            assert num_warps == 4
            bound = self._signature.bind(*args, **named)
            self.launches.append((grid, {**bound.arguments, "launch_pdl": launch_pdl}))

        return launch


@pytest.fixture
def multiplications(monkeypatch):
    recorder = Recorder(pipelined_gemm.pipelined_kernel)
    monkeypatch.setattr(pipelined_gemm, "pipelined_kernel", recorder)
    facts = SimpleNamespace(multi_processor_count=PROGRAMS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    return recorder.launches


def test_experts(monkeypatch, multiplications) -> None:
    swiglu = Recorder(placement_kernels.silu_quantise_rows_kernel)
    monkeypatch.setattr(placement_kernels, "silu_quantise_rows_kernel", swiglu)
    gate_up, gate_up_scales = quantise_blocks(torch.randn(EXPERTS, 2 * INTER, HIDDEN))
    down, down_scales = quantise_blocks(torch.randn(EXPERTS, HIDDEN, INTER))
    experts = ExpertTensors(gate_up, down, gate_up_scales, down_scales)
    lists = reference_lists(*random_routes(50, 2, EXPERTS, device="cpu"), EXPERTS, pipelined.BLOCK_ROWS)
    rows = torch.zeros(lists.places, HIDDEN, dtype=torch.float8_e4m3fn)
    row_scales = torch.zeros(HIDDEN // 128, lists.places)
    out = torch.zeros(100, HIDDEN, dtype=torch.bfloat16)
    pipelined.compute(rows, row_scales, experts, lists, out)
    (grid, first), (_, second) = multiplications
    [(_, between)] = swiglu.launches
    assert grid == (PROGRAMS,)
    assert first["rows"].base is rows
    assert first["rows"].block_shape == [64, 128]
    assert list(first["weight"].shape) == [EXPERTS * 2 * INTER, HIDDEN]
    assert first["weight_scales"] is gate_up_scales
    assert (first["depth"], first["width"], first["has_target"]) == (HIDDEN, 2 * INTER, False)
    assert bool((first["row_weights"] == 1).all())
    assert between["gate_up"] is first["out"]
    assert list(first["out"].shape) == [lists.places, 2 * INTER]
    assert between["live"] is lists.end
    assert int(lists.end) == lists.places
    assert (between["entry_rows"], between["scale_stride"], between["inter"]) == (lists.places,) * 2 + (
        INTER,
    )
    assert second["rows"].base is between["act"]
    assert second["row_scales"] is between["act_scales"]
    assert list(second["weight"].shape) == [EXPERTS * HIDDEN, INTER]
    assert second["weight_scales"] is down_scales
    for name, wanted in (("out", out), ("target", lists.target), ("row_weights", lists.weight)):
        assert second[name] is wanted
    assert (second["depth"], second["width"], second["has_target"]) == (INTER, HIDDEN, True)
    assert (first["out_stride"], second["out_stride"]) == (2 * INTER, HIDDEN)
    for launch in (first, second):
        assert launch["blocks"] is lists.blocks
        assert launch["block_count"] is lists.block_count
        assert launch["max_blocks"] == lists.max_blocks
        assert launch["row_scale_stride"] == lists.places
        assert int(launch["counter"][0]) == 0
    assert first["counter"].data_ptr() != second["counter"].data_ptr()


@pytest.mark.parametrize(
    ("hidden", "block_rows", "fp8", "wanted"),
    [(256, 128, True, True), (384, 128, True, False), (256, 64, True, False), (256, 128, False, False)],
)
def test_what_fits(hidden, block_rows, fp8, wanted) -> None:
    scales = torch.ones(1) if fp8 else None
    experts = ExpertTensors(torch.zeros(1, 256, hidden), torch.zeros(1, hidden, 128), scales, scales)
    lists = reference_lists(torch.zeros(1, 1, dtype=torch.int64), None, 1, block_rows)
    assert pipelined.fits(experts, replace(lists, source=None), quantised=True) == wanted
    assert not pipelined.fits(experts, lists, quantised=False)
    places = torch.zeros(1, 1, dtype=torch.int32)
    assert pipelined.fits(experts, replace(lists, place_of_lane=places), quantised=False) == wanted


@pytest.mark.parametrize("window", [None, 128])
def test_attention(monkeypatch, window) -> None:
    recorder = Recorder(attention.pipelined_attention_kernel)
    monkeypatch.setattr(attention, "pipelined_attention_kernel", recorder)
    facts = SimpleNamespace(multi_processor_count=PROGRAMS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    case = paged_case(
        [(20, 20), (1, 40)], nh=32, kvh=4, hd=192, vd=128, window=window, sinks=True, dtype=torch.bfloat16
    )  # fmt: skip
    tile = AttentionTile(128, 64, 4, 3, specialised=True)
    out = attention.paged_attention(case.q, tile=tile, **case.arguments())
    assert out.shape == (21, 32, 128)
    [(grid, given)] = recorder.launches
    assert grid == (12,)
    assert given["places"] == 21 // 16 + 2
    assert list(given["k_cache"].shape) == [case.k_cache.shape[0] * 16, 4 * 192]
    assert list(given["v_cache"].shape) == [case.v_cache.shape[0] * 16, 4 * 128]
    assert given["q"].base.data_ptr() == case.q.data_ptr()
    assert (list(given["q"].shape), given["q"].block_shape) == ([21, 32, 192], [8, 8, 64])
    assert list(given["q"].strides) == [32 * 192, 192, 1]
    assert given["slots"] == 1
    assert (given["total_tokens"], given["sequences"]) == (21, 2)
    assert (given["keys"], given["stages"]) == (64, 3)
    assert (given["window"], given["has_window"]) == (window or 0, window is not None)


@pytest.mark.parametrize(("keys", "stages", "slots"), [(64, 2, 2), (64, 3, 1), (128, 2, 1)])
def test_queries_of_two_tiles_where_they_fit(keys, stages, slots) -> None:
    tile = AttentionTile(128, keys, 4, stages, specialised=True)
    assert attention._query_slots(192, 128, tile) == slots


@pytest.mark.parametrize("change", ["float32", "value-width", "page", "group", "strides"])
def test_what_specialised_programs_do_not_compute(change) -> None:
    kv_heads = 3 if change == "group" else 4
    q = torch.zeros(5, 36 if change == "group" else 32, 192, dtype=torch.bfloat16)
    k = torch.zeros(3, 8 if change == "page" else 16, kv_heads, 192, dtype=torch.bfloat16)
    v = torch.zeros(*k.shape[:3], 64 if change == "value-width" else 128, dtype=torch.bfloat16)
    if change == "float32":
        q = q.float()
    if change == "strides":
        k = k.transpose(0, 1).contiguous().transpose(0, 1)
    assert not attention.fits_pipeline(q, k, v)
