"""The demo model and its dense original for tests, kept in the user's cache between runs.

Use the fixtures by importing them into a test module::

    from tests.demo_fixture import demo_models  # noqa: F401
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from interlock.demo import dense_reference, resolve_model
from interlock.errors import InterlockError

PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Write three short sentences about the sea.",
    "List the first 5 prime numbers and explain what a prime number is.",
)


@dataclass(frozen=True)
class DemoModels:
    """``moe``: what ``interlock serve demo`` serves; ``dense``: the LlamaForCausalLM it re-expresses."""

    moe: Path
    dense: Path


@pytest.fixture(scope="session")
def demo_models() -> DemoModels:
    """Both folders; skips, saying why, when no source of the demo can be reached."""
    try:
        return DemoModels(moe=resolve_model("demo", progress=False), dense=dense_reference(progress=False))
    except InterlockError as error:
        pytest.skip(f"the demo model is not available: {error}")
