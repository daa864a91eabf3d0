"""OpenAPI descriptions of bodies that endpoints parse themselves."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


def describes(model: type[BaseModel]) -> dict[str, Any]:
    """``openapi_extra`` of an endpoint whose JSON body is ``model``; nested models are inlined."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _inline(schema, definitions)}},
        }
    }


def _inline(node: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_inline(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inline(definitions[node["$ref"].rpartition("/")[2]], definitions)
    return {key: _inline(value, definitions) for key, value in node.items()}
