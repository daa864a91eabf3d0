"""Stored fp8 blocks as a GPU keeps them: whole, sliced and out of a fused tensor; never a wrong scale."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from interlock.checkpoint.reader import Checkpoint
from interlock.errors import CheckpointError
from interlock.models.card_reader import read_model_card
from interlock.models.mimo_v2.weights import tensor_specs
from tests.tiny import flash, tiny_folder, v25


def opened(folder: Path) -> Checkpoint:
    card = read_model_card(folder)
    checkpoint = Checkpoint(folder, card)
    checkpoint.validate(list(tensor_specs(card)), ())
    return checkpoint


def test_blocks_are_those_of_the_file() -> None:
    with opened(tiny_folder(flash(fp8=True))) as checkpoint:
        for name in ("model.layers.0.mlp.down_proj.weight", "model.layers.1.self_attn.q_proj.weight"):
            assert checkpoint.is_fp8(name)
            assert torch.equal(checkpoint.read_fp8(name).dequantised(torch.float32), checkpoint.read(name))
        assert not checkpoint.is_fp8("model.layers.1.self_attn.o_proj.weight")
        assert not checkpoint.is_fp8("model.embed_tokens.weight")


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        ([range(128, 256)], None),
        ([range(256, 320)], None),
        (None, range(128, 256)),
        ([range(320)], range(128)),
    ],
)
def test_slices_on_block_boundaries(rows: list[range] | None, columns: range | None) -> None:
    name = "model.layers.0.mlp.gate_proj.weight"
    with opened(tiny_folder(flash(fp8=True))) as checkpoint:
        part = checkpoint.read_fp8(name, rows=rows, columns=columns)
        expected = checkpoint.read(name, rows=rows, columns=columns)
    assert torch.equal(part.dequantised(torch.float32), expected)


@pytest.mark.parametrize(("rows", "columns"), [([range(64, 192)], None), (None, range(64, 192))])
def test_slices_within_blocks_are_refused(rows: list[range] | None, columns: range | None) -> None:
    with (
        opened(tiny_folder(flash(fp8=True))) as checkpoint,
        pytest.raises(CheckpointError, match="do not fall on blocks of 128; --quantization none"),
    ):
        checkpoint.read_fp8("model.layers.0.mlp.gate_proj.weight", rows=rows, columns=columns)


def test_a_tensor_without_blocks_is_refused() -> None:
    with (
        opened(tiny_folder(flash(fp8=True))) as checkpoint,
        pytest.raises(CheckpointError, match="is not stored as fp8"),
    ):
        checkpoint.read_fp8("model.layers.1.self_attn.o_proj.weight")


def test_chunks_of_a_fused_tensor_are_read_where_blocks_allow_it() -> None:
    """Chunks of 4 x 192 + 192 + 128 rows: q is six whole blocks, k and v share one."""
    name = "model.layers.0.self_attn.qkv_proj.weight"
    with opened(tiny_folder(v25())) as checkpoint:
        assert checkpoint.report.qkv_layout == "chunked"
        chunk = 4 * 192 + 192 + 128
        q_rows = [range(first, first + 768) for first in (0, chunk)]
        part = checkpoint.read_fp8(name, rows=q_rows)
        assert torch.equal(part.dequantised(torch.float32), checkpoint.read(name, rows=q_rows))
        with pytest.raises(CheckpointError, match="do not fall on blocks"):
            checkpoint.read_fp8(name, rows=[range(768 + 192, chunk)])
