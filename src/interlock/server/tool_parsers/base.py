"""What every parser of tool calls shares: events, and a reader of text that may be cut anywhere.

A parser's events depend on the text alone and not on how it was cut into pieces: text that may become a
marker is held back until that is decided. What looks like a call and is none comes out as content.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

MAX_BLANKS = 8
"""Blanks in a row that forced arguments may have between their parts."""
Tool = Mapping[str, Any]
"""The ``function`` of a tool: ``name``, ``parameters`` (a JSON schema) and more."""


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins. ``id`` is the model's own where its format has one."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Event = Content | CallStart | CallArguments


class ToolParser(ABC):
    """Reads the answer of one choice.

    Args:
        tools: what the client offers, for formats whose values carry no types.

    Class attributes:
        opening: the marker that begins a call or a section of calls.
        markers: everything in the format that may be a special token of the vocabulary.
    """

    opening: ClassVar[str]
    markers: ClassVar[tuple[str, ...]]

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool["name"]: tool for tool in tools}
        self._text = ""
        self._blank = ""
        self._inside = False
        self.calls = 0

    @classmethod
    @abstractmethod
    def structure(cls, tools: Sequence[Tool], schemas: Sequence[Any], *, parallel: bool) -> dict[str, Any]:
        """The structural tag (xgrammar) of an answer that is one call or, if ``parallel``, several.

        Args:
            schemas: of the arguments, one for each tool.
        """

    @abstractmethod
    def _read_call(self, events: list[Event], *, ended: bool) -> bool:
        """Consume from ``_text``, which begins after ``opening``; False when more text is needed.

        Leaves the call by ``_leave``. ``ended``: no more text comes.
        """

    def feed(self, text: str) -> list[Event]:
        """Events that are certain now."""
        self._text += text
        return self._drained(ended=False)

    def finish(self) -> list[Event]:
        """The rest, at the end of the answer."""
        events = self._drained(ended=True)
        if self._blank and not self.calls:
            events.append(Content(self._blank))
        self._blank = ""
        return merged_events(events)

    def _drained(self, *, ended: bool) -> list[Event]:
        events: list[Event] = []
        while True:
            if self._inside:
                if not self._read_call(events, ended=ended):
                    break
                continue
            if not self._read_content(events, ended=ended):
                break
        return merged_events(events)

    def _read_content(self, events: list[Event], *, ended: bool) -> bool:
        """Content up to the next opening; blanks before a call are dropped. Whether a call begins."""
        start = self._text.find(self.opening)
        if start >= 0:
            self._say(events, self._text[:start])
            self._text = self._text[start + len(self.opening) :]
            self._inside = True
            return True
        keep = 0 if ended else partial_suffix(self._text, self.opening)
        self._say(events, self._text[: len(self._text) - keep])
        self._text = self._text[len(self._text) - keep :]
        return False

    def _say(self, events: list[Event], text: str) -> None:
        text = self._blank + text
        solid = text.rstrip()
        self._blank = text[len(solid) :]
        if solid:
            events.append(Content(solid))

    def _begin(self, events: list[Event], name: str, call_id: str | None = None) -> int:
        self._blank = ""
        index = self.calls
        self.calls += 1
        events.append(CallStart(index, name, call_id))
        return index

    def _no_call(self, events: list[Event], text: str) -> None:
        """What seemed to be a call is content: ``opening`` and ``text``."""
        self._inside = False
        self._say(events, self.opening + text)


def partial_suffix(text: str, marker: str) -> int:
    """Length of the longest end of ``text`` that begins ``marker`` (not all of it)."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


def merged_events(events: Sequence[Event]) -> list[Event]:
    """Neighbouring pieces of one content or one call's arguments as one event, without empty ones."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, CallStart):
            result.append(event)
        elif not event.text:
            continue
        elif isinstance(event, Content) and isinstance(last, Content):
            result[-1] = Content(last.text + event.text)
        elif (
            isinstance(event, CallArguments) and isinstance(last, CallArguments) and last.index == event.index
        ):
            result[-1] = CallArguments(event.index, last.text + event.text)
        else:
            result.append(event)
    return result


def one_or_more(tags: list[dict[str, Any]], *, separator: str, parallel: bool) -> dict[str, Any]:
    """Tags one after the other with nothing else around them."""
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def tag(begin: str, schema: Any, end: str, **style: Any) -> dict[str, Any]:
    """A JSON value between two texts."""
    content = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_BLANKS, **style}
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def among_text(forced: dict[str, Any], opening: str, *, parallel: bool) -> dict[str, Any]:
    """The structural tag of any text in which calls, where they begin, are those of ``forced``."""
    form = forced["format"]
    tags = form["tags"] if form["type"] == "tags_with_separator" else [form]
    return structural_tag(
        {
            "type": "triggered_tags",
            "triggers": [opening],
            "tags": tags,
            "at_least_one": False,
            "stop_after_first": not parallel,
        }
    )


def structural_tag(form: dict[str, Any]) -> dict[str, Any]:
    """xgrammar's outermost object around a format."""
    return {"type": "structural_tag", "format": form}
