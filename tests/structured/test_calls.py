"""Forced tool calls: whatever a model of random tokens writes is a call with valid arguments."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from interlock.server.chat_output import ChatOutput, OutputFormat
from interlock.server.tool_parsers import TOOL_PARSERS
from interlock.server.tool_parsers.base import among_text
from interlock.structured.schema import exact_schema
from interlock.structured.spec import GrammarSpec
from tests.structured.walks import EOS, Walker, allowed_ids

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


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
def test_strict_tools_leave_text_free_and_calls_valid(walker: Walker, name: str) -> None:
    """Any text may come; once the model opens a call, it is one of the tools' with valid arguments."""
    parser = TOOL_PARSERS[name]
    schemas = [exact_schema(tool["parameters"]) for tool in TOOLS]
    form = among_text(parser.structure(TOOLS, schemas, parallel=True), parser.opening, parallel=True)
    state = walker.state(GrammarSpec(kind="structural_tag", text=json.dumps(form)))
    tokens = {text: token for token, text in reversed(list(enumerate(walker.vocabulary.tokens)))}
    text = "Let me see " + parser.opening
    for byte in text.encode():
        assert tokens[bytes([byte])] in allowed_ids(state)
        state.accept(tokens[bytes([byte])])
    rng, out = random.Random(3), []
    for _ in range(1500):
        allowed = allowed_ids(state)
        if EOS in allowed:
            break
        closing = [t for t in allowed if walker.vocabulary.tokens[t][:1] in (b'"', b"}", b"]", b"<")]
        token = rng.choice(closing if closing and rng.random() < 0.25 else allowed)
        state.accept(token)
        out.append(token)
    output = ChatOutput(OutputFormat(parser=parser, tools=TOOLS))
    output.feed(text + walker.text(out), ended=True)
    assert output.content == "Let me see"
    assert output.calls
    for call in output.calls:
        schema = next(t["parameters"] for t in TOOLS if t["name"] == call["function"]["name"])
        jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
