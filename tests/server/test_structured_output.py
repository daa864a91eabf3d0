"""Fields that constrain an answer: which grammar they ask of the engine, and what is wrong with bad ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.conftest import Post
from tests.server.fake_engine import FakeEngine
from tests.server.sse import events

pytest.importorskip("xgrammar")

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
JSON_SPEC = ("json_schema", json.dumps(SCHEMA))

GOOD: list[tuple[dict[str, Any], tuple[str, str]]] = [
    ({"response_format": {"type": "json_object"}}, ("json_schema", '{"type": "object"}')),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
            }
        },
        JSON_SPEC,
    ),
    ({"guided_json": SCHEMA}, JSON_SPEC),
    ({"guided_json": json.dumps(SCHEMA)}, JSON_SPEC),
    ({"json_schema": json.dumps(SCHEMA)}, JSON_SPEC),
    ({"structured_outputs": {"json": SCHEMA}}, JSON_SPEC),
    ({"structured_outputs": {"json_object": True}}, ("json_schema", '{"type": "object"}')),
    ({"guided_regex": "[ab]+"}, ("regex", "[ab]+")),
    ({"regex": "[ab]+"}, ("regex", "[ab]+")),
    ({"structured_outputs": {"regex": "[ab]+"}}, ("regex", "[ab]+")),
    ({"guided_grammar": 'root ::= "a"'}, ("ebnf", 'root ::= "a"')),
    ({"ebnf": 'root ::= "a"'}, ("ebnf", 'root ::= "a"')),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, ("ebnf", 'root ::= "a"')),
    ({"guided_choice": ["a", 'b"\n', "ü"]}, ("ebnf", 'root ::= "a" | "b\\"\\n" | "ü"')),
    ({"structured_outputs": {"choice": ["a"]}}, ("ebnf", 'root ::= "a"')),
]


@pytest.mark.parametrize(("fields", "expected"), GOOD, ids=repr)
def test_every_name_reaches_the_engine(
    either: Post, engine: FakeEngine, fields: dict[str, Any], expected: tuple[str, str]
) -> None:
    engine.script("x")
    assert either(n=2, **fields).status_code == 200
    specs = [request.grammar for request in engine.requests]
    assert [(spec.kind, spec.text) for spec in specs if spec is not None] == [expected] * 2


def test_without_such_fields_nothing_is_constrained(either: Post, engine: FakeEngine) -> None:
    engine.script("x")
    assert either(response_format={"type": "text"}).status_code == 200
    assert engine.requests[0].grammar is None


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def schema_format(schema: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


SCHEMA_PARAM = "response_format.json_schema.schema"
BAD: list[tuple[dict[str, Any], str, str]] = [
    (schema_format({"type": "nope"}), SCHEMA_PARAM, "'nope'"),
    (schema_format({"type": "object", "properties": {"a": "b"}}), SCHEMA_PARAM, "properties.a"),
    (schema_format([1]), SCHEMA_PARAM, "a JSON schema is an object"),
    (schema_format(nested(80)), SCHEMA_PARAM, "too large"),
    (schema_format({"not": {}}), SCHEMA_PARAM, "'not' cannot be enforced"),
    (schema_format({"oneOf": [{"type": "integer"}, {"type": "number"}]}), SCHEMA_PARAM, "oneOf"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, SCHEMA_PARAM, "missing"),
    ({"guided_json": "{"}, "guided_json", "no JSON"),
    ({"json_schema": "[1"}, "json_schema", "no JSON"),
    ({"guided_regex": "(a"}, "guided_regex", "parenthesis is not closed"),
    ({"regex": ""}, "regex", "empty"),
    ({"ebnf": "root ::= foo"}, "ebnf", '"foo" is not defined'),
    ({"guided_choice": []}, "guided_choice", "1 to 1000"),
    ({"guided_choice": [""]}, "guided_choice", "not empty"),
    ({"structured_outputs": {}}, "structured_outputs", "no constraint"),
    ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn", "unknown field"),
    ({"structured_outputs": {"structural_tag": {"type": "x"}}}, "structured_outputs.structural_tag", "tag"),
    ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf", "give one of them"),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos", "a grammar ends"),
    ({"regex": "a", "min_tokens": 3}, "min_tokens", "when the answer may end"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param", "words"), BAD, ids=lambda value: repr(value)[:60])
def test_bad_grammars_are_400_with_what_is_wrong(
    either: Post, engine: FakeEngine, fields: dict[str, Any], param: str, words: str, stream: bool
) -> None:
    """G19: refused before the engine sees it, streamed or not, and never left unconstrained."""
    answer = either(stream=stream, **fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"] or "").startswith(param)
    assert words in error["message"]
    assert engine.requests == []


def test_nesting_beyond_what_json_readers_take(either: Post, engine: FakeEngine) -> None:
    """G19: 200 levels are 400 too, from the reader of the body."""
    answer = either(**schema_format(nested(200)))
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"
    assert engine.requests == []


def test_a_request_that_its_own_grammar_leaves_nothing_is_an_error_of_the_client(
    either: Post, engine: FakeEngine
) -> None:
    """G24: the engine's refusal is 400, in a stream one error event."""
    engine.script("ab", error_at=0, refused=True)
    answer = either(regex="a+")
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "request_refused"
    engine.script("ab", error_at=1, refused=True)
    last = events(either(regex="a+", stream=True))[-1]
    assert last["error"]["code"] == "request_refused"
