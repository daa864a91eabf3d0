"""The conjunction of two JSON schemas as one, where that can be written."""

from __future__ import annotations

from typing import Any

from interlock.structured.schema_keywords import Schema, is_number, value_text
from interlock.structured.schema_values import common_values

_LARGER = frozenset(["minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"])
_SMALLER = frozenset(["maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"])


def merged(one: Schema, other: Schema) -> Schema:
    """A schema that allows what both allow.

    Raises:
        ValueError: it cannot be written as one, or allows nothing.
    """
    _check_closed(one, other)
    result = dict(one)
    for key, value in other.items():
        same = key not in one or value_text(one[key]) == value_text(value)
        result[key] = value if same else _both(key, one[key], value)
    return result


def _both(key: str, one: Any, other: Any) -> Any:
    if key in _LARGER | _SMALLER:
        if not (is_number(one) and is_number(other)):
            raise ValueError(f"{key} must be a number")
        return max(one, other) if key in _LARGER else min(one, other)
    if key == "type":
        return _common_types(one, other)
    if key == "required" and isinstance(one, list) and isinstance(other, list):
        return [*one, *(name for name in other if name not in one)]
    if key == "properties" and isinstance(one, dict) and isinstance(other, dict):
        shared = {name: {"allOf": [one[name], other[name]]} for name in one.keys() & other.keys()}
        return {**one, **other, **shared}
    if key == "enum" and isinstance(one, list) and isinstance(other, list):
        common = common_values(one, other)
        if common:
            return common
        raise ValueError("the values of two enums that must both hold have nothing in common")
    if key == "items" and isinstance(one, dict) and isinstance(other, dict):
        return {"allOf": [one, other]}
    raise ValueError(f"two different values of {key!r} must both hold, which cannot be enforced")


def _common_types(one: Any, other: Any) -> Any:
    left = one if isinstance(one, list) else [one]
    right = other if isinstance(other, list) else [other]
    common = [kind for kind in left if kind in right]
    if ("integer" in left and "number" in right) or ("number" in left and "integer" in right):
        common = [kind for kind in common if kind != "number"] + ["integer"] * ("integer" not in common)
    if not common:
        raise ValueError(f"the types {one!r} and {other!r} must both hold")
    return common if len(common) > 1 else common[0]


def _check_closed(one: Schema, other: Schema) -> None:
    """``additionalProperties`` speaks of the properties beside it, so it cannot be mixed with other ones."""
    for mine, theirs in ((one, other), (other, one)):
        rest = mine.get("additionalProperties", True)
        names = theirs.get("properties", {})
        own = mine.get("properties", {})
        if (
            rest is not True
            and isinstance(names, dict)
            and isinstance(own, dict)
            and names.keys() - own.keys()
        ):
            raise ValueError("additionalProperties beside properties of another schema that must hold too")
