"""What schemas become before they are compiled, and which are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from interlock.structured.schema import exact_schema
from interlock.structured.schema_keywords import SchemaError

REFUSED: list[tuple[object, str, str]] = [
    ({"type": "nope"}, "", "none of object, array"),
    ({"type": "object", "properties": {"a": "b"}}, "properties.a", "expected a schema"),
    ([1], "", "a JSON schema is an object"),
    ("x", "", "a JSON schema is an object"),
    (False, "", "allows nothing"),
    ({"not": {}}, "", "'not' cannot be enforced"),
    ({"type": "array", "uniqueItems": True}, "", "uniqueItems cannot be enforced"),
    ({"type": "array", "contains": {}}, "", "'contains' cannot be enforced"),
    ({"if": {}, "then": {}}, "", "'if' cannot be enforced"),
    ({"properties": {"x": {"type": "object", "dependentRequired": {}}}}, "properties.x", "dependentRequired"),
    ({"tpye": "string"}, "", "'tpye' is no keyword"),
    ({"type": "number", "multipleOf": 0.5}, "", "whole factors"),
    ({"type": "string", "pattern": "^a", "maxLength": 3}, "", "pattern and maxLength"),
    ({"type": "integer", "minimum": "3"}, "", "minimum must be a number"),
    ({"type": "array", "minItems": 3, "maxItems": 1}, "", "minItems 3 is more than maxItems 1"),
    ({"type": "array", "prefixItems": [True], "items": False, "minItems": 2}, "", "minItems 2"),
    ({"enum": []}, "", "at least one value"),
    ({"enum": [1], "type": "string"}, "", "no value of enum"),
    ({"const": 1, "enum": 5}, "", "enum must be a list"),
    ({"const": True, "enum": [1]}, "", "no value of enum"),
    ({"allOf": [{"enum": [1]}, {"enum": [True]}]}, "", "nothing in common"),
    ({"allOf": [{"minimum": "a"}, {"minimum": 3}]}, "", "minimum must be a number"),
    ({"type": "number", "minimum": 10**400}, "", "minimum must be a number"),
    ({"type": "string", "format": []}, "", "format must be a string"),
    ({"type": "object", "additionalProperties": 5}, "", "additionalProperties must be a schema"),
    ({"enum": [1, 2], "minimum": 2}, "", "'minimum' beside enum"),
    ({"type": "object", "required": ["a"], "additionalProperties": False}, "", "required and not allowed"),
    ({"$ref": "#/$defs/x"}, "", "points to nothing"),
    ({"$ref": "https://example.org/s"}, "", "not inside this schema"),
    ({"allOf": [{"$ref": "#"}]}, "", "refers to itself"),
    ({"allOf": [{"type": "string"}, {"type": "null"}]}, "", "must both hold"),
    (
        {"allOf": [{"properties": {"a": True}, "additionalProperties": False}, {"properties": {"b": True}}]},
        "",
        "additionalProperties beside properties",
    ),
]


@pytest.mark.parametrize(("schema", "path", "words"), REFUSED, ids=repr)
def test_what_cannot_be_enforced_is_refused_by_name(schema: object, path: str, words: str) -> None:
    """G19: no constraint is dropped without notice."""
    with pytest.raises(SchemaError) as error:
        exact_schema(schema)
    assert error.value.path == path
    assert words in str(error.value)


def test_deep_and_large_schemas_are_refused() -> None:
    """G19: 200 levels are an error of the request, not of the server."""
    for levels, words in ((100, "too large"), (200, "too deep")):
        deep: dict[str, Any] = {"type": "integer"}
        for _ in range(levels):
            deep = {"type": "object", "properties": {"a": deep}}
        with pytest.raises(SchemaError, match=words):
            exact_schema(deep)
    value: Any = 1
    for _ in range(900):
        value = [value]
    for holder in ({"enum": [value]}, {"const": 1, "enum": [value, 1]}, {"default": value}):
        with pytest.raises(SchemaError, match="too deep"):
            exact_schema(holder)
    with pytest.raises(SchemaError, match="too large"):
        exact_schema({"properties": {f"p{index}": True for index in range(20_000)}})


WRITTEN: list[tuple[object, dict[str, Any]]] = [
    (True, {}),
    ({"title": "x", "x-order": 3}, {}),
    ({"minimum": 3}, {"type": "number", "minimum": 3}),
    (
        {"type": "integer", "exclusiveMinimum": 2, "maximum": 4.5},
        {"type": "integer", "minimum": 3, "maximum": 4},
    ),
    (
        {"type": ["string", "null"], "maxLength": 3},
        {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
    ),
    ({"type": "string", "format": "whatever"}, {"type": "string"}),
    ({"type": "string", "pattern": '^say "x"$'}, {"enum": ['say "x"']}),
    ({"type": "string", "enum": ["a", 1]}, {"enum": ["a"]}),
    (
        {"required": ["a"]},
        {"type": "object", "properties": {"a": {}}, "required": ["a"]},
    ),
    (
        {"minimum": 3, "anyOf": [{"type": "integer"}, {"type": "null"}]},
        {"anyOf": [{"type": "integer", "minimum": 3}, {"type": "null"}]},
    ),
    (
        {"allOf": [{"type": "number", "minimum": 1}, {"type": "integer", "minimum": 3, "maximum": 5}]},
        {"type": "integer", "minimum": 3, "maximum": 5},
    ),
    (
        {"$defs": {"p": {"type": "string"}}, "type": "array", "items": {"$ref": "#/$defs/p"}},
        {"type": "array", "items": {"$ref": "#/$defs/d0"}, "$defs": {"d0": {"type": "string"}}},
    ),
    (
        {"type": "array", "items": [{"type": "null"}]},
        {"type": "array", "prefixItems": [{"type": "null"}], "items": False},
    ),
]


@pytest.mark.parametrize(("schema", "expected"), WRITTEN, ids=repr)
def test_schemas_are_written_out(schema: object, expected: dict[str, Any]) -> None:
    assert exact_schema(schema) == expected


def test_tagged_unions_become_exclusive_branches() -> None:
    """What pydantic writes for a discriminated union, with and without a default for the tag."""
    cat = {"properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["lives"]}
    dog = {"properties": {"kind": {"const": "dog"}}, "required": ["kind"]}
    written = exact_schema({"$defs": {"cat": cat}, "oneOf": [{"$ref": "#/$defs/cat"}, dog]})
    assert [branch["required"] for branch in written["anyOf"]] == [["lives", "kind"], ["kind"]]
    assert len(exact_schema({"oneOf": [cat, dog, {"type": "null"}]})["anyOf"]) == 3
    assert "anyOf" in exact_schema({"oneOf": [{"type": "integer"}, {"type": "string"}]})
    assert "anyOf" in exact_schema({"oneOf": [{"enum": [1, "a"]}, {"const": "b"}]})
    for overlapping in (
        [{"type": "integer"}, {"type": "number"}],
        [{"enum": [1]}, {"enum": [1.0]}],
        [{"properties": {"kind": {"type": "string"}}}, {"properties": {"kind": {"const": "b"}}}],
    ):
        assert "oneOf" in exact_schema({"oneOf": overlapping})


def test_recursion_through_references_stays() -> None:
    written = exact_schema({"type": "object", "properties": {"child": {"$ref": "#"}}})
    assert written["properties"]["child"] == {"$ref": "#/$defs/d0"}
    assert written["$defs"]["d0"]["properties"]["child"] == {"$ref": "#/$defs/d0"}
