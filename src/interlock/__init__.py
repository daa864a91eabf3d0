"""Interlock: an inference server for mixture-of-experts models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interlock.engine.messages import SamplingParams
    from interlock.llm import LLM, Completion
    from interlock.structured.grammar import Grammar

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "Grammar", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the offline engine only when it is used, so that planning stays light."""
    if name in ("LLM", "Completion"):
        from interlock import llm

        return getattr(llm, name)
    if name == "Grammar":
        from interlock.structured.grammar import Grammar

        return Grammar
    if name == "SamplingParams":
        from interlock.engine.messages import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'interlock' has no attribute {name!r}")
