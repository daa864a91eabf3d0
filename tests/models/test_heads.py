"""Tied and untied output heads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from interlock.errors import CheckpointError
from interlock.reference.mimo_v2 import MiMoReference
from tests.harness import build_model, run_chunks, run_model
from tests.models.prompts import PROMPT, TOLERANCE, distance
from tests.tiny import flash, tiny_folder


def variant(folder: Path, *, tied: bool, head: str) -> Path:
    """A checkpoint whose config says tied or not and whose head is "absent", "equal" or "different"."""
    shutil.copytree(tiny_folder(flash(layers=2, tie_word_embeddings=True)), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied}))
    tensors = load_file(folder / "model.safetensors")
    if head != "absent":
        factor = {"equal": 1.0, "different": -1.0}[head]
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * factor
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("head", ["absent", "equal"])
def test_a_tied_head_shares_the_embedding(tmp_path: Path, head: str) -> None:
    """J11: tied and absent, tied and equal."""
    folder = variant(tmp_path / "m", tied=True, head=head)
    harness = build_model(folder)
    reference = MiMoReference.load(folder)
    assert distance(run_chunks(harness, PROMPT), reference.logprobs(PROMPT)) <= TOLERANCE


def test_a_tied_config_with_another_head_uses_the_head_and_warns(tmp_path: Path) -> None:
    """J11: a real lm_head is not thrown away because the config says tied."""
    folder = variant(tmp_path / "m", tied=True, head="different")
    harness = build_model(folder)
    assert distance(run_chunks(harness, PROMPT), MiMoReference.load(folder).logprobs(PROMPT)) <= TOLERANCE
    assert any("ties the head" in warning for warning in harness.source.report.warnings)


def test_an_untied_head_that_is_missing_is_an_error(tmp_path: Path) -> None:
    """J11: never silently tied, never left at random."""
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' is missing"):
        run_model(variant(tmp_path / "m", tied=False, head="absent"), PROMPT)


def test_the_two_heads_differ(tmp_path: Path) -> None:
    """Control: sharing the embedding is not the same model."""
    rows = [
        run_model(variant(tmp_path / head, tied=True, head=head), PROMPT) for head in ("equal", "different")
    ]
    assert not torch.allclose(*rows, atol=0.1)
