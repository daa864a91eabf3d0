"""Ready means ready: nothing is built, compiled or discovered by the first requests."""

from __future__ import annotations

from pathlib import Path

from platformdirs import user_cache_path

from tests.engine.conftest import PROMPTS, ask, engine


def test_requests_of_any_shape_compile_nothing_after_ready(tiny: Path) -> None:
    """J10: the native kernels have run in both phases before ready; 40 requests add no library."""
    libraries = user_cache_path("interlock") / "kernels"
    with engine(tiny) as llm:
        before = sorted(libraries.rglob("*.so"))
        calls = [layer["dispatches"] for layer in llm.receipts[0]["moe_layers"]]  # type: ignore[union-attr]
        assert all(min(each.values()) >= 1 for each in calls)
        for _ in range(5):
            ask(llm, PROMPTS)
        assert sorted(libraries.rglob("*.so")) == before
