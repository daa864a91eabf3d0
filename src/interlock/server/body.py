"""Reads a request body within limits and checks it against a protocol model."""

from __future__ import annotations

import difflib
import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from interlock.server.errors import ApiError, bad_request

_SHOWN_CHARS = 60
_BRANCH = re.compile(r"(literal|list|dict|constrained-\w+|nullable)[\[(]|[A-Z][a-z]+([A-Z][a-z]+)+$")

Model = TypeVar("Model", bound=BaseModel)


async def read_model(request: Request, model: type[Model], *, max_bytes: int) -> Model:
    """Parse the body of ``request`` as ``model``.

    Raises:
        ApiError: 415 for another content type than JSON, 413 for more than ``max_bytes``, 400 for
            malformed JSON and for fields that are unknown, of a wrong type or out of range.
    """
    _check_content_type(request.headers.get("content-type"))
    body = await _read_limited(request, max_bytes)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _explain(error, model) from None


def _check_content_type(header: str | None) -> None:
    if header is None:
        return
    media_type = header.partition(";")[0].strip().lower()
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        raise ApiError(415, f"content type {media_type[:_SHOWN_CHARS]!r}; send application/json")


async def _read_limited(request: Request, max_bytes: int) -> bytes:
    too_large = ApiError(413, f"the request body is larger than {max_bytes} bytes", code="body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and (len(declared) > 18 or int(declared) > max_bytes):
        raise too_large
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise too_large
        chunks.append(chunk)
    return b"".join(chunks)


def _explain(error: ValidationError, model: type[BaseModel]) -> ApiError:
    first = error.errors(include_url=False, include_context=False)[0]
    kind, location = first["type"], first["loc"]
    path = _path(location, keeps_last=kind == "extra_forbidden")
    if kind == "json_invalid":
        return bad_request(
            f"the body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}", code="invalid_json"
        )
    if not location:
        return bad_request(
            f"the body is {_shown(first['input'])}; expected a JSON object", code="invalid_json"
        )
    if kind == "extra_forbidden":
        return bad_request(_unknown_field(path, location, model), param=path, code="unknown_field")
    if kind == "missing":
        return bad_request(f"{path} is required", param=path, code="missing_field")
    if kind in ("value_error", "assertion_error"):
        return bad_request(first["msg"].removeprefix("Value error, "), param=path, code="invalid_value")
    message = first["msg"].removeprefix("Input should be ")
    return bad_request(
        f"{path} is {_shown(first['input'])}; expected {message}", param=path, code="invalid_value"
    )


def _path(location: tuple[int | str, ...], *, keeps_last: bool) -> str:
    """The place of an error as clients write it: without the names of the branches of a union."""
    last = len(location) - 1
    return ".".join(
        str(part)
        for index, part in enumerate(location)
        if index == 0 or (keeps_last and index == last) or not _BRANCH.match(str(part))
    )


def _unknown_field(path: str, location: tuple[int | str, ...], model: type[BaseModel]) -> str:
    shown = path if len(path) <= _SHOWN_CHARS else path[:_SHOWN_CHARS] + "..."
    message = f"unknown field {shown!r}"
    if len(location) == 1:
        nearest = difflib.get_close_matches(shown, model.model_fields, n=1)
        if nearest:
            message += f"; did you mean {nearest[0]!r}?"
    return message


def _shown(value: Any) -> str:
    if isinstance(value, dict | list) and len(value) > 8:
        return f"a {type(value).__name__} of {len(value)} entries"
    if isinstance(value, int) and value.bit_length() > 256:
        return "a huge integer"
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."
