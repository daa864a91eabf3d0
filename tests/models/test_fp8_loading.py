"""A model whose linears keep fp8 blocks: the right ones in every linear, receipts, the numbers they give."""

from __future__ import annotations

import msgspec
import pytest
import torch

from interlock.checkpoint.dummy import POOL_SIZE, DummyWeights, tile_into
from interlock.kernels.fp8_blocks import Fp8Blocks
from interlock.models.card_reader import find_family
from interlock.models.decoder_weights import decoder_specs
from interlock.plan.card import ModelCard
from tests.harness import build_model, run_chunks
from tests.models import real_width
from tests.models.prompts import PROMPT
from tests.models.test_dummy_weights import card
from tests.tiny import flash, tiny_folder, v25

FP8 = "fp8_block"
KEPT = {"attention_weight_format": FP8, "mlp_weight_format": FP8}
SPEC = flash(fp8=True, layers=3, intermediate_size=384, moe_intermediate_size=128)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


def test_logits_differ_by_the_rounding_of_activations_only() -> None:
    folder = tiny_folder(SPEC)
    plain, kept = (run_chunks(build_model(folder, **held), PROMPT) for held in ({}, KEPT))
    assert 1e-4 < relative(kept, plain) < 0.1


def test_chunks_of_a_fused_tensor_are_kept() -> None:
    """MiMo-V2.5: k and v of a chunk share a block, whose covers are packed."""
    folder = tiny_folder(v25(layers=3))
    harness = build_model(folder, attention_weight_format=FP8)
    assert harness.model.observed()["attention_weight_format"] == FP8
    assert 1e-4 < relative(run_chunks(harness, PROMPT), run_chunks(build_model(folder), PROMPT)) < 0.1


def test_receipts_name_what_the_linears_hold() -> None:
    held = build_model(tiny_folder(SPEC), **KEPT).model.observed()
    assert (held["attention_weight_format"], held["mlp_weight_format"]) == (FP8, FP8)
    assert held["num_hidden_layers"] == 3
    plain = build_model(tiny_folder(SPEC)).model.observed()
    assert (plain["attention_weight_format"], plain["mlp_weight_format"]) == ("float32", "float32")


@pytest.mark.parametrize("chunks", [None, 5])
def test_all_of_a_model_in_fp8(chunks: int | None) -> None:
    """Experts too: the emulation of what a GPU computes, which is near the dequantised model."""
    folder = tiny_folder(SPEC)
    whole = {**KEPT, "expert_weight_format": FP8, "moe_runner_backend": "torch_fp8"}
    harness = build_model(folder, **whole)
    assert {layer.weight_format for layer in harness.model.context.moe.layers} == {FP8}
    got, plain = run_chunks(harness, PROMPT, chunks), run_chunks(build_model(folder), PROMPT)
    rows = (got - plain).norm(dim=1) / plain.norm(dim=1)
    assert 1e-3 < float(rows.median()) < 0.1


def test_a_format_that_did_not_take_effect_is_seen() -> None:
    """The plan says blocks, the checkpoint has none: the receipt is the dtype."""
    folder = tiny_folder(SPEC.replace(fp8=False))

    def claims_fp8(found: ModelCard) -> ModelCard:
        return msgspec.structs.replace(found, weight_format=FP8, fp8_except=("o_proj",))

    held = build_model(folder, edit_card=claims_fp8, **KEPT).model.observed()
    assert (held["attention_weight_format"], held["mlp_weight_format"]) == ("float32", "float32")


def test_float_checkpoints_are_quantised_while_loading() -> None:
    folder = tiny_folder(SPEC.replace(fp8=False))
    plain, quantised = (build_model(folder, **held) for held in ({}, KEPT))
    held = quantised.model.observed()
    assert (held["attention_weight_format"], held["mlp_weight_format"]) == (FP8, FP8)
    assert 1e-3 < relative(run_chunks(quantised, PROMPT), run_chunks(plain, PROMPT)) < 0.3


def test_experts_of_a_layer_are_filled_as_they_are_read() -> None:
    """One fill of the packed tensors and one read for each expert give the same bytes."""
    found = card(SPEC)
    source = DummyWeights(found, seed=3)
    source.validate(list(decoder_specs(found)), ())
    prefix, width, hidden, experts = "model.layers.1.mlp.", 128, found.hidden_size, 3
    first = 2
    gate_up = torch.empty(experts, 2 * width, hidden, dtype=torch.float8_e4m3fn)
    down = torch.empty(experts, hidden, width, dtype=torch.float8_e4m3fn)
    scales = torch.empty(experts, 2, hidden // 128), torch.empty(experts, hidden // 128, 1)
    plain = torch.empty(experts, 2 * width, hidden)
    fill = source.expert_fill(prefix, first)
    fill.gate_up(gate_up, scales[0])
    fill.gate_up(plain, None)
    fill.down(down, scales[1])
    for expert in range(experts):
        names = [f"{prefix}experts.{first + expert}.{kind}_proj.weight" for kind in ("gate", "up", "down")]
        filled = (
            Fp8Blocks(gate_up[expert, :width], scales[0][expert, :1]),
            Fp8Blocks(gate_up[expert, width:], scales[0][expert, 1:]),
            Fp8Blocks(down[expert], scales[1][expert]),
        )
        for name, blocks in zip(names, filled, strict=True):
            assert source.is_fp8(name)
            assert torch.equal(blocks.dequantised(torch.float32), source.read(name))
            assert torch.equal(source.read_fp8(name).dequantised(torch.float32), source.read(name))
        assert torch.equal(plain[expert, :width], source.read(names[0]))


@pytest.mark.parametrize("size", [1, 17, POOL_SIZE, 2 * POOL_SIZE + 5])
@pytest.mark.parametrize("first", [0, POOL_SIZE - 3, 5 * POOL_SIZE + 7])
def test_the_pool_is_tiled_from_any_place(size: int, first: int) -> None:
    out = torch.empty(size, dtype=torch.int32)
    tile_into(out, torch.arange(POOL_SIZE, dtype=torch.int32), first)
    assert torch.equal(out, (torch.arange(size) + first).remainder(POOL_SIZE).int())


def test_the_carried_reference_is_of_this_model() -> None:
    """tests/models/real_width.npz, which the GPU suite compares with: sizes, spread, no constant rows."""
    found = find_family(real_width.config()).read_card(real_width.config())
    rows = real_width.reference()
    assert rows.shape == (len(real_width.TOKENS), found.vocab_size)
    assert bool(rows.isfinite().all())
    assert 0.5 < float(rows.std()) < 2
    assert len({int(row.argmax()) for row in rows}) > len(rows) // 2
    assert (found.weight_format, found.hidden_size, found.experts.intermediate_size) == (FP8, 4096, 2048)
