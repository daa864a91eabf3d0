"""Rewrites a JSON schema into an equal or narrower one of which the grammar compiler drops nothing.

The compiler ignores what it cannot express: keywords beside ``enum``, ``anyOf`` or ``$ref``, constraints of a
schema without ``type``, ``required`` names without a property, ``not``, ``uniqueItems`` and more. Here such a
schema is written out so that everything counts, or refused by name. An object with ``properties`` is closed
unless it has ``additionalProperties`` (as in OpenAI's strict mode), which is narrower than JSON Schema.
"""

from __future__ import annotations

import math
from typing import Any

from interlock.structured.schema_choice import exclusive
from interlock.structured.schema_keywords import (
    OF_TYPE,
    Schema,
    SchemaError,
    check_keywords,
    constraints,
    join,
    shown,
)
from interlock.structured.schema_merge import merged
from interlock.structured.schema_strings import string_node
from interlock.structured.schema_values import counts_of, enumeration, number, types_of

MAX_DEPTH = 64
MAX_NESTING = 4 * MAX_DEPTH
MAX_NODES = 10_000


def exact_schema(schema: object) -> Schema:
    """The rewritten schema.

    Raises:
        SchemaError: it is no JSON schema, or a keyword cannot be enforced.
    """
    if not isinstance(schema, dict | bool):
        raise SchemaError("", f"a JSON schema is an object, not {shown(schema)}")
    _check_nesting(schema)
    return _Writer(schema).write()


def _check_nesting(schema: Schema | bool) -> None:
    """Values of enumerations are walked by Python's own recursion, so nesting is bounded as a whole."""
    level: list[Any] = [schema]
    for _ in range(MAX_NESTING):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    if level:
        raise SchemaError("", f"the schema is too deep ({MAX_NESTING} levels of objects and lists at most)")


class _Writer:
    def __init__(self, root: Schema | bool) -> None:
        self._root = root
        self._names: dict[str, str] = {}
        self._definitions: Schema = {}
        self._nodes = 0

    def write(self) -> Schema:
        result = self._node(self._root, "", 0)
        return {**result, "$defs": self._definitions} if self._definitions else result

    def _node(self, schema: object, path: str, depth: int) -> Schema:
        self._nodes += 1
        if self._nodes > MAX_NODES or depth > MAX_DEPTH:
            raise SchemaError(
                path, f"the schema is too large ({MAX_NODES} parts, {MAX_DEPTH} levels at most)"
            )
        if schema is True:
            return {}
        if schema is False:
            raise SchemaError(path, "the schema false allows nothing")
        if not isinstance(schema, dict):
            raise SchemaError(path, f"expected a schema (an object or true), got {shown(schema)}")
        check_keywords(schema, path)
        rest = constraints(schema)
        if "$ref" in rest:
            return self._reference(rest, path, depth)
        if "allOf" in rest:
            return self._node(self._flattened(rest, path, frozenset()), path, depth + 1)
        for keyword in ("anyOf", "oneOf"):
            if keyword in rest:
                return self._branches(rest, keyword, path, depth)
        if "const" in rest or "enum" in rest:
            return enumeration(rest, path)
        return self._typed(rest, path, depth)

    # ---- references and combinations

    def _reference(self, schema: Schema, path: str, depth: int) -> Schema:
        if len(schema) > 1:
            return self._node(self._flattened(schema, path, frozenset()), path, depth + 1)
        pointer = schema["$ref"]
        target = self._target(pointer, path)
        if pointer not in self._names:
            name = self._names[pointer] = f"d{len(self._names)}"
            self._definitions[name] = {}
            self._definitions[name] = self._node(target, str(pointer), depth + 1)
        return {"$ref": f"#/$defs/{self._names[pointer]}"}

    def _target(self, pointer: object, path: str) -> Any:
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise SchemaError(
                path, f"$ref {shown(pointer)} is not inside this schema; it must begin with '#'"
            )
        node: Any = self._root
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict) and key in node:
                node = node[key]
            elif isinstance(node, list) and key.isdigit() and int(key) < len(node):
                node = node[int(key)]
            else:
                raise SchemaError(path, f"$ref {shown(pointer)} points to nothing")
        return node

    def _flattened(self, schema: object, path: str, through: frozenset[str]) -> Schema:
        """``schema`` without ``allOf`` and ``$ref`` at its top: their constraints merged into one object."""
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            raise SchemaError(path, f"cannot be combined with {shown(schema)}")
        check_keywords(schema, path)
        result = constraints(schema, without=("allOf", "$ref"))
        parts = schema.get("allOf", [])
        if not isinstance(parts, list) or ("allOf" in schema and not parts):
            raise SchemaError(path, "allOf must be a list with at least one schema")
        if "$ref" in schema:
            pointer = schema["$ref"]
            target = self._target(pointer, path)
            if pointer in through:
                raise SchemaError(path, f"$ref {shown(pointer)} refers to itself")
            result = self._merge(result, self._flattened(target, path, through | {pointer}), path)
        for part in parts:
            result = self._merge(result, self._flattened(part, path, through), path)
        return result

    def _merge(self, one: Schema, other: Schema, path: str) -> Schema:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise SchemaError(path, f"the schema is too large ({MAX_NODES} parts at most)")
        try:
            return merged(one, other)
        except ValueError as error:
            raise SchemaError(path, str(error)) from None

    def _branches(self, schema: Schema, keyword: str, path: str, depth: int) -> Schema:
        branches = schema[keyword]
        if not isinstance(branches, list) or not branches:
            raise SchemaError(path, f"{keyword} must be a list with at least one schema")
        beside = {key: value for key, value in schema.items() if key != keyword}
        written = []
        for index, branch in enumerate(branches):
            where = join(path, f"{keyword}.{index}")
            if beside:
                branch = self._merge(beside, self._flattened(branch, where, frozenset()), where)
            if branch is not False:
                written.append(self._node(branch, where, depth + 1))
        if not written:
            raise SchemaError(path, f"{keyword} allows nothing")
        if len(written) == 1:
            return written[0]
        apart = exclusive(written, self._definitions) if keyword == "oneOf" else written
        return {keyword: written} if apart is None else {"anyOf": apart}

    # ---- schemas of one type

    def _typed(self, schema: Schema, path: str, depth: int) -> Schema:
        types = types_of(schema, path)
        if not types:
            return {}
        written = [self._of_type(kind, schema, path, depth) for kind in types]
        return {"anyOf": written} if len(written) > 1 else written[0]

    def _of_type(self, kind: str, schema: Schema, path: str, depth: int) -> Schema:
        keywords = OF_TYPE.get("number" if kind == "integer" else kind, frozenset())
        own = {key: value for key, value in schema.items() if key in keywords}
        match kind:
            case "object":
                return self._object(own, path, depth)
            case "array":
                return self._array(own, path, depth)
            case "string":
                try:
                    return string_node(own)
                except ValueError as error:
                    raise SchemaError(path, str(error)) from None
            case "number" | "integer":
                return number(kind, own, path)
        return {"type": kind}

    def _object(self, schema: Schema, path: str, depth: int) -> Schema:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict):
            raise SchemaError(path, f"properties must be an object, not {shown(properties)}")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise SchemaError(path, "required must be a list of names")
        more = schema.get("additionalProperties", schema.get("unevaluatedProperties"))
        if more is not None and not isinstance(more, dict | bool):
            raise SchemaError(path, f"additionalProperties must be a schema, not {shown(more)}")
        written = self._properties(properties, required, more, path, depth)
        result: Schema = {"type": "object"}
        if written:
            result["properties"] = written
        if required:
            result["required"] = list(dict.fromkeys(required))
        counted = counts_of(schema, ("minProperties", "maxProperties"), path)
        named = [key for key in ("patternProperties", "propertyNames") if key in schema]
        if named and (written or len(named) > 1 or counted or isinstance(more, dict)):
            raise SchemaError(path, f"{named[0]} cannot be enforced together with other keywords of objects")
        if "patternProperties" in schema:
            patterns = schema["patternProperties"]
            if not isinstance(patterns, dict) or len(patterns) != 1:
                raise SchemaError(path, "patternProperties can be enforced with one pattern only")
            result["patternProperties"] = {
                pattern: self._node(value, join(path, "patternProperties"), depth + 1)
                for pattern, value in patterns.items()
            }
            result["additionalProperties"] = False
            return result
        if "propertyNames" in schema:
            names = self._node({"type": "string", **_mapping(schema["propertyNames"], path)}, path, depth + 1)
            return {**result, "propertyNames": names}
        if isinstance(more, dict) or (more is True and written):
            result["additionalProperties"] = self._node(more, join(path, "additionalProperties"), depth + 1)
        elif more is False:
            result["additionalProperties"] = False
        return self._counted_object(result, counted, bool(written), path)

    def _properties(self, given: Schema, required: list[str], more: object, path: str, depth: int) -> Schema:
        """The schema of each named property, also of those that only ``required`` names."""
        written: Schema = {}
        for name, value in given.items():
            if value is not False or name in required:
                written[name] = self._node(value, join(path, f"properties.{name}"), depth + 1)
        for name in required:
            if name not in written:
                if more is False:
                    raise SchemaError(path, f"{shown(name)} is required and not allowed")
                rest = True if more is None else more
                written[name] = self._node(rest, join(path, "additionalProperties"), depth + 1)
        return written

    def _counted_object(self, result: Schema, counted: Schema, has_names: bool, path: str) -> Schema:
        """Counts are exact for named properties; free names may repeat: only upper limits hold."""
        is_open = result.get("additionalProperties", not has_names) is not False
        if is_open and counted.get("minProperties", 0) > len(result.get("required", [])) + 1:
            raise SchemaError(path, "minProperties cannot be enforced for names that are not listed")
        if is_open and counted and "additionalProperties" not in result:
            result["additionalProperties"] = {}
        return {**result, **counted}

    def _array(self, schema: Schema, path: str, depth: int) -> Schema:
        first, items = schema.get("prefixItems", []), schema.get("items")
        if isinstance(items, list):
            first, items = items, schema.get("additionalItems")
        if not isinstance(first, list):
            raise SchemaError(path, "prefixItems must be a list of schemas")
        counted = counts_of(schema, ("minItems", "maxItems"), path)
        least, most = counted.get("minItems", 0), counted.get("maxItems", math.inf)
        if schema.get("uniqueItems") not in (None, False) and most > 1:
            raise SchemaError(path, "uniqueItems cannot be enforced; leave it out and check the answer")
        if items is None:
            items = schema.get("unevaluatedItems", None if first else True)
        if first and items is None:
            items = least > len(first)
        first = first[: int(min(most, len(first)))]
        if items is False and least > len(first):
            raise SchemaError(path, f"minItems {least} is more than the {len(first)} items that are allowed")
        result: Schema = {"type": "array", **counted}
        if first:
            result["prefixItems"] = [
                self._node(item, join(path, f"prefixItems.{index}"), depth + 1)
                for index, item in enumerate(first)
            ]
        if first and (items is False or most <= len(first)):
            result["items"] = False
        elif items is False:
            return {"type": "array", "maxItems": 0}
        else:
            result["items"] = self._node(items, join(path, "items"), depth + 1)
        return result


def _mapping(value: object, path: str) -> Schema:
    if not isinstance(value, dict):
        raise SchemaError(path, f"expected a schema, got {shown(value)}")
    return value
