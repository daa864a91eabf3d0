"""The output items of a response, built from chat deltas, with the events that announce them."""

from __future__ import annotations

import uuid
from typing import Any

from interlock.server.chat_output import Delta

Event = dict[str, Any]
Item = dict[str, Any]


class ResponseItems:
    """Items in order: reasoning, message and function calls as they come.

    Attributes:
        items: what there is so far, in the form of the API.
    """

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._open: Item | None = None

    def take(self, delta: Delta) -> list[Event]:
        """Events of one delta of a chat answer."""
        events: list[Event] = []
        if text := delta.get("reasoning_content"):
            item = self._current("reasoning", events)
            item["content"][0]["text"] += text
            events.append(self._event("response.reasoning_text.delta", item, content_index=0, delta=text))
        if text := delta.get("content"):
            item = self._current("message", events)
            item["content"][0]["text"] += text
            events.append(
                self._event("response.output_text.delta", item, content_index=0, delta=text, logprobs=[])
            )
        for call in delta.get("tool_calls", []):
            events += self._take_call(call)
        return events

    def finish(self, *, complete: bool) -> list[Event]:
        """Close what is open; ``complete``: the answer ended by itself."""
        return self._close("completed" if complete else "incomplete")

    @property
    def reasoning(self) -> str:
        return "".join(item["content"][0]["text"] for item in self.items if item["type"] == "reasoning")

    def _take_call(self, call: dict[str, Any]) -> list[Event]:
        events: list[Event] = []
        function = call["function"]
        if "name" in function:
            events += self._close("completed")
            item = {
                "type": "function_call",
                "id": f"fc_{uuid.uuid4().hex}",
                "call_id": call["id"],
                "name": function["name"],
                "arguments": "",
                "status": "in_progress",
            }
            events += self._add(item)
        if self._open is not None and function["arguments"]:
            self._open["arguments"] += function["arguments"]
            events.append(
                self._event("response.function_call_arguments.delta", self._open, delta=function["arguments"])
            )
        return events

    def _current(self, kind: str, events: list[Event]) -> Item:
        """The open item of ``kind``; another one is closed and a new one begun where need be."""
        if self._open is not None and self._open["type"] == kind:
            return self._open
        events += self._close("completed")
        if kind == "reasoning":
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            item: Item = {"type": kind, "id": f"rs_{uuid.uuid4().hex}", "summary": [], "content": [part]}
            item["status"] = "in_progress"
            return self._added(item, events)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item = {"type": kind, "id": f"msg_{uuid.uuid4().hex}", "role": "assistant", "status": "in_progress"}
        item["content"] = [part]
        return self._added(item, events)

    def _added(self, item: Item, events: list[Event]) -> Item:
        part = item["content"][0]
        events += self._add({**item, "content": []})
        self._open = self.items[-1] = item
        events.append(self._event("response.content_part.added", item, content_index=0, part=dict(part)))
        return item

    def _add(self, item: Item) -> list[Event]:
        self.items.append(item)
        self._open = item
        return [
            {
                "type": "response.output_item.added",
                "output_index": len(self.items) - 1,
                "item": dict(item),
            }
        ]

    def _close(self, status: str) -> list[Event]:
        item, self._open = self._open, None
        if item is None:
            return []
        item["status"] = status
        events: list[Event] = []
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            events.append(self._event("response.function_call_arguments.done", item, **done))
        else:
            part = item["content"][0]
            if item["type"] == "message":
                events.append(
                    self._event(
                        "response.output_text.done", item, content_index=0, text=part["text"], logprobs=[]
                    )
                )
            else:
                events.append(
                    self._event("response.reasoning_text.done", item, content_index=0, text=part["text"])
                )
            events.append(self._event("response.content_part.done", item, content_index=0, part=part))
        events.append(
            {"type": "response.output_item.done", "output_index": self.items.index(item), "item": item}
        )
        return events

    def _event(self, kind: str, item: Item, **fields: Any) -> Event:
        return {"type": kind, "item_id": item["id"], "output_index": len(self.items) - 1, **fields}
