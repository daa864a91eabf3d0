"""A tiny checkpoint with every feature of MiMo-V2, small enough to be run many times."""

from __future__ import annotations

from pathlib import Path

import pytest

from interlock.tokenizer import load_tokenizer
from interlock.verify.prompts import Prompt, prompts_of_file
from tests.tiny import tiny_folder, v25

SPEC = v25(
    dtype="float32",
    layers=3,
    pattern=(0, 1, 1),
    experts=8,
    top_k=4,
    num_heads=4,
    num_kv_heads=2,
    swa_num_kv_heads=2,
)


@pytest.fixture(scope="session")
def tiny() -> Path:
    return tiny_folder(SPEC)


@pytest.fixture(scope="session")
def prompts(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Prompt]:
    """Three prompts: within a page, beyond the window, of several pages."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = (str([(7 * row + 13 * i) % 480 + 8 for i in range(n)]) for row, n in enumerate((5, 23, 50)))
    path.write_text("\n".join(lines))
    return prompts_of_file(path, load_tokenizer(tiny))
