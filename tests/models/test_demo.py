"""The demo through our engine against the dense SmolLM2 that it re-expresses, in transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from interlock import LLM, SamplingParams
from interlock.tokenizer import load_tokenizer
from tests.demo_fixture import PROMPTS, DemoModels, demo_models  # noqa: F401
from tests.harness import build_model, run_chunks

NEW_TOKENS = 40


@pytest.mark.slow
def test_the_engine_says_what_the_dense_model_says(demo_models: DemoModels) -> None:  # noqa: F811
    """Logits within 3e-4 over prompt and answer in chunks, and the same greedy text on three prompts."""
    dense = AutoModelForCausalLM.from_pretrained(demo_models.dense, dtype=torch.float32)
    tokenizer = load_tokenizer(demo_models.moe)
    prompts = [
        tokenizer.encode(
            tokenizer.apply_chat_template([{"role": "user", "content": text}]), add_special_tokens=False
        )
        for text in PROMPTS
    ]
    with LLM(str(demo_models.moe), threads=2, max_model_len=256) as llm:
        answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True))
    harness = build_model(demo_models.moe, kernels="cpu", moe_runner_backend="cpu", threads=2)
    for prompt, answer in zip(prompts, answers, strict=True):
        text = torch.tensor([prompt + list(answer.token_ids)])
        with torch.no_grad():
            expected = torch.log_softmax(dense(text).logits[0].double(), -1)
        greedy = expected.argmax(-1)[len(prompt) - 1 : -1]
        assert answer.token_ids == tuple(greedy.tolist())
        ours = run_chunks(harness, text[0].tolist(), 16)
        assert (ours - expected).abs().max() <= 3e-4
