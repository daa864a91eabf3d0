"""Reading JSON text that may not be complete yet."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


class NeedMore(Exception):
    """The text ends before the decision."""


class NotThis(Exception):
    """The text is something else."""


class ValueEnd:
    """Finds where an object ends in text that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> int | None:
        """Characters of ``text`` up to the end of the object; None while it goes on."""
        for position, char in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return position + 1
        return None


@dataclass(frozen=True, slots=True)
class CallHead:
    """``{"name": "f", "arguments": `` was read: the arguments, an object, begin at ``start``."""

    name: str
    start: int


def read_call_head(text: str) -> CallHead:
    """The head of a call as Hermes and Qwen write it.

    Raises:
        NeedMore: ``text`` may still become one.
        NotThis: it is another order of keys, another value than an object, or no JSON.
    """
    cursor = _Cursor(text)
    cursor.expect("{")
    if cursor.string() != "name":
        raise NotThis
    cursor.expect(":")
    name = cursor.string()
    cursor.expect(",")
    if cursor.string() not in ("arguments", "parameters"):
        raise NotThis
    cursor.expect(":")
    cursor.blanks()
    if cursor.peek() != "{":
        raise NotThis
    return CallHead(name, cursor.position)


class _Cursor:
    def __init__(self, text: str) -> None:
        self._text = text
        self.position = 0

    def blanks(self) -> None:
        while self.position < len(self._text) and self._text[self.position] in " \t\r\n":
            self.position += 1

    def peek(self) -> str:
        if self.position >= len(self._text):
            raise NeedMore
        return self._text[self.position]

    def expect(self, char: str) -> None:
        self.blanks()
        if self.peek() != char:
            raise NotThis
        self.position += 1

    def string(self) -> str:
        self.blanks()
        start = self.position
        if self.peek() != '"':
            raise NotThis
        self.position += 1
        while self.peek() != '"':
            self.position += 2 if self.peek() == "\\" else 1
        self.position += 1
        try:
            return str(msgspec.json.decode(self._text[start : self.position]))
        except msgspec.DecodeError:
            raise NotThis from None
