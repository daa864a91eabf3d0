"""Grammars put together from grammars, as structural tags."""

from __future__ import annotations

import json
from typing import Any

from interlock.structured.compiler import MAX_WHITESPACE
from interlock.structured.spec import GrammarSpec

_BLANKS = {"type": "regex", "pattern": "[ \\n]{0,4}"}


def either(one: GrammarSpec, other: GrammarSpec) -> GrammarSpec:
    """What matches one of the two."""
    return _structural({"type": "or", "elements": [_form(one), _form(other)]})


def after_reasoning(answer: GrammarSpec, opening: str, closing: str) -> GrammarSpec:
    """A reasoning and then ``answer``.

    Args:
        opening: begins the reasoning, which may be left out; "" for a text that begins inside it.
    """
    thought: list[dict[str, Any]] = [
        {"type": "any_text", "excludes": [closing]},
        {"type": "const_string", "value": closing},
        _BLANKS,
    ]
    if not opening:
        return _structural({"type": "sequence", "elements": [*thought, _form(answer)]})
    block = {"type": "sequence", "elements": [{"type": "const_string", "value": opening}, *thought]}
    optional = {"type": "optional", "content": block}
    return _structural({"type": "sequence", "elements": [optional, _form(answer)]})


def _form(spec: GrammarSpec) -> dict[str, Any]:
    match spec.kind:
        case "json_schema":
            schema = json.loads(spec.text)
            return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_WHITESPACE}
        case "regex":
            return {"type": "regex", "pattern": spec.text}
        case "ebnf":
            return {"type": "grammar", "grammar": spec.text}
        case "structural_tag":
            form: dict[str, Any] = json.loads(spec.text)["format"]
            return form


def _structural(form: dict[str, Any]) -> GrammarSpec:
    text = json.dumps({"type": "structural_tag", "format": form}, ensure_ascii=False)
    return GrammarSpec(kind="structural_tag", text=text)
