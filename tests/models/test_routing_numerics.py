"""Router weights and biases from file to choice."""

from __future__ import annotations

from pathlib import Path

import torch

from interlock.reference.mimo_v2 import MiMoReference
from tests.checkpoint.files import Tensors, copy_with
from tests.harness import build_model, run_chunks
from tests.models.prompts import PROMPT
from tests.models.routes import recorded_routes
from tests.tiny import flash, tiny_folder

SPEC = flash(experts=64, top_k=4, layers=3)


def close_biases(tensors: Tensors) -> None:
    """Biases around 7 that differ in the third decimal: 64 values, of which bf16 keeps a few."""
    for name in [name for name in tensors if name.endswith("e_score_correction_bias")]:
        tensors[name] = torch.linspace(6.817, 7.063, SPEC.experts)


def test_close_biases_survive_loading_a_bf16_model(tmp_path: Path) -> None:
    """C01: the bias stays float32 from file to top-k, also when the model computes in bfloat16."""
    folder = copy_with(tiny_folder(SPEC), tmp_path / "m", close_biases)
    assert len(torch.linspace(6.817, 7.063, SPEC.experts).bfloat16().unique()) <= 9
    harness = build_model(folder, dtype="bfloat16", kv_cache_dtype="bfloat16")
    with recorded_routes(harness) as routes:
        run_chunks(harness, PROMPT)
    exact: list[torch.Tensor] = []
    reference = MiMoReference.load(folder)
    reference.forward(PROMPT, routes=exact)
    agreeing = torch.tensor(
        [
            len(set(a) & set(b)) / SPEC.top_k
            for ours, theirs in zip(routes, exact, strict=True)
            for a, b in zip(ours.tolist(), theirs.tolist(), strict=True)
        ]
    )
    assert float(agreeing.mean()) > 0.9


def test_choices_equal_the_reference_in_float32() -> None:
    """C03, C09: the same experts for every token of every layer as in float64."""
    folder = tiny_folder(SPEC)
    harness = build_model(folder)
    with recorded_routes(harness) as routes:
        run_chunks(harness, PROMPT)
    exact: list[torch.Tensor] = []
    MiMoReference.load(folder).forward(PROMPT, routes=exact)
    for ours, theirs in zip(routes, exact, strict=True):
        assert torch.equal(ours.sort(-1).values, theirs.sort(-1).values)
