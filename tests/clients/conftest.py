"""One real server of ``tiny-random`` for the clients of other projects."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.processes import Served, serving

BASE = ("--threads", "1", "--kv-memory", "64MiB", "--dtype", "float32", "--max-model-len", "1024")
FLAGS = ("--tool-call-parser", "hermes", "--served-model-name", "tiny-random")


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    with serving(*FLAGS, base=BASE) as server:
        yield server


WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather", "parameters": WEATHER},
}
MESSAGES = [{"role": "user", "content": "What is the weather in Rome?"}]
