"""Rewrites a JSON schema into an equal or narrower one of which the grammar compiler drops nothing.

The compiler ignores what it cannot express: keywords beside ``enum``, ``anyOf`` or ``$ref``, constraints of a
schema without ``type``, ``required`` names without a property, ``not``, ``uniqueItems`` and more. Here such a
schema is written out so that everything counts, or refused by name. An object with ``properties`` is closed
unless it has ``additionalProperties`` (as in OpenAI's strict mode), which is narrower than JSON Schema.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from interlock.errors import InterlockError
from interlock.structured.schema_choice import exclusive
from interlock.structured.schema_merge import merged
from interlock.structured.schema_strings import string_node

Schema = dict[str, Any]

MAX_DEPTH = 64
MAX_NODES = 10_000
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
_MAX_INTEGER = 2**53


class SchemaError(InterlockError):
    """A schema that is malformed or says what cannot be enforced; ``path`` is where (``properties.a``)."""

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        super().__init__(f"{path}: {problem}" if path else problem)


def exact_schema(schema: object) -> Schema:
    """The rewritten schema.

    Raises:
        SchemaError: it is no JSON schema, or a keyword cannot be enforced.
    """
    if not isinstance(schema, dict | bool):
        raise SchemaError("", f"a JSON schema is an object, not {_shown(schema)}")
    return _Writer(schema).write()


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
            raise SchemaError(path, f"expected a schema (an object or true), got {_shown(schema)}")
        self._check_keywords(schema, path)
        rest = {
            key: value
            for key, value in schema.items()
            if key not in ANNOTATIONS and not key.startswith("x-") and key not in ("$defs", "definitions")
        }
        if "$ref" in rest:
            return self._reference(rest, path, depth)
        if "allOf" in rest:
            return self._node(self._flattened(rest, path, frozenset()), path, depth + 1)
        for keyword in ("anyOf", "oneOf"):
            if keyword in rest:
                return self._branches(rest, keyword, path, depth)
        if "const" in rest or "enum" in rest:
            return _enumeration(rest, path)
        return self._typed(rest, path, depth)

    def _check_keywords(self, schema: Schema, path: str) -> None:
        known = ANNOTATIONS | STRUCTURE | frozenset().union(*OF_TYPE.values())
        for key in schema:
            if key in REFUSED:
                raise SchemaError(path, f"{key!r} cannot be enforced; {REFUSED[key]}")
            if key not in known and not key.startswith("x-"):
                raise SchemaError(path, f"{key[:40]!r} is no keyword of JSON Schema")

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
                path, f"$ref {_shown(pointer)} is not inside this schema; it must begin with '#'"
            )
        node: Any = self._root
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict) and key in node:
                node = node[key]
            elif isinstance(node, list) and key.isdigit() and int(key) < len(node):
                node = node[int(key)]
            else:
                raise SchemaError(path, f"$ref {_shown(pointer)} points to nothing")
        return node

    def _flattened(self, schema: object, path: str, through: frozenset[str]) -> Schema:
        """``schema`` without ``allOf`` and ``$ref`` at its top: their constraints merged into one object."""
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            raise SchemaError(path, f"cannot be combined with {_shown(schema)}")
        self._check_keywords(schema, path)
        skipped = ANNOTATIONS | {"allOf", "$ref", "$defs", "definitions"}
        result = {k: v for k, v in schema.items() if k not in skipped and not k.startswith("x-")}
        parts = schema.get("allOf", [])
        if not isinstance(parts, list) or ("allOf" in schema and not parts):
            raise SchemaError(path, "allOf must be a list with at least one schema")
        if "$ref" in schema:
            pointer = schema["$ref"]
            target = self._target(pointer, path)
            if pointer in through:
                raise SchemaError(path, f"$ref {_shown(pointer)} refers to itself")
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
            where = _join(path, f"{keyword}.{index}")
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
        types = _types(schema, path)
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
                return _number(kind, own, path)
        return {"type": kind}

    def _object(self, schema: Schema, path: str, depth: int) -> Schema:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict):
            raise SchemaError(path, f"properties must be an object, not {_shown(properties)}")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise SchemaError(path, "required must be a list of names")
        more = schema.get("additionalProperties", schema.get("unevaluatedProperties"))
        result: Schema = {"type": "object"}
        written: Schema = {}
        for name, value in properties.items():
            if value is False and name not in required:
                continue
            written[name] = self._node(value, _join(path, f"properties.{name}"), depth + 1)
        for name in required:
            if name not in written:
                if more is False:
                    raise SchemaError(path, f"{_shown(name)} is required and not allowed")
                rest = True if more is None else more
                written[name] = self._node(rest, _join(path, "additionalProperties"), depth + 1)
        if written:
            result["properties"] = written
        if required:
            result["required"] = list(dict.fromkeys(required))
        counted = _counts(schema, ("minProperties", "maxProperties"), path)
        named = [key for key in ("patternProperties", "propertyNames") if key in schema]
        if named and (written or len(named) > 1 or counted or isinstance(more, dict)):
            raise SchemaError(path, f"{named[0]} cannot be enforced together with other keywords of objects")
        if "patternProperties" in schema:
            patterns = schema["patternProperties"]
            if not isinstance(patterns, dict) or len(patterns) != 1:
                raise SchemaError(path, "patternProperties can be enforced with one pattern only")
            result["patternProperties"] = {
                pattern: self._node(value, _join(path, "patternProperties"), depth + 1)
                for pattern, value in patterns.items()
            }
            result["additionalProperties"] = False
            return result
        if "propertyNames" in schema:
            names = self._node({"type": "string", **_mapping(schema["propertyNames"], path)}, path, depth + 1)
            return {**result, "propertyNames": names}
        if isinstance(more, dict) or (more is True and written):
            result["additionalProperties"] = self._node(more, _join(path, "additionalProperties"), depth + 1)
        elif more is False:
            result["additionalProperties"] = False
        return self._counted_object(result, counted, bool(written), path)

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
        counted = _counts(schema, ("minItems", "maxItems"), path)
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
                self._node(item, _join(path, f"prefixItems.{index}"), depth + 1)
                for index, item in enumerate(first)
            ]
        if first and (items is False or most <= len(first)):
            result["items"] = False
        elif items is False:
            return {"type": "array", "maxItems": 0}
        else:
            result["items"] = self._node(items, _join(path, "items"), depth + 1)
        return result


def _types(schema: Schema, path: str) -> list[str]:
    """Types that the schema allows; without ``type`` those that its keywords speak of, [] for any."""
    given = schema.get("type")
    if given is None:
        return [kind for kind, keywords in OF_TYPE.items() if keywords & schema.keys()]
    types = given if isinstance(given, list) else [given]
    for kind in types:
        if kind not in TYPES:
            raise SchemaError(path, f"type {_shown(kind)} is none of {', '.join(TYPES)}")
    if not types:
        raise SchemaError(path, "type is an empty list")
    if "number" in types:
        types = [kind for kind in types if kind != "integer"]
    return list(dict.fromkeys(types))


def _enumeration(schema: Schema, path: str) -> Schema:
    values = [schema["const"]] if "const" in schema else schema["enum"]
    if not isinstance(values, list) or not values:
        raise SchemaError(path, "enum must be a list with at least one value")
    if "const" in schema and "enum" in schema:
        values = [value for value in values if value in schema["enum"]]
    beside = sorted(schema.keys() - {"type", "enum", "const"})
    if beside:
        raise SchemaError(path, f"{beside[0]!r} beside enum or const; list only the values that are allowed")
    if "type" in schema:
        types = _types(schema, path)
        values = [value for value in values if any(_is_of_type(value, kind) for kind in types)]
    if not values:
        raise SchemaError(path, "no value of enum has the type that is asked for")
    return {"enum": values}


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


def _number(kind: str, schema: Schema, path: str) -> Schema:
    for key, value in schema.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise SchemaError(path, f"{key} must be a number, not {_shown(value)}")
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


def _counts(schema: Schema, names: tuple[str, str], path: str) -> Schema:
    counts = {name: schema[name] for name in names if name in schema}
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_INTEGER:
            raise SchemaError(path, f"{name} must be a whole number of 0 or more, not {_shown(value)}")
    low, high = counts.get(names[0], 0), counts.get(names[1], math.inf)
    if low > high:
        raise SchemaError(path, f"{names[0]} {low} is more than {names[1]} {high}")
    return counts


def _mapping(value: object, path: str) -> Schema:
    if not isinstance(value, dict):
        raise SchemaError(path, f"expected a schema, got {_shown(value)}")
    return value


def _join(path: str, part: str) -> str:
    return f"{path}.{part[:60]}" if path else part[:60]


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
