"""How log lines are written: text for people, or JSON with one object a line.

A line carries the id of the HTTP request that it belongs to, and fields that a caller gives with
``extra=fields(...)``. Prompts, answers and keys are never among them.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

REQUEST_ID: ContextVar[str] = ContextVar("interlock_request_id", default="")
"""Id of the HTTP request that the current task answers, "" outside of one."""

_NOISY = ("uvicorn", "httpx", "asyncio", "urllib3", "opentelemetry")
"""Libraries whose news below a warning tell an operator nothing."""


def fields(**values: object) -> dict[str, dict[str, object]]:
    """``extra`` of a logging call: values that stand beside the message."""
    return {"fields": values}


def configure(level: str, form: str, *, rank: int | None = None, stream: TextIO | None = None) -> None:
    """Write this process's log lines to ``stream`` (standard error) and nowhere else.

    Args:
        level: "debug", "info", "warning" or "error".
        form: "text" or "json".
        rank: shown in every line of a rank process.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(rank) if form == "json" else TextFormatter(rank))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.DEBUG if level == "debug" else logging.WARNING)
    logging.captureWarnings(True)


class TextFormatter(logging.Formatter):
    """``time LEVEL logger: message name=value ...``; values with spaces or control characters are quoted."""

    def __init__(self, rank: int | None = None) -> None:
        super().__init__()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        pairs = "".join(f" {name}={_word(value)}" for name, value in _context(record, self._rank).items())
        text = f"{_time(record)} {record.levelname} {record.name}: {record.getMessage()}{pairs}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (RFC 3339, UTC), level, logger, message, and what the line is about."""

    def __init__(self, rank: int | None = None) -> None:
        super().__init__()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_context(record, self._rank),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _context(record: logging.LogRecord, rank: int | None) -> Mapping[str, object]:
    own: Any = getattr(record, "fields", None)
    found: dict[str, object] = dict(own) if isinstance(own, Mapping) else {}
    if request_id := REQUEST_ID.get():
        found.setdefault("request_id", request_id)
    if rank is not None:
        found["rank"] = rank
    return {name: value for name, value in found.items() if value is not None}


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"


def _word(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    plain = text and text.isascii() and text.isprintable() and not set(text) & {" ", '"', "=", "\\"}
    return text if plain else json.dumps(text)
