"""The weight source that a launch plan asks for."""

from __future__ import annotations

from interlock.checkpoint.dummy import DummyWeights
from interlock.checkpoint.reader import Checkpoint
from interlock.checkpoint.source import Progress, WeightSource, no_progress
from interlock.errors import CheckpointError
from interlock.plan.launch_plan import LaunchPlan


def open_checkpoint(plan: LaunchPlan, *, progress: Progress = no_progress) -> WeightSource:
    """Open ``plan.model_path`` (load_format "safetensors") or make weights up ("dummy"); reads headers only.

    Raises:
        CheckpointError: the folder cannot be used.
    """
    if plan.load_format == "dummy":
        return DummyWeights(plan.card, seed=plan.seed, progress=progress, device=plan.device)
    if plan.load_format == "safetensors":
        return Checkpoint(plan.model_path, plan.card, qkv_layout=plan.qkv_layout, progress=progress)
    raise CheckpointError(f"load format {plan.load_format!r} is unknown; known: safetensors, dummy")
