"""Host side of the GPU kernels: sizes of the row lists, tuned table, weights. Needs no Triton and no GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.kernels.triton import attention_tiles
from interlock.kernels.triton.attention_tiles import AttentionTile
from interlock.kernels.triton.expert_tensors import ExpertTensors, pad_width, quantise_blocks
from interlock.kernels.triton.row_blocks import (
    max_row_blocks,
    max_slab_blocks,
    power_of_two,
    reference_lists,
    reference_quantise,
)
from interlock.kernels.triton.tuned import MoeConfig, MoeShape, Tile, load_table, nearest, parse_table
from tests.kernels.triton_cases import random_routes, reference_lanes, relative

LIGHT_MODULES = ("row_blocks", "tuned", "expert_tensors", "attention_tiles")


def test_light_modules_import_no_triton() -> None:
    names = ", ".join(f"interlock.kernels.triton.{name}" for name in LIGHT_MODULES)
    check = f"import sys; import {names}; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


@given(
    tokens=st.integers(1, 40),
    k=st.integers(1, 4),
    experts=st.integers(4, 12),
    block_rows=st.sampled_from([1, 3, 16]),
    unused=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_reference_lists_hold_every_live_lane_once(tokens, k, experts, block_rows, unused, seed) -> None:
    ids, weights = random_routes(tokens, k, experts, device="cpu", seed=seed, unused=unused)
    lists = reference_lists(ids, weights, experts, block_rows)
    live = (ids >= 0).flatten().nonzero()[:, 0].tolist()
    assert sorted(lists.target.tolist()) == live
    assert int(lists.block_count) <= max_row_blocks(tokens * k, experts, block_rows)
    covered = []
    for expert, first, end, leader, size in lists.blocks.T.tolist():
        assert lists.blocks[0, leader : leader + size].tolist() == [expert] * size
        assert 0 < end - first <= block_rows
        lanes = lists.target[first:end]
        assert bool((ids.flatten()[lanes] == expert).all())
        assert torch.equal(lists.source[first:end], lanes // k)
        assert torch.equal(lists.weight[first:end], weights.flatten()[lanes])
        assert lanes.tolist() == sorted(lanes.tolist())
        covered += lanes.tolist()
    assert sorted(covered) == live


@given(
    counts=st.lists(st.integers(0, 70), min_size=1, max_size=20), block_rows=st.sampled_from([16, 32, 128])
)
def test_upper_bounds_of_blocks_hold(counts, block_rows) -> None:
    needed = sum(-(-count // block_rows) for count in counts)
    assert needed <= max_row_blocks(sum(counts), len(counts), block_rows)
    assert needed <= max_slab_blocks(max(counts), len(counts), block_rows)


def test_power_of_two() -> None:
    assert [power_of_two(value) for value in (0, 1, 2, 3, 8, 9, 192, 256)] == [1, 1, 2, 4, 8, 16, 256, 256]


def test_every_tuned_entry_can_be_launched() -> None:
    """Tiles divide what they cut, and shared memory of the stages fits a Hopper block (227 KiB)."""
    table = load_table()
    assert {shape.weight_dtype for shape, _ in table} == {"fp8", "bfloat16"}
    for shape, by_rows in table:
        assert by_rows == tuple(sorted(by_rows))
        size = 1 if shape.weight_dtype == "fp8" else 2
        for _, config in by_rows:
            assert config.block_rows in (16, 32, 64, 128)
            if config.pipelined:
                assert shape.weight_dtype == "fp8"
                assert config.block_rows == 128
                assert shape.hidden_size % 256 == 0
                continue
            for tile, weight_tiles in ((config.gate_up, 2), (config.down, 1)):
                assert 128 % tile.block_n == 0
                assert size * tile.block_k == 128
                step = size * tile.block_k * (weight_tiles * tile.block_n + config.block_rows)
                assert step * tile.stages <= 227 * 1024
            if shape.weight_dtype == "fp8":
                assert config.gate_up.block_n == 128, "a tile must hold one group of the next quantisation"


TILE = Tile(128, 128, 4, 4)


def _entry(experts: int, hidden: int, kind: str, mark: int) -> dict[str, object]:
    shape = {"experts": experts, "hidden_size": hidden, "intermediate_size": 2048, "weight_dtype": kind}
    configs = {
        str(rows): MoeConfig(rows_mark, TILE, TILE) for rows, rows_mark in ((8, mark), (32768, mark + 1))
    }
    return {"shape": shape, "by_rows": {rows: config.to_json() for rows, config in configs.items()}}


TABLE = {
    "moe": [_entry(256, 4096, "fp8", 10), _entry(32, 7168, "fp8", 20), _entry(256, 4096, "bfloat16", 30)]
}


@pytest.mark.parametrize(
    ("shape", "rows", "mark"),
    [
        (MoeShape(256, 4096, 2048, "fp8"), 8, 10),
        (MoeShape(256, 4096, 2048, "fp8"), 1, 10),
        (MoeShape(256, 4096, 2048, "fp8"), 10**6, 11),
        (MoeShape(32, 4096, 2048, "fp8"), 4096, 11),
        (MoeShape(32, 4096, 2048, "fp8"), 2, 10),
        (MoeShape(24, 6144, 2048, "fp8"), 24, 20),
        (MoeShape(8, 7168, 2048, "bfloat16"), 1024, 31),
        (MoeShape(8, 7168, 2048, "bfloat16"), 0, 30),
    ],
)
def test_unknown_shapes_take_the_nearest_entry(shape, rows, mark) -> None:
    table = parse_table(json.loads(json.dumps(TABLE)))
    assert nearest(table, shape, rows).block_rows == mark


def test_a_dtype_without_an_entry_is_an_error() -> None:
    with pytest.raises(KeyError, match="int4"):
        nearest(parse_table(TABLE), MoeShape(8, 64, 64, "int4"), 8)


def test_config_survives_json() -> None:
    config = MoeConfig(64, TILE, Tile(64, 128, 8, 6), pipelined=True)
    assert MoeConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize("shape", [(128, 128), (200, 300), (3, 256, 130)])
def test_blocks_come_back_exactly_from_their_dequantised_weights(shape) -> None:
    values, scales = quantise_blocks(torch.randn(shape))
    spread = scales.repeat_interleave(128, -2).repeat_interleave(128, -1)[..., : shape[-2], : shape[-1]]
    again, same_scales = quantise_blocks(values.float() * spread)
    assert torch.equal(values.float(), again.float())
    torch.testing.assert_close(scales, same_scales, rtol=1e-6, atol=0)


def test_zeros_quantise_to_zeros() -> None:
    for values, scales in (quantise_blocks(torch.zeros(4, 256)), reference_quantise(torch.zeros(4, 256))):
        assert not values.float().any()
        assert bool((scales > 0).all())


def test_quantised_rows_are_within_half_a_step() -> None:
    x = torch.randn(50, 512) * 30
    values, scale = reference_quantise(x)
    back = values.float().unflatten(1, (-1, 128)) * scale.T[:, :, None]
    assert float(((back.flatten(1) - x).abs() / scale.T.repeat_interleave(128, 1)).max()) <= 16.0
    assert relative(back.flatten(1), x) < 0.04


def test_padding_the_width_changes_no_result() -> None:
    gate_up, down = torch.randn(2, 2 * 96, 128).bfloat16(), torch.randn(2, 128, 96).bfloat16()
    ids, weights = random_routes(10, 2, 2, device="cpu")
    x = torch.randn(10, 128)
    plain = reference_lanes(x, ids, weights, ExpertTensors(gate_up, down))
    wide_gate_up, wide_down = pad_width(gate_up, down)
    assert wide_gate_up.shape == (2, 256, 128)
    assert wide_down.shape == (2, 128, 128)
    assert relative(reference_lanes(x, ids, weights, ExpertTensors(wide_gate_up, wide_down)), plain) < 1e-12


def test_attention_takes_the_tile_of_the_nearest_load() -> None:
    few, many = AttentionTile(16, 64, 4, 2, 528), AttentionTile(16, 128, 8, 1)
    document = {"attention": [attention_tiles.entry("decode", True, {2048: many, 8: few})]}
    table = attention_tiles.parse_table(json.loads(json.dumps(document)))
    assert [table.nearest("decode", True, load) for load in (0, 8, 100, 200, 5000)] == [few] * 3 + [many] * 2
    assert table.nearest("decode", False, 8) == attention_tiles.PLAIN["decode"]
    assert table.nearest("prefill", True, 8192) == attention_tiles.PLAIN["prefill"]


def test_the_stored_attention_table_can_be_read() -> None:
    table = attention_tiles.load_table()
    for (phase, _), tiles in table.by_kind.items():
        assert phase in attention_tiles.PLAIN
        for load, tile in tiles:
            assert load > 0
            assert tile.keys_a_step in (32, 64, 128)
            assert not (tile.specialised and phase == "decode")


@given(programs=st.integers(0, 5000), max_keys=st.integers(1, 200_000))
def test_keys_are_split_within_bounds(programs, max_keys) -> None:
    tile = AttentionTile(16, 64, 4, 2, 528, 256)
    splits = tile.key_splits(programs, max_keys)
    assert 1 <= splits <= 64
    assert splits == 1 or (splits * programs <= 528 and (splits - 1) * 256 < max_keys)
    assert AttentionTile(16, 64, 4, 2).key_splits(programs, max_keys) == 1
