"""What a chat answer's text becomes: reasoning, content and tool calls, for one choice."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from interlock.server.reasoning import ReasoningFormat, ReasoningSplitter
from interlock.server.tool_parsers.base import CallArguments, CallStart, Content, Event, Tool, ToolParser

Delta = dict[str, Any]


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How the answers of one request are read.

    Attributes:
        reasoning: None leaves reasoning in the content.
        starts_inside: the answer begins inside the reasoning.
        shows_reasoning: hand the reasoning to the client.
        parser: None leaves calls in the content.
        tools: what the client offers.
        single_call: calls after the first are dropped.
    """

    reasoning: ReasoningFormat | None = None
    starts_inside: bool = False
    shows_reasoning: bool = True
    parser: type[ToolParser] | None = None
    tools: Sequence[Tool] = ()
    single_call: bool = False

    @property
    def is_plain(self) -> bool:
        """Text is content as it is."""
        return self.reasoning is None and self.parser is None


@dataclass
class ChatOutput:
    """Reads one choice and remembers what it has read.

    Attributes:
        calls: the tool calls so far, as the API shows them.
    """

    form: OutputFormat
    calls: list[dict[str, Any]] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _content: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        form = self.form
        self._splitter = (
            None
            if form.reasoning is None
            else ReasoningSplitter(form.reasoning, starts_inside=form.starts_inside)
        )
        self._parser = None if form.parser is None else form.parser(form.tools)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def content(self) -> str:
        return "".join(self._content)

    def message(self) -> dict[str, Any]:
        """The fields of the whole message that depend on the format."""
        content = self.content or (None if self.calls or self.reasoning else "")
        fields: dict[str, Any] = {"content": content}
        if self.form.reasoning is not None and self.form.shows_reasoning:
            fields["reasoning_content"] = self.reasoning or None
        if self.calls:
            fields["tool_calls"] = self.calls
        return fields

    def finish_reason(self, reason: str) -> str:
        """The API's finish reason for the engine's."""
        return "tool_calls" if reason == "stop" and self.calls else reason

    def feed(self, text: str, *, ended: bool) -> list[Delta]:
        """Deltas for more text; ``ended``: it is the last."""
        deltas: list[Delta] = []
        for piece in self._contents(text, deltas, ended=ended):
            if self._parser is None:
                self._say(deltas, piece)
            else:
                self._take(deltas, self._parser.feed(piece))
        if ended and self._parser is not None:
            self._take(deltas, self._parser.finish())
        return deltas

    def _contents(self, text: str, deltas: list[Delta], *, ended: bool) -> list[str]:
        if self._splitter is None:
            return [text]
        splits = [self._splitter.feed(text)]
        if ended:
            splits.append(self._splitter.finish())
        for split in splits:
            if split.reasoning and self.form.shows_reasoning:
                self._reasoning.append(split.reasoning)
                deltas.append({"reasoning_content": split.reasoning})
        return [split.content for split in splits]

    def _say(self, deltas: list[Delta], text: str) -> None:
        if text:
            self._content.append(text)
            deltas.append({"content": text})

    def _take(self, deltas: list[Delta], events: list[Event]) -> None:
        for event in events:
            match event:
                case Content(text):
                    self._say(deltas, text)
                case CallStart(index, name, call_id):
                    if self._drops(index):
                        continue
                    call_id = call_id or f"call_{uuid.uuid4().hex[:24]}"
                    function = {"name": name, "arguments": ""}
                    self.calls.append({"id": call_id, "type": "function", "function": function})
                    deltas.append(
                        {"tool_calls": [{"index": index, **self.calls[-1], "function": {**function}}]}
                    )
                case CallArguments(index, text):
                    if self._drops(index):
                        continue
                    self.calls[index]["function"]["arguments"] += text
                    deltas.append({"tool_calls": [{"index": index, "function": {"arguments": text}}]})

    def _drops(self, index: int) -> bool:
        return self.form.single_call and index > 0
