"""The keywords of JSON Schema: what is known, what is refused, and how a fault is told."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any

from interlock.errors import InterlockError

Schema = dict[str, Any]

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
        *("$comment", "$schema", "$id", "$anchor", "$vocabulary", "discriminator", "xml", "externalDocs"),
        *("contentEncoding", "contentMediaType", "contentSchema"),
    }
)
OF_TYPE: Mapping[str, frozenset[str]] = {
    "object": frozenset(
        {
            *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
            *("minProperties", "maxProperties", "unevaluatedProperties"),
        }
    ),
    "array": frozenset(
        ["items", "prefixItems", "minItems", "maxItems", "uniqueItems", "unevaluatedItems", "additionalItems"]
    ),
    "string": frozenset(["minLength", "maxLength", "pattern", "format"]),
    "number": frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]),
}
STRUCTURE = frozenset(["type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "definitions"])
REFUSED = {
    "not": "say what is allowed instead",
    "if": "use anyOf with one branch for each case",
    "then": "use anyOf with one branch for each case",
    "else": "use anyOf with one branch for each case",
    "contains": "give items a schema instead",
    "minContains": "give items a schema instead",
    "maxContains": "give items a schema instead",
    "dependentRequired": "use anyOf with one branch for each case",
    "dependentSchemas": "use anyOf with one branch for each case",
    "dependencies": "use anyOf with one branch for each case",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
    "nullable": "write type: [..., 'null']",
}


class SchemaError(InterlockError):
    """A schema that is malformed or says what cannot be enforced; ``path`` is where (``properties.a``)."""

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        super().__init__(f"{path}: {problem}" if path else problem)


def check_keywords(schema: Schema, path: str) -> None:
    """Raises ``SchemaError`` for a keyword that is unknown or cannot be enforced."""
    known = ANNOTATIONS | STRUCTURE | frozenset().union(*OF_TYPE.values())
    for key in schema:
        if key in REFUSED:
            raise SchemaError(path, f"{key!r} cannot be enforced; {REFUSED[key]}")
        if key not in known and not key.startswith("x-"):
            raise SchemaError(path, f"{key[:40]!r} is no keyword of JSON Schema")


def constraints(schema: Schema, *, without: tuple[str, ...] = ()) -> Schema:
    """What narrows an answer: no annotations, no definitions, and nothing of ``without``."""
    skipped = ANNOTATIONS | {"$defs", "definitions", *without}
    return {key: value for key, value in schema.items() if key not in skipped and not key.startswith("x-")}


def value_text(value: Any) -> str:
    """Equal for equal JSON values: 1 and 1.0 are, 1 and true are not."""
    return json.dumps(_whole(value), sort_keys=True)


def _whole(value: Any) -> Any:
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_whole(each) for each in value]
        case dict():
            return {key: _whole(each) for key, each in value.items()}
    return value


def is_number(value: Any) -> bool:
    """Whether it is a number that a double can hold; true and false are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) if isinstance(value, float) else abs(value) <= sys.float_info.max


def join(path: str, part: str) -> str:
    """The place ``part`` of the schema at ``path``."""
    return f"{path}.{part[:60]}" if path else part[:60]


def shown(value: object) -> str:
    """A value in an error message, shortened."""
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
