"""Separates what a model thinks from what it answers: ``<think>...</think>`` and the like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from interlock.server.tool_parsers.base import partial_suffix


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Attributes:
    opening, closing: markers around the reasoning.
    implied: an answer begins inside it even when neither prompt nor answer has ``opening``.
    """

    opening: str
    closing: str
    implied: bool = False

    def starts_inside(self, prompt: str) -> bool:
        """Whether the answer to ``prompt`` begins inside the reasoning."""
        opened, closed = prompt.rfind(self.opening), prompt.rfind(self.closing)
        if opened > closed:
            return prompt[opened + len(self.opening) :].strip() == ""
        ends_closed = closed >= 0 and prompt[closed + len(self.closing) :].strip() == ""
        return self.implied and not ends_closed

    def is_over(self, prompt: str) -> bool:
        """Whether ``prompt`` ends right after a reasoning, so that the answer has none."""
        return prompt.rstrip().endswith(self.closing)


THINK = ReasoningFormat("<think>", "</think>")
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "mimo": THINK,
    "qwen3": THINK,
    "deepseek_r1": ReasoningFormat("<think>", "</think>", implied=True),
    "deepseek_v31": THINK,
    "kimi_k2": THINK,
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
}


def reasoning_format_for(template: str) -> ReasoningFormat | None:
    """The format that a chat template speaks of; None when it knows no reasoning."""
    for form in (REASONING_FORMATS["kimi"], THINK):
        if form.closing in template:
            return form
    return None


class Split(NamedTuple):
    """New text of an answer, by where it belongs."""

    reasoning: str
    content: str


class ReasoningSplitter:
    """Reads one answer. The result does not depend on how its text is cut.

    Blanks around the reasoning are dropped. Reasoning that never ends is all reasoning.
    """

    def __init__(self, form: ReasoningFormat, *, starts_inside: bool) -> None:
        self._form = form
        self._state = "inside" if starts_inside else "before"
        self._text = ""
        self._fresh = True
        self._blank = ""

    def feed(self, text: str) -> Split:
        """What is certain now."""
        self._text += text
        return self._drained(ended=False)

    def finish(self) -> Split:
        """The rest, at the end of the answer."""
        return self._drained(ended=True)

    def _drained(self, *, ended: bool) -> Split:
        reasoning = ""
        if self._state == "before" and not self._find_opening(ended=ended):
            return Split("", "")
        if self._state == "inside":
            reasoning = self._read_reasoning(ended=ended)
        if self._state == "trimming":
            self._text = self._text.lstrip()
            if self._text:
                self._state = "content"
        if self._state != "content":
            return Split(reasoning, "")
        content, self._text = self._text, ""
        return Split(reasoning, content)

    def _find_opening(self, *, ended: bool) -> bool:
        text = self._text.lstrip()
        opening = self._form.opening
        if text.startswith(opening):
            self._text = text[len(opening) :]
            self._state = "inside"
            return True
        if opening.startswith(text) and not ended:
            return False
        self._state = "content"
        return True

    def _read_reasoning(self, *, ended: bool) -> str:
        if self._fresh:
            self._text = self._text.lstrip()
            self._fresh = not self._text
        closing = self._form.closing
        end = self._text.find(closing)
        keep = 0 if ended else partial_suffix(self._text, closing)
        cut = end if end >= 0 else len(self._text) - keep
        text = self._blank + self._text[:cut]
        solid = text.rstrip()
        self._blank = text[len(solid) :]
        self._text = self._text[cut:]
        if end >= 0:
            self._text = self._text[len(closing) :]
            self._state = "trimming"
        return solid
