"""Log-probabilities from transformers' own model classes (eager attention, float32, CPU)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch


def logprobs(folder: str | Path, token_ids: Sequence[int]) -> torch.Tensor:
    """float64 [n, V]; row i predicts token i + 1. Nothing is fetched: the folder is local."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, local_files_only=True
    ).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([list(token_ids)])).logits[0]
    return torch.log_softmax(logits.double(), -1)
