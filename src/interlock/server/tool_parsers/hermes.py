"""Hermes and Qwen: ``<tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from interlock.server.tool_parsers.base import (
    CallArguments,
    Event,
    Tool,
    ToolParser,
    one_or_more,
    structural_tag,
    tag,
)
from interlock.server.tool_parsers.json_text import NeedMore, NotThis, ValueEnd, read_call_head

CLOSING = "</tool_call>"


class HermesParser(ToolParser):
    """Arguments are streamed as they come when the name is before them; other orders wait for the end."""

    opening: ClassVar[str] = "<tool_call>"
    markers: ClassVar[tuple[str, ...]] = ("<tool_call>", CLOSING)

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self._value: ValueEnd | None = None
        self._index = 0
        self._closing = False

    @classmethod
    def structure(cls, tools: Sequence[Tool], schemas: Sequence[Any], *, parallel: bool) -> dict[str, Any]:
        tags = [
            tag(f'<tool_call>\n{{"name": {json.dumps(tool["name"])}, "arguments": ', schema, f"}}\n{CLOSING}")
            for tool, schema in zip(tools, schemas, strict=True)
        ]
        return structural_tag(one_or_more(tags, separator="\n", parallel=parallel))

    def _read_call(self, events: list[Event], *, ended: bool) -> bool:
        if self._value is not None:
            return self._read_arguments(events, self._value)
        if self._closing:
            return self._skip_to_closing()
        try:
            head = read_call_head(self._text)
        except NeedMore:
            if ended:
                return self._give_up(events)
            return False
        except NotThis:
            return self._read_whole(events, ended=ended)
        self._index = self._begin(events, head.name)
        self._text = self._text[head.start :]
        self._value = ValueEnd()
        return True

    def _read_arguments(self, events: list[Event], value: ValueEnd) -> bool:
        text, self._text = self._text, ""
        end = value.feed(text)
        events.append(CallArguments(self._index, text[:end]))
        if end is None:
            return False
        self._text = text[end:]
        self._value, self._closing = None, True
        return True

    def _skip_to_closing(self) -> bool:
        end = self._text.find(CLOSING)
        if end < 0:
            return False
        self._text = self._text[end + len(CLOSING) :]
        self._inside = self._closing = False
        return True

    def _read_whole(self, events: list[Event], *, ended: bool) -> bool:
        end = self._text.find(CLOSING)
        if end < 0:
            return self._give_up(events) if ended else False
        body, self._text = self._text[:end], self._text[end + len(CLOSING) :]
        call = _decoded(body)
        if call is None:
            self._no_call(events, body + CLOSING)
            return True
        events_at = self._begin(events, call[0])
        events.append(CallArguments(events_at, call[1]))
        self._inside = False
        return True

    def _give_up(self, events: list[Event]) -> bool:
        text, self._text = self._text, ""
        self._no_call(events, text)
        return True


def _decoded(body: str) -> tuple[str, str] | None:
    """Name and arguments (JSON text) of a call in any order of keys; None when it is none."""
    try:
        call = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return call["name"], arguments
