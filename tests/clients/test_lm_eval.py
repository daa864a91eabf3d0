"""lm-evaluation-harness over HTTP scores a task as it does through transformers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from interlock.demo.tiny import write_tiny
from interlock.demo.tiny_spec import TinySpec
from interlock.demo.tiny_tokenizer import TRAINING_TEXT
from tests.e2e.processes import READY, Served, running

QUESTIONS = 24
TASK = """
task: signals
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
metadata:
  version: 1
"""


def write_task(folder: Path) -> Path:
    """Continue a sentence: 4 choices each, some of several tokens."""
    rng = random.Random(7)
    words = TRAINING_TEXT.split()
    lines = []
    for _ in range(QUESTIONS):
        start = rng.randrange(len(words) - 30)
        text = " ".join(words[start : start + rng.randrange(3, 20)])
        choices = [" " + " ".join(rng.sample(words, rng.randrange(1, 4))) for _ in range(4)]
        lines.append(json.dumps({"text": text, "choices": choices, "answer": rng.randrange(4)}))
    data = folder / "signals.jsonl"
    data.write_text("\n".join(lines) + "\n")
    (folder / "signals.yaml").write_text(TASK.format(data=data))
    return folder


def scores(results: dict[str, Any]) -> list[float]:
    """The log-likelihood of each choice of each question, in order."""
    samples = sorted(results["samples"]["signals"], key=lambda sample: sample["doc_id"])
    return [float(response[0][0]) for sample in samples for response in sample["resps"]]


@pytest.mark.slow
def test_loglikelihoods_equal_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """G04: echo with logprobs as the harness reads it: within 1e-3 of the same task through transformers."""
    lm_eval = pytest.importorskip(
        "lm_eval", reason="lm-eval is not installed; pip install 'interlock[clients]'"
    )
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    model = write_tiny(tmp_path / "model", TinySpec.qwen3_moe().replace(dtype="float32", fp8=False))
    manager = TaskManager(include_path=str(write_task(tmp_path)), include_defaults=False)
    common = {"tasks": ["signals"], "task_manager": manager, "log_samples": True, "bootstrap_iters": 0}
    flags = ("--threads", "1", "--kv-memory", "64MiB", "--dtype", "float32", "--port", "0")
    with running(["-m", "interlock", "serve", str(model), *flags]) as process:
        served = Served(process, process.wait_for(READY)[1])
        name = served.get("/v1/models").json()["data"][0]["id"]
        arguments = f"model={name},base_url={served.url}/v1/completions,tokenizer={model},num_concurrent=4"
        ours = lm_eval.simple_evaluate("local-completions", model_args=arguments, **common)
    theirs = lm_eval.simple_evaluate(
        "hf", model_args=f"pretrained={model},dtype=float32", device="cpu", batch_size=1, **common
    )
    mine, other = scores(ours), scores(theirs)
    assert len(mine) == len(other) == 4 * QUESTIONS
    worst = max(abs(a - b) for a, b in zip(mine, other, strict=True))
    print(f"{len(mine)} log-likelihoods, largest difference {worst:.2e}")
    assert worst < 1e-3
    assert ours["results"]["signals"]["acc,none"] == theirs["results"]["signals"]["acc,none"]
