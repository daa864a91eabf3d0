"""The demo over two ranks that exchange tokens in every MoE layer says what one process says."""

from __future__ import annotations

import pytest

from tests.demo_fixture import PROMPTS, DemoModels, demo_models  # noqa: F401
from tests.e2e.processes import READY, Served, running

EP = ("--tp-size", "2", "--moe-a2a-backend", "shared_memory")
BASE = (
    "--port",
    "0",
    "--threads",
    "1",
    "--kv-memory",
    "128MiB",
    "--max-model-len",
    "512",
    "--dtype",
    "float32",
)


def texts(*flags: str) -> list[str]:
    with running(["-m", "interlock", "serve", "demo", *BASE, *flags]) as process:
        served = Served(process, process.wait_for(READY)[1])
        if flags:
            layers = [layer for items in served.receipts().values() for layer in items["moe_layers"]]
            assert {layer["a2a_backend"] for layer in layers} == {"shared_memory"}
            assert {layer["local_experts"] for layer in layers} == {12}
        answers = [
            served.post(
                "/v1/chat/completions",
                {
                    "model": "demo",
                    "messages": [{"role": "user", "content": prompt}],
                    "max_tokens": 40,
                    "temperature": 0,
                },
            )
            for prompt in PROMPTS
        ]
        return [answer.raise_for_status().json()["choices"][0]["message"]["content"] for answer in answers]


@pytest.mark.slow
def test_two_ranks_say_what_one_process_says(demo_models: DemoModels) -> None:  # noqa: F811
    alone = texts()
    assert len(set(alone)) == len(PROMPTS)
    assert "Paris" in alone[0]
    assert texts(*EP) == alone
