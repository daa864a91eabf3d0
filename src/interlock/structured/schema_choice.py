"""``oneOf`` as ``anyOf``, where no value can match two branches."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

from interlock.structured.schema_keywords import Schema, value_text


def exclusive(branches: list[Schema], definitions: Mapping[str, Schema]) -> list[Schema] | None:
    """The branches, each narrowed by its tag, when they exclude each other; None when that is not seen.

    They do when their types or values differ, or when all are objects with a property whose values differ (a
    tag, as pydantic's discriminated unions have); the tag is then required.

    Args:
        branches: written schemas; references point into ``definitions``.
    """
    resolved = [_resolved(branch, definitions) for branch in branches]
    objects = [index for index, branch in enumerate(resolved) if branch.get("type") == "object"]
    alike = [
        pair for pair in combinations(range(len(branches)), 2) if not _differ(*(resolved[i] for i in pair))
    ]
    if not alike:
        return branches
    if any(index not in objects for pair in alike for index in pair):
        return None
    for name in _shared_names([resolved[index] for index in objects]):
        values = [_values(resolved[index]["properties"][name], definitions) for index in objects]
        known = [each for each in values if each is not None]
        if len(known) == len(values) and all(one.isdisjoint(other) for one, other in combinations(known, 2)):
            return [
                _requiring(resolved[index], name) if index in objects else branch
                for index, branch in enumerate(branches)
            ]
    return None


def _requiring(branch: Schema, name: str) -> Schema:
    return {**branch, "required": list(dict.fromkeys([*branch.get("required", []), name]))}


def _resolved(branch: Schema, definitions: Mapping[str, Schema]) -> Schema:
    reference = branch.get("$ref")
    if isinstance(reference, str):
        return definitions.get(reference.removeprefix("#/$defs/"), {})
    return branch


def _shared_names(branches: list[Schema]) -> list[str]:
    first, *rest = [branch.get("properties", {}) for branch in branches]
    return [name for name in first if all(name in other for other in rest)]


def _values(schema: Schema, definitions: Mapping[str, Schema]) -> set[str] | None:
    """The values of an enumeration as texts, None for any other schema."""
    values = _resolved(schema, definitions).get("enum")
    return None if values is None else {value_text(value) for value in values}


def _differ(one: Schema, other: Schema) -> bool:
    if "enum" in one and "enum" in other:
        return {value_text(v) for v in one["enum"]}.isdisjoint(value_text(v) for v in other["enum"])
    kinds = {one.get("type"), other.get("type")}
    return None not in kinds and len(kinds) == 2 and kinds != {"integer", "number"}
