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


EP_MODES = [
    {"tp_size": 2, "ep_size": 2, "moe_a2a_backend": "shared_memory"},
    {"tp_size": 3, "ep_size": 3},
    {"tp_size": 3, "ep_size": 3, "moe_a2a_backend": "collective"},
    {"tp_size": 3, "ep_size": 3, "moe_a2a_backend": "shared_memory"},
    {"tp_size": 3, "attn_dp_size": 3, "moe_a2a_backend": "shared_memory"},
    {"tp_size": 4, "attn_dp_size": 4, "moe_a2a_backend": "collective"},
]
TEXTS = (
    "The capital of France is",
    "Once upon a time there was a",
    "def fib(n):\n",
    "In 1969, the first human",
)


@pytest.mark.slow
def test_the_demo_over_ranks_says_what_one_process_says(demo_models: DemoModels) -> None:  # noqa: F811
    """EP 1, 2, 3, 4 and attention replicas: tokens equal, log-probabilities within 1e-5."""
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0, prompt_logprobs=0)

    def ask(**options: object) -> list[tuple[tuple[int, ...], list[float]]]:
        with LLM(str(demo_models.moe), threads=1, max_model_len=256, kv_memory="128MiB", **options) as llm:
            return [
                (
                    each.token_ids,
                    [e.logprob for e in (*each.prompt_logprobs, *each.logprobs) if e is not None],
                )
                for each in llm.generate(list(TEXTS), sampling)
            ]

    alone = ask()
    for mode in EP_MODES:
        for (tokens, scores), (wanted, exact) in zip(ask(**mode), alone, strict=True):
            assert tokens == wanted, mode
            assert max(abs(a - b) for a, b in zip(scores, exact, strict=True)) <= 1e-5, mode
