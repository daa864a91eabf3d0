"""Arguments of a past tool call as chat templates want them: some read an object, others add a text."""

from __future__ import annotations

from typing import Any


class TemplateArguments(dict[str, Any]):
    """An object that is its JSON text wherever a template prints it or adds it to a text.

    Args:
        text: the JSON text, as the client sent it.
    """

    def __init__(self, values: dict[str, Any], text: str) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text
