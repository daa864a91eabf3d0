"""A rank without work runs the step with no tokens, and so do sequences without new tokens."""

from __future__ import annotations

import torch

from interlock.engine.batch import idle_arrays, to_step
from interlock.moe.terms import Phase
from tests.harness import build_model
from tests.tiny import tiny_folder, v25


@torch.inference_mode()
def test_a_step_of_no_tokens_has_no_rows_and_no_logits() -> None:
    """B04: no last token is looked up in an empty step."""
    harness = build_model(tiny_folder(v25()))
    for phase in Phase:
        step = to_step(idle_arrays(phase, has_full=True, has_window=True))
        hidden = harness.model.forward(step, harness.cache)
        assert hidden.shape == (0, harness.plan.card.hidden_size)
        assert harness.model.logits(hidden[step.sample_rows]).shape == (0, harness.plan.card.vocab_size)


@torch.inference_mode()
def test_sequences_without_new_tokens_change_nothing() -> None:
    """B04: lengths [0, 0, 3], the empty ones first, give the rows of the sequence that has tokens."""
    harness = build_model(tiny_folder(v25()))
    empty, other, full, alone = (harness.new_sequence(16) for _ in range(4))
    mixed = harness.step([(empty, []), (other, []), (full, [5, 6, 7])])
    assert mixed.shape[0] == 3
    torch.testing.assert_close(mixed, harness.step([(alone, [5, 6, 7])], phase=Phase.PREFILL))
