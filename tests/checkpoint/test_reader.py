"""Values that a loader must arrive at, whole and in parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from interlock.checkpoint.fp8 import dequantise, scale_row_of
from interlock.checkpoint.fp8_names import scale_rows
from interlock.checkpoint.reader import Checkpoint
from interlock.demo.tiny import TinySpec, tiny_weights
from interlock.demo.tiny_weights import quantise_blocks
from interlock.errors import CheckpointError
from interlock.models.card_reader import read_model_card
from interlock.models.mimo_v2.weights import tensor_specs
from tests.tiny import flash, tiny_folder, v25


def opened(folder: Path, **options: str) -> Checkpoint:
    card = read_model_card(folder)
    checkpoint = Checkpoint(folder, card, **options)
    checkpoint.validate(list(tensor_specs(card)), ())
    return checkpoint


@pytest.mark.parametrize("spec", [flash(), v25(), flash(fp8=True), flash(dtype="bfloat16", shards=3)])
def test_every_tensor_has_the_value_that_was_written(spec: TinySpec) -> None:
    truth = tiny_weights(spec).reference
    with opened(tiny_folder(spec)) as checkpoint:
        for name, value in truth.items():
            if name in checkpoint:
                assert torch.equal(checkpoint.read(name), value), name


def test_partial_edge_blocks_are_exact() -> None:
    """D02, D03: blocks stay 128x128 where 192 or 576 rows end inside one; scales are ceil(rows / 128)."""
    weight = torch.randn(576, 320)
    quantised, scale, truth = quantise_blocks(weight)
    assert scale.shape == (5, 3) == (scale_rows(576, 128), scale_rows(320, 128))
    rows = scale_row_of(torch.arange(576), rows=576, block_rows=128, chunks=1)
    assert torch.equal(dequantise(quantised, scale[rows], 128), truth)


def test_scales_are_not_transposed() -> None:
    """D08: a non-square tensor with a different scale in each block."""
    weight = torch.ones(3, 512).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    values = dequantise(weight, scale.expand(3, 4), 128)
    assert values[0, ::128].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert torch.equal(values[0], values[2])


def test_an_all_zero_block_gives_exact_zeros() -> None:
    """D06: quantising zeros gives a positive scale and zeros, no NaN."""
    quantised, scale, _ = quantise_blocks(torch.zeros(130, 130))
    assert bool((scale > 0).all())
    rows = scale_row_of(torch.arange(130), rows=130, block_rows=128, chunks=1)
    assert torch.equal(dequantise(quantised, scale[rows], 128), torch.zeros(130, 130))


def test_values_above_the_range_are_clamped() -> None:
    """D12: the largest value of a block maps to 448, never to NaN."""
    quantised, _, plain = quantise_blocks(torch.tensor([[448.0, 464.0, 480.0, 1e4, -465.0]]))
    assert not bool(quantised.float().isnan().any())
    assert plain[0, 3] == pytest.approx(1e4)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_rows_and_columns_equal_the_slice_of_the_whole(data: st.DataObject) -> None:
    folder = tiny_folder(v25())
    names = (
        "model.layers.1.self_attn.qkv_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.2.mlp.experts.1.up_proj.weight",
        "lm_head.weight",
    )
    name = data.draw(st.sampled_from(names))
    with opened(folder) as checkpoint:
        whole = checkpoint.read(name)
        start, stop = sorted(data.draw(st.lists(st.integers(0, whole.shape[0]), min_size=2, max_size=2)))
        left, right = sorted(data.draw(st.lists(st.integers(0, whole.shape[1]), min_size=2, max_size=2)))
        runs = [range(start, stop), range(3)]
        part = checkpoint.read(name, rows=runs, columns=range(left, right))
        expected = torch.cat([whole[start:stop], whole[:3]])[:, left:right]
        assert torch.equal(part, expected)
        rounded = checkpoint.read(name, rows=runs, columns=range(left, right), dtype=torch.bfloat16)
        assert torch.equal(rounded, expected.to(torch.bfloat16))


def test_bands_do_not_change_values(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "model.layers.0.self_attn.qkv_proj.weight"
    with opened(tiny_folder(v25())) as checkpoint:
        whole = checkpoint.read(name)
        monkeypatch.setattr("interlock.checkpoint.reader.BAND_BYTES", 4 * 256 * 37)
        assert torch.equal(checkpoint.read(name), whole)


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path) -> None:
    """J07: the file was cut after its header was checked."""
    tensors = load_file(tiny_folder(flash()) / "model.safetensors")
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    (tmp_path / "config.json").write_bytes((tiny_folder(flash()) / "config.json").read_bytes())
    with opened(tmp_path) as checkpoint:
        raw = file.read_bytes()
        file.write_bytes(raw[: len(raw) // 2])
        last = max(tensors, key=lambda name: checkpoint.location(name).offset)
        with pytest.raises(CheckpointError, match="did it change"):
            checkpoint.read(last)
