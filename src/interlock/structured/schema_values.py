"""Schemas without schemas inside: enumerations, numbers, counts; and the types that a schema speaks of."""

from __future__ import annotations

import math
from typing import Any

from interlock.structured.schema_keywords import (
    OF_TYPE,
    TYPES,
    Schema,
    SchemaError,
    is_number,
    shown,
    value_text,
)

_MAX_INTEGER = 2**53


def types_of(schema: Schema, path: str) -> list[str]:
    """Types that the schema allows; without ``type`` those that its keywords speak of, [] for any."""
    given = schema.get("type")
    if given is None:
        return [kind for kind, keywords in OF_TYPE.items() if keywords & schema.keys()]
    types = given if isinstance(given, list) else [given]
    for kind in types:
        if kind not in TYPES:
            raise SchemaError(path, f"type {shown(kind)} is none of {', '.join(TYPES)}")
    if not types:
        raise SchemaError(path, "type is an empty list")
    if "number" in types:
        types = [kind for kind in types if kind != "integer"]
    return list(dict.fromkeys(types))


def enumeration(schema: Schema, path: str) -> Schema:
    """``const`` and ``enum`` as one list of the values that the types beside them allow."""
    values = [schema["const"]] if "const" in schema else schema["enum"]
    if not isinstance(values, list) or not values:
        raise SchemaError(path, "enum must be a list with at least one value")
    if "const" in schema and "enum" in schema:
        values = common_values(values, enumeration({"enum": schema["enum"]}, path)["enum"])
    beside = sorted(schema.keys() - {"type", "enum", "const"})
    if beside:
        raise SchemaError(path, f"{beside[0]!r} beside enum or const; list only the values that are allowed")
    if "type" in schema:
        types = types_of(schema, path)
        values = [value for value in values if any(_is_of_type(value, kind) for kind in types)]
    if not values:
        raise SchemaError(path, "no value of enum has the type that is asked for")
    return {"enum": values}


def common_values(one: list[Any], other: list[Any]) -> list[Any]:
    """Values of ``one`` that are also in ``other``."""
    known = {value_text(value) for value in other}
    return [value for value in one if value_text(value) in known]


def _is_of_type(value: object, kind: str) -> bool:
    match value:
        case bool():
            return kind == "boolean"
        case int():
            return kind in ("integer", "number")
        case float():
            return kind == "number" or (kind == "integer" and value.is_integer())
        case str():
            return kind == "string"
        case None:
            return kind == "null"
        case list():
            return kind == "array"
    return kind == "object"


def number(kind: str, schema: Schema, path: str) -> Schema:
    """Numbers; bounds of integers are inclusive and whole."""
    for key, value in schema.items():
        if not is_number(value):
            raise SchemaError(path, f"{key} must be a number, not {shown(value)}")
    result: Schema = {"type": kind, **schema}
    if kind == "integer":
        for key, rounded in (("minimum", math.ceil), ("maximum", math.floor)):
            if key in result:
                result[key] = rounded(result[key])
        for key, bound, step in (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1)):
            if key in result:
                value = result.pop(key)
                limit = (math.floor(value) + 1) if step == 1 else (math.ceil(value) - 1)
                other = result.get(bound, limit)
                result[bound] = max(limit, other) if step == 1 else min(limit, other)
        if any(abs(result.get(key, 0)) > _MAX_INTEGER for key in ("minimum", "maximum")):
            raise SchemaError(path, "bounds of integers beyond 2**53 cannot be enforced")
    multiple = schema.get("multipleOf")
    if multiple is not None and (kind != "integer" or multiple != int(multiple) or multiple <= 0):
        raise SchemaError(path, "multipleOf can be enforced for integers and whole factors only")
    return result


def counts_of(schema: Schema, names: tuple[str, str], path: str) -> Schema:
    """The least and the most of something, as far as given."""
    counts = {name: schema[name] for name in names if name in schema}
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_INTEGER:
            raise SchemaError(path, f"{name} must be a whole number of 0 or more, not {shown(value)}")
    low, high = counts.get(names[0], 0), counts.get(names[1], math.inf)
    if low > high:
        raise SchemaError(path, f"{names[0]} {low} is more than {names[1]} {high}")
    return counts
