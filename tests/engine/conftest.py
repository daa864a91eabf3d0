"""Engines over real processes on a tiny checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from interlock import LLM, SamplingParams
from interlock.demo.tiny import write_tiny
from interlock.demo.tiny_spec import TinySpec
from interlock.reference.mimo_v2 import MiMoReference

BASE = {"dtype": "float32", "threads": 1, "max_model_len": 256, "kv_memory": "64MiB"}
PROMPTS = tuple(
    tuple((5 * row + 13 * column + 15) % 480 + 8 for column in range(length))
    for row, length in enumerate((1, 15, 16, 17, 33, 70, 40, 5))
)
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=2, prompt_logprobs=0)


@dataclass(frozen=True)
class Answers:
    """What an engine said to ``PROMPTS``, in order."""

    tokens: list[tuple[int, ...]]
    logprobs: list[list[float]]

    def largest_difference(self, other: Answers) -> float:
        assert self.tokens == other.tokens
        return max(
            abs(a - b)
            for mine, theirs in zip(self.logprobs, other.logprobs, strict=True)
            for a, b in zip(mine, theirs, strict=True)
        )


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny(folder, TinySpec())
    return folder


@contextmanager
def engine(model: Path | str, **options: object) -> Iterator[LLM]:
    with LLM(str(model), **{**BASE, **options}) as llm:
        yield llm


def ask(
    llm: LLM, prompts: tuple[tuple[int, ...], ...] = PROMPTS, sampling: SamplingParams = GREEDY
) -> Answers:
    done = llm.generate([list(prompt) for prompt in prompts], sampling)
    return Answers(
        tokens=[each.token_ids for each in done],
        logprobs=[
            [entry.logprob for entry in (*each.prompt_logprobs, *each.logprobs) if entry is not None]
            for each in done
        ],
    )


def smallest_gap(folder: Path, token_ids: tuple[int, ...]) -> float:
    """Over layers and positions, how near the router came to choosing another expert."""
    gaps: list[torch.Tensor] = []
    MiMoReference.load(folder).forward(token_ids, gaps=gaps)
    return min(float(gap.min()) for gap in gaps)


@pytest.fixture(scope="session")
def one_process(tiny: Path) -> Answers:
    """The answers of one process, none of which hangs on a near tie of the router."""
    with engine(tiny) as llm:
        answers = ask(llm)
    for prompt, tokens in zip(PROMPTS, answers.tokens, strict=True):
        assert smallest_gap(tiny, prompt + tokens) > 1e-4, f"choose another prompt than {prompt}"
    return answers
