"""The load generator guidellm: every request is answered, and its counts of tokens are the server's."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from interlock.demo.tiny import write_tiny
from interlock.demo.tiny_spec import TinySpec
from tests.e2e.processes import Served, environment

REQUESTS, STREAMS, PROMPT_TOKENS, ANSWER_TOKENS = 12, 3, 40, 12
FORMATS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")


@pytest.fixture(scope="module")
def command() -> str:
    found = shutil.which("guidellm")
    if found is None:
        pytest.skip("guidellm is not on the PATH; pip install 'interlock[clients]', or where PATH finds it")
    return found


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that guidellm makes prompts of a given length with; nothing is asked of a hub."""
    folder: Path = write_tiny(tmp_path_factory.mktemp("tokenizer") / "model", TinySpec())
    return folder


def benchmark(command: str, served: Served, tokenizer: Path, form: str, report: Path) -> dict[str, Any]:
    """Run it against ``served``; the one benchmark of its report."""
    arguments = (
        ("--backend", f"kind=openai_http,target={served.url},model=tiny-random,request_format={form}"),
        ("--profile", f"kind=concurrent,streams={STREAMS}"),
        ("--constraint", f"kind=max_requests,count={REQUESTS}"),
        ("--tokenizer", f"kind=huggingface_auto,model={tokenizer}"),
        ("--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={ANSWER_TOKENS}"),
        ("--output", f"kind=json,path={report}"),
    )
    done = subprocess.run(
        [command, "run", "--disable-console", *(part for pair in arguments for part in pair)],
        env=environment(HF_HUB_OFFLINE="1"),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (found,) = json.loads(report.read_text())["benchmarks"]
    return dict(found)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_its_counts_are_the_servers(
    command: str, served: Served, tokenizer: Path, form: str, tmp_path: Path
) -> None:
    names = ("interlock:prompt_tokens_total", "interlock:generation_tokens_total")
    before = served.metrics()
    found = benchmark(command, served, tokenizer, form, tmp_path / "report.json")
    metrics = found["metrics"]
    totals = metrics["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (REQUESTS, 0, 0)
    prompts, answers = (served.metrics()[name] - before.get(name, 0) for name in names)
    assert metrics["output_token_count"]["successful"]["total_sum"] == answers == REQUESTS * ANSWER_TOKENS
    assert metrics["prompt_token_count"]["successful"]["total_sum"] == prompts >= REQUESTS * PROMPT_TOKENS
    for measured in ("time_to_first_token_ms", "inter_token_latency_ms", "request_latency"):
        assert metrics[measured]["successful"]["count"] > 0
        assert metrics[measured]["successful"]["median"] > 0
