"""DeepSeek and Kimi: a section of calls, each with markers around its name and its JSON arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

from interlock.server.tool_parsers.base import (
    MAX_BLANKS,
    CallArguments,
    Event,
    Tool,
    ToolParser,
    one_or_more,
    partial_suffix,
    structural_tag,
    tag,
)


class MarkedParser(ToolParser):
    """Class attributes:
    call_opening, call_closing: markers around one call.
    argument_marker: between a call's head and its arguments.
    section_closing: ends the section.
    separator: between two calls, as the model's template writes them.
    """

    call_opening: ClassVar[str]
    call_closing: ClassVar[str]
    argument_marker: ClassVar[str]
    section_closing: ClassVar[str]
    separator: ClassVar[str] = ""

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self._state = "section"
        self._index = 0
        self._tail = ""

    @classmethod
    def structure(cls, tools: Sequence[Tool], schemas: Sequence[Any], *, parallel: bool) -> dict[str, Any]:
        tags = [cls._tag(tool, schema) for tool, schema in zip(tools, schemas, strict=True)]
        calls = one_or_more(tags, separator=cls.separator, parallel=parallel)
        section = {"type": "tag", "begin": cls.opening, "content": calls, "end": cls.section_closing}
        return structural_tag(section)

    @classmethod
    def _tag(cls, tool: Tool, schema: Any) -> dict[str, Any]:
        raise NotImplementedError

    def _parse_head(self, head: str) -> tuple[str, str | None] | None:
        """Name and id of a call; None when ``head`` is none."""
        raise NotImplementedError

    def _read_call(self, events: list[Event], *, ended: bool) -> bool:
        if self._state == "section":
            return self._read_section(events, ended=ended)
        if self._state == "head":
            return self._read_head(events, ended=ended)
        return self._read_arguments(events, ended=ended)

    def _read_section(self, events: list[Event], *, ended: bool) -> bool:
        """Blanks, then a call or the end of the section."""
        text = self._text.lstrip()
        for marker, state in ((self.call_opening, "head"), (self.section_closing, "")):
            if text.startswith(marker):
                self._text = text[len(marker) :]
                if state:
                    self._state = state
                else:
                    self._inside = False
                return True
        may_come = any(marker.startswith(text) for marker in (self.call_opening, self.section_closing))
        if may_come and not ended:
            return False
        if ended and may_come:
            self._text = ""
            return False
        self._inside = False
        return True

    def _read_head(self, events: list[Event], *, ended: bool) -> bool:
        end = self._text.find(self.argument_marker)
        if end < 0 and not ended:
            return False
        head = self._text[:end] if end >= 0 else self._text
        self._text = self._text[end + len(self.argument_marker) :] if end >= 0 else ""
        found = self._parse_head(head) if end >= 0 else None
        if found is None:
            self._state = "section"
            self._inside = False
            marker = self.argument_marker if end >= 0 else ""
            self._say(events, self.call_opening + head + marker)
            return True
        self._index = self._begin(events, *found)
        self._state, self._tail = "arguments", ""
        return True

    def _read_arguments(self, events: list[Event], *, ended: bool) -> bool:
        """Text up to ``call_closing``, without blanks at its ends."""
        end = self._text.find(self.call_closing)
        keep = 0 if end >= 0 else partial_suffix(self._text, self.call_closing)
        cut = end if end >= 0 else len(self._text) - keep
        text = self._tail + self._text[:cut]
        solid = text.rstrip()
        self._tail = text[len(solid) :]
        events.append(CallArguments(self._index, solid))
        self._text = "" if ended and end < 0 else self._text[cut:]
        if end < 0:
            return False
        self._text = self._text[len(self.call_closing) :]
        self._state = "section"
        return True


class DeepSeekV31Parser(MarkedParser):
    """DeepSeek V3.1: ``<...calls begin><...call begin>NAME<...sep>{...}<...call end><...calls end>``."""

    opening: ClassVar[str] = "<｜tool▁calls▁begin｜>"
    call_opening: ClassVar[str] = "<｜tool▁call▁begin｜>"
    argument_marker: ClassVar[str] = "<｜tool▁sep｜>"
    call_closing: ClassVar[str] = "<｜tool▁call▁end｜>"
    section_closing: ClassVar[str] = "<｜tool▁calls▁end｜>"
    markers: ClassVar[tuple[str, ...]] = (
        opening,
        call_opening,
        argument_marker,
        call_closing,
        section_closing,
    )

    @classmethod
    def _tag(cls, tool: Tool, schema: Any) -> dict[str, Any]:
        return tag(f"{cls.call_opening}{tool['name']}{cls.argument_marker}", schema, cls.call_closing)

    def _parse_head(self, head: str) -> tuple[str, str | None] | None:
        name = head.strip()
        return (name, None) if name else None


class DeepSeekV3Parser(DeepSeekV31Parser):
    """DeepSeek V3 and R1: the type before the separator, then the name, and the arguments in a code fence."""

    argument_marker: ClassVar[str] = "\n```json\n"
    call_closing: ClassVar[str] = "\n```<｜tool▁call▁end｜>"
    separator: ClassVar[str] = "\n"

    @classmethod
    def _tag(cls, tool: Tool, schema: Any) -> dict[str, Any]:
        begin = f"{cls.call_opening}function<｜tool▁sep｜>{tool['name']}{cls.argument_marker}"
        return tag(begin, schema, cls.call_closing)

    def _parse_head(self, head: str) -> tuple[str, str | None] | None:
        _, separator, name = head.partition("<｜tool▁sep｜>")
        return (name.strip(), None) if separator and name.strip() else None


class KimiK2Parser(MarkedParser):
    """Kimi K2: ``functions.NAME:INDEX`` is both the name and the id of a call."""

    opening: ClassVar[str] = "<|tool_calls_section_begin|>"
    call_opening: ClassVar[str] = "<|tool_call_begin|>"
    argument_marker: ClassVar[str] = "<|tool_call_argument_begin|>"
    call_closing: ClassVar[str] = "<|tool_call_end|>"
    section_closing: ClassVar[str] = "<|tool_calls_section_end|>"
    markers: ClassVar[tuple[str, ...]] = (
        opening,
        call_opening,
        argument_marker,
        call_closing,
        section_closing,
    )

    @classmethod
    def _tag(cls, tool: Tool, schema: Any) -> dict[str, Any]:
        return {
            "type": "tag",
            "begin": f"{cls.call_opening}functions.{tool['name']}:",
            "content": {
                "type": "sequence",
                "elements": [
                    {"type": "regex", "pattern": "[0-9]{1,4}"},
                    {"type": "const_string", "value": cls.argument_marker},
                    {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_BLANKS},
                ],
            },
            "end": cls.call_closing,
        }

    def _parse_head(self, head: str) -> tuple[str, str | None] | None:
        call_id = head.strip()
        found = re.fullmatch(r"(?:functions\.)?(.+?)(?::\d+)?", call_id, re.DOTALL)
        return (found[1], call_id) if found else None
