"""Forced tool calls: whatever a model of random tokens writes is a call with valid arguments."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from interlock.server.chat_output import ChatOutput, OutputFormat
from interlock.server.tool_parsers import TOOL_PARSERS
from interlock.structured.schema import exact_schema
from interlock.structured.spec import GrammarSpec
from tests.structured.walks import Walker

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "days"],
}
TOOLS = [
    {"name": "get_weather", "parameters": SCHEMA},
    {"name": "stop", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
]


@pytest.fixture(scope="module")
def walker() -> Walker:
    pytest.importorskip("xgrammar")
    return Walker()


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
def test_forced_calls_are_calls(walker: Walker, name: str, parallel: bool) -> None:
    """G20: at least one call, of an offered tool, with arguments that validate, and nothing else."""
    parser = TOOL_PARSERS[name]
    schemas = [exact_schema(tool["parameters"]) for tool in TOOLS]
    form = parser.structure(TOOLS, schemas, parallel=parallel)
    spec = GrammarSpec(kind="structural_tag", text=json.dumps(form))
    read = 0
    for seed in range(25):
        text = walker.answer(spec, random.Random(seed), 1500)
        if text is None:
            continue
        output = ChatOutput(OutputFormat(parser=parser, tools=TOOLS))
        output.feed(text, ended=True)
        assert output.content == ""
        assert len(output.calls) >= 1
        assert parallel or len(output.calls) == 1
        for call in output.calls:
            schema = next(t["parameters"] for t in TOOLS if t["name"] == call["function"]["name"])
            jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
        read += 1
    assert read >= 10
