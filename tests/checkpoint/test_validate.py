"""What a checkpoint may hold: exactly what the model expects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from interlock.checkpoint.reader import Checkpoint
from interlock.checkpoint.validate import LoadReport
from interlock.errors import CheckpointError
from interlock.models.card_reader import read_model_card
from interlock.models.mimo_v2.weights import SKIPPED_PREFIXES, tensor_specs
from tests.checkpoint.files import Tensors, copy_with
from tests.tiny import flash, tiny_folder, v25

EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
NORM = "model.layers.2.input_layernorm.weight"


def check(folder: Path, **options: Any) -> LoadReport:
    card = read_model_card(folder)
    with Checkpoint(folder, card, **options) as checkpoint:
        return checkpoint.validate(list(tensor_specs(card)), SKIPPED_PREFIXES)


def refuse(tmp_path: Path, change: Callable[[Tensors], None], **options: Any) -> str:
    folder = copy_with(tiny_folder(v25()), tmp_path / "spoilt", change)
    with pytest.raises(CheckpointError) as caught:
        check(folder, **options)
    return str(caught.value)


def test_the_right_checkpoint_is_accepted() -> None:
    report = check(tiny_folder(v25()))
    assert report.qkv_layout == "chunked"
    assert report.quantised == 7 + 3 + 6 * 8 * 3
    assert report.skipped == {}
    assert check(tiny_folder(flash())).qkv_layout == "split"


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    """J05: one tensor of one expert is gone."""
    text = refuse(tmp_path, lambda t: (t.pop(EXPERT), t.pop(EXPERT + "_scale_inv")))
    assert f"1 problem with the checkpoint\n  tensor {EXPERT!r} is missing" in text


def test_a_missing_scale_is_named(tmp_path: Path) -> None:
    """D10: an fp8 weight without its scale would run and give noise."""
    text = refuse(tmp_path, lambda t: t.pop(EXPERT + "_scale_inv"))
    assert f"its scale '{EXPERT}_scale_inv' is missing" in text


def test_a_scale_by_another_name_is_named(tmp_path: Path) -> None:
    """D10: ``weight_scale`` is neither read as ``weight_scale_inv`` nor dropped."""

    def rename(tensors: Tensors) -> None:
        tensors[EXPERT + "_scale"] = tensors.pop(EXPERT + "_scale_inv")

    text = refuse(tmp_path, rename)
    assert f"'{EXPERT}_scale' is unexpected (block scales are read from '<weight>_scale_inv' only)" in text
    assert "2 problems" in text


def test_an_unknown_tensor_is_an_error(tmp_path: Path) -> None:
    """D10: nothing in the file stays unused unless it is skipped by name."""
    text = refuse(tmp_path, lambda t: t.update({"model.layers.1.mlp.shared_expert.weight": torch.ones(2)}))
    assert "'model.layers.1.mlp.shared_expert.weight' is unexpected" in text


def test_a_misspelt_tensor_is_matched_with_what_is_missing(tmp_path: Path) -> None:
    text = refuse(tmp_path, lambda t: t.update({NORM.replace("layernorm", "layer_norm"): t.pop(NORM)}))
    assert f"(missing is {NORM!r})" in text


def test_dense_expert_tensors_of_another_architecture_are_refused(tmp_path: Path) -> None:
    """A10: expert tensors that stay unused stop the load."""

    def make_dense(tensors: Tensors) -> None:
        for name in [n for n in tensors if ".layers.1.mlp.gate" in n]:
            tensors.pop(name)

    assert "'model.layers.1.mlp.gate.weight' is missing" in refuse(tmp_path, make_dense)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        (NORM, torch.ones(128), "has shape [128]; expected [256]"),
        (EXPERT, torch.ones(256, 160, dtype=torch.bfloat16), "has shape [256, 160]; expected [160, 256]"),
        (NORM, torch.ones(256, dtype=torch.int32), "dtype I32"),
        (NORM, torch.ones(256, dtype=torch.float64), "dtype F64"),
        (NORM, torch.ones(256).to(torch.float8_e4m3fn), "dtype F8_E4M3; supported here: F32, BF16, F16"),
        (EXPERT, torch.ones(160, 256).to(torch.float8_e5m2), "dtype F8_E5M2"),
        (EXPERT, torch.ones(160, 256), "is F32, yet it has a scale"),
        (EXPERT + "_scale_inv", torch.ones(2, 3), "has shape [2, 3]; expected [2, 2]"),
        (EXPERT + "_scale_inv", torch.ones(2, 2, dtype=torch.uint8), "dtype U8"),
    ],
)
def test_wrong_shapes_and_dtypes_are_named(tmp_path: Path, name: str, value: torch.Tensor, says: str) -> None:
    text = refuse(tmp_path, lambda t: t.update({name: value}))
    assert name in text
    assert says in text


def test_fp8_weights_need_a_config_that_says_so(tmp_path: Path) -> None:
    weight = torch.ones(160, 256).to(torch.float8_e4m3fn)
    folder = copy_with(tiny_folder(flash()), tmp_path / "spoilt", lambda t: t.update({EXPERT: weight}))
    with pytest.raises(CheckpointError, match="no fp8 quantization_config"):
        check(folder)


def test_many_problems_are_counted_and_the_first_ten_shown(tmp_path: Path) -> None:
    """J05: the message lists at most 10 names and says how many there are."""

    def drop_experts(tensors: Tensors) -> None:
        for name in [n for n in tensors if ".experts.5." in n]:
            tensors.pop(name)

    text = refuse(tmp_path, drop_experts)
    assert "18 problems" in text
    assert text.count("is missing") == 10
    assert "and 8 more" in text


def test_other_parts_of_the_model_are_skipped_by_name_and_reported(tmp_path: Path) -> None:
    def add_towers(tensors: Tensors) -> None:
        for name in (
            "visual.blocks.0.w",
            "visual.merger.w",
            "audio_encoder.w",
            "model.mtp.layers.0.enorm.weight",
        ):
            tensors[name] = torch.ones(2, 2)

    folder = copy_with(tiny_folder(v25()), tmp_path / "towers", add_towers)
    assert check(folder).skipped == {"visual.": 2, "audio_encoder.": 1, "model.mtp.": 1}


def test_scales_that_are_not_finite_are_named(tmp_path: Path) -> None:
    bad = torch.tensor([[1.0, float("inf")], [1.0, 1.0]])
    folder = copy_with(tiny_folder(v25()), tmp_path / "inf", lambda t: t.update({EXPERT + "_scale_inv": bad}))
    card = read_model_card(folder)
    with Checkpoint(folder, card) as checkpoint:
        checkpoint.validate(list(tensor_specs(card)), ())
        with pytest.raises(CheckpointError, match="not finite"):
            checkpoint.read(EXPERT)
