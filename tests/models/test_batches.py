"""Several sequences and padding in one step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from interlock.kernels.torch_reference import TorchKernels
from tests.harness import build_model, run_chunks
from tests.models.prompts import PROMPT, TOLERANCE, distance
from tests.tiny import tiny_folder, v25


def test_padding_tokens_change_nothing() -> None:
    """B05: padding rows write no cache and move no live logit."""
    harness = build_model(tiny_folder(v25()))
    plain = run_chunks(harness, PROMPT, [16, 17, 1, 6])
    padded = run_chunks(harness, PROMPT, [16, 17, 1, 6], padding=5)
    assert distance(padded, plain) <= TOLERANCE


def test_sequences_of_one_step_do_not_see_each_other() -> None:
    harness = build_model(tiny_folder(v25()))
    prompts = [PROMPT[:5], PROMPT[3:40], PROMPT[::-1][:18]]
    alone = [run_chunks(harness, prompt) for prompt in prompts]
    sequences = [harness.new_sequence(64) for _ in prompts]
    logits = harness.step(list(zip(sequences, prompts, strict=True)))
    together = torch.log_softmax(logits.double(), -1).split([len(p) for p in prompts])
    for one, other in zip(together, alone, strict=True):
        assert distance(one, other) <= TOLERANCE
    more = harness.step([(sequence, [7]) for sequence in sequences])
    for row, prompt in zip(torch.log_softmax(more.double(), -1), prompts, strict=True):
        assert distance(row, run_chunks(harness, [*prompt, 7])[-1]) <= TOLERANCE


def test_what_may_cut_the_keys_is_the_same_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the table's width: that is the longest sequence of the step, or of all steps in a captured one."""
    harness = build_model(tiny_folder(v25()))
    told = []
    computed = TorchKernels.paged_attention

    def seen(self: TorchKernels, q: torch.Tensor, **given: Any) -> torch.Tensor:
        told.append(given["max_keys"])
        return computed(self, q, **given)

    monkeypatch.setattr(TorchKernels, "paged_attention", seen)
    run_chunks(harness, PROMPT[:3])
    run_chunks(harness, PROMPT)
    plan = harness.plan
    assert set(told) == {plan.sequence_pages * plan.page_size}
    assert plan.max_model_len <= told[0] < plan.max_model_len + plan.page_size


def test_a_step_without_tokens_gives_no_rows() -> None:
    """B03: an idle rank enters the forward with zero tokens."""
    harness = build_model(tiny_folder(v25()))
    sequence = harness.new_sequence(16)
    assert harness.step([(sequence, [])]).shape == (0, 512)
    assert harness.step([]).shape == (0, 512)
    assert harness.step([], padding=3).shape == (0, 512)


def test_every_window_chunk_edge_is_exact() -> None:
    """E04: whatever the chunk and page size, token i sees exactly its window."""
    expected = run_chunks(build_model(tiny_folder(v25())), PROMPT)
    for page_size in (1, 4, 16):
        harness = build_model(tiny_folder(v25()), page_size=page_size, full_pages=80, window_pages=80)
        for chunk in (3, 15, 17):
            assert distance(run_chunks(harness, PROMPT, chunk), expected) <= TOLERANCE
