"""Strict reading of server-sent events."""

from __future__ import annotations

import json
from typing import Any

import httpx


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON events of a finished stream; the last event must be ``[DONE]``."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.content.decode("utf-8").split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    payloads = [block.removeprefix("data: ") for block in blocks]
    assert payloads.pop() == "[DONE]"
    return [strict_json(payload) for payload in payloads]


def strict_json(text: str) -> Any:
    """JSON without NaN and infinities."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"not JSON: {constant}")

    return json.loads(text, parse_constant=refuse)


def texts(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """Joined text of one choice of a stream, for both endpoints."""
    parts: list[str] = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                parts.append(choice["text"] if "text" in choice else choice["delta"].get("content", ""))
    return "".join(parts)
