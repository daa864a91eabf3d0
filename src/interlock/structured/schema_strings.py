"""Schemas of strings, rewritten so that the grammar compiler drops nothing."""

from __future__ import annotations

import re

from interlock.structured.schema_keywords import Schema

ENFORCED_FORMATS = frozenset(
    {
        *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid"),
        *("uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
    }
)
_META = re.compile(r"[.\[\](){}*+?|^$]|\\[^\W\dtnrfv]|\\\d")
_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}


def string_node(schema: Schema) -> Schema:
    """``schema`` has keywords of strings only. An unknown format is an annotation, as the standard has it.

    Raises:
        ValueError: keywords that cannot be enforced together.
    """
    schema = dict(schema)
    for key in ("pattern", "format"):
        if not isinstance(schema.get(key, ""), str):
            raise ValueError(f"{key} must be a string, not {schema[key]!r:.60}")
    if schema.get("format") not in ENFORCED_FORMATS:
        schema.pop("format", None)
    pattern = schema.get("pattern")
    lengths: Schema = {key: schema[key] for key in ("minLength", "maxLength") if key in schema}
    for key, value in lengths.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{key} must be a whole number of 0 or more, not {value!r:.60}")
    if lengths.get("minLength") == 0:
        del lengths["minLength"]
    chosen = [key for key in ("pattern", "format") if key in schema]
    if len(chosen) + bool(lengths) > 1:
        names = [*chosen, *lengths]
        raise ValueError(f"{names[0]} and {names[1]} cannot be enforced together; write one pattern")
    if pattern is not None:
        literal = _literal(pattern)
        return {"type": "string", "pattern": pattern} if literal is None else {"enum": [literal]}
    return {"type": "string", **lengths, **({"format": schema["format"]} if "format" in schema else {})}


def _literal(pattern: str) -> str | None:
    """The one string that a pattern without operators matches; the compiler would write it unescaped."""
    inner = pattern.removeprefix("^").removesuffix("$")
    if _META.search(inner) or inner.endswith("\\"):
        return None
    return re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[1]), inner, flags=re.DOTALL)
