"""Loading a model: what is told while it happens, and what stops it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from interlock.checkpoint.open import open_checkpoint
from interlock.checkpoint.reader import Checkpoint
from interlock.errors import CheckpointError
from interlock.models.card_reader import read_model_card
from tests.harness import build_model
from tests.plans import make_plan
from tests.tiny import flash, tiny_folder, v25


def test_progress_counts_every_layer() -> None:
    seen: list[tuple[int, int, str]] = []
    build_model(tiny_folder(v25()), progress=lambda *part: seen.append(part))
    assert seen == [(1, 8, "embedding and head"), *[(i + 2, 8, f"layer {i}") for i in range(7)]]


def test_a_missing_shard_stops_the_load_by_name(tmp_path: Path) -> None:
    """J05: shard 2 of 3 is deleted."""
    folder = tmp_path / "m"
    shutil.copytree(tiny_folder(flash(layers=2, shards=3)), folder)
    missing = folder / "model-00002-of-00003.safetensors"
    missing.unlink()
    with pytest.raises(CheckpointError, match=missing.name):
        build_model(folder)


def test_closing_a_checkpoint_closes_its_files() -> None:
    folder = tiny_folder(flash(layers=2))
    open_files = Path("/proc/self/fd")
    before = len(list(open_files.iterdir()))
    with Checkpoint(folder, read_model_card(folder)) as checkpoint:
        checkpoint.read("model.norm.weight")
        assert len(list(open_files.iterdir())) == before + 1
    assert len(list(open_files.iterdir())) == before


def test_an_unknown_load_format_is_refused() -> None:
    folder = tiny_folder(flash(layers=2))
    plan = make_plan(read_model_card(folder), model_path=folder, load_format="pickle")
    with pytest.raises(CheckpointError, match="known: safetensors, dummy"):
        open_checkpoint(plan)
