"""MiMo and Qwen3-Coder: ``<tool_call><function=F><parameter=K>V</parameter></function></tool_call>``.

Values carry no types: a parameter whose schema is a string stays text, others are read as JSON if they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
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

CLOSING = "</tool_call>"
_FUNCTION = "<function="
_TAG = re.compile(r"<parameter=|</function>|</tool_call>")
_PARAMETER = re.compile(r"<parameter=([^>]*)>(.*?)</parameter>", re.DOTALL)
_JSON_TYPES: Mapping[type, str] = {
    bool: "boolean", int: "integer", float: "number", dict: "object", list: "array", type(None): "null",
}  # fmt: skip


class XmlParser(ToolParser):
    """A parameter is reported when it is complete.

    Class attributes:
        lines: the model's template puts the tags on lines of their own.
    """

    opening: ClassVar[str] = "<tool_call>"
    markers: ClassVar[tuple[str, ...]] = ("<tool_call>", CLOSING)
    lines: ClassVar[bool] = False

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self._index = 0
        self._name: str | None = None
        self._parameters = 0
        self._is_open = False

    @classmethod
    def structure(cls, tools: Sequence[Tool], schemas: Sequence[Any], *, parallel: bool) -> dict[str, Any]:
        end = "\n" if cls.lines else ""
        tags = [
            tag(
                f"<tool_call>{end}<function={tool['name']}>{end}",
                schema,
                f"{end}</function>{end}{CLOSING}",
                style="qwen_xml",
                max_whitespace_cnt=1,
            )
            for tool, schema in zip(tools, schemas, strict=True)
        ]
        return structural_tag(one_or_more(tags, separator=end, parallel=parallel))

    def _read_call(self, events: list[Event], *, ended: bool) -> bool:
        if self._name is None:
            return self._read_head(events, ended=ended)
        found = _TAG.search(self._text)
        if found is None:
            return False
        self._text = self._text[found.start() :]
        if found[0] == CLOSING:
            self._end_arguments(events)
            self._text = self._text[len(CLOSING) :]
            self._name, self._inside = None, False
            return True
        if found[0] == "</function>":
            self._end_arguments(events)
            self._text = self._text[len(found[0]) :]
            return True
        return self._read_parameter(events)

    def _read_head(self, events: list[Event], *, ended: bool) -> bool:
        text = self._text.lstrip()
        if len(text) < len(_FUNCTION) and _FUNCTION.startswith(text) and not ended:
            return False
        end = text.find(">")
        if not text.startswith(_FUNCTION) or (end < 0 and ended):
            self._no_call(events, "")
            return True
        if end < 0:
            return False
        self._text = text[end + 1 :]
        self._name, self._parameters, self._is_open = text[len(_FUNCTION) : end].strip(), 0, True
        self._index = self._begin(events, self._name)
        return True

    def _read_parameter(self, events: list[Event]) -> bool:
        if "</parameter>" not in self._text:
            return False
        found = _PARAMETER.match(self._text)
        if found is None:
            return False
        self._text = self._text[found.end() :]
        if not self._is_open:
            return True
        key = found[1].strip()
        pair = f"{json.dumps(key, ensure_ascii=False)}: " + json.dumps(
            self._value(key, found[2]), ensure_ascii=False
        )
        events.append(CallArguments(self._index, (", " if self._parameters else "{") + pair))
        self._parameters += 1
        return True

    def _end_arguments(self, events: list[Event]) -> None:
        if self._is_open:
            events.append(CallArguments(self._index, "}" if self._parameters else "{}"))
        self._is_open = False

    def _value(self, key: str, text: str) -> Any:
        assert self._name is not None
        text = text.removeprefix("\n").removesuffix("\n")
        parameters = self._tools.get(self._name, {}).get("parameters")
        properties = parameters.get("properties", {}) if isinstance(parameters, dict) else {}
        schema = properties.get(key) if isinstance(properties, dict) else None
        types = _types(schema)
        if types is None or "string" in types:
            return None if types is not None and text == "null" and "null" in types else _string(text, schema)
        try:
            value = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError):
            return text
        kind = _JSON_TYPES.get(type(value), "string")
        fits = not types or kind in types or (kind == "integer" and "number" in types)
        return value if fits else _string(text, schema)


class QwenCoderParser(XmlParser):
    """Qwen3-Coder, and MiMo templates of the same form: tags on lines of their own."""

    lines: ClassVar[bool] = True


def _string(text: str, schema: Any) -> str:
    """The text, without the blanks around it where only so it can be what the schema asks for."""
    if not isinstance(schema, dict):
        return text
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return text if text in values or text.strip() not in values else text.strip()
    most = schema.get("maxLength")
    return text.strip() if isinstance(most, int) and len(text) > most else text


def _types(schema: Any) -> frozenset[str] | None:
    """Types that a parameter may have; None when nothing is known of it, empty when any."""
    if not isinstance(schema, dict):
        return None
    kind = schema.get("type")
    found = {kind} if isinstance(kind, str) else set(kind) if isinstance(kind, list) else set()
    for branch in [*schema.get("anyOf", []), *schema.get("oneOf", [])]:
        found |= _types(branch) or set()
    if not found and isinstance(schema.get("enum"), list):
        return frozenset({"string"}) if all(isinstance(v, str) for v in schema["enum"]) else frozenset()
    return frozenset(found)
