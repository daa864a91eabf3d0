"""Errors as clients see them: a status and OpenAI's ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from http import HTTPStatus

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from interlock.errors import EngineDeadError, RequestError

CLIENT_CLOSED_REQUEST = 499

_log = logging.getLogger("interlock.server")
_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


class ApiError(Exception):
    """A request that ends with ``status`` and the OpenAI error object.

    Args:
        status: HTTP status, 400 to 599.
        param: the request field at fault, as a dotted path.
        code: short machine-readable code.
        headers: extra response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        super().__init__(message)

    @property
    def type(self) -> str:
        """OpenAI's error type, a function of the status."""
        if self.status >= 500:
            return "server_error"
        return _TYPES.get(HTTPStatus(self.status), "invalid_request_error")

    def body(self) -> bytes:
        """The error object as JSON."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        return Response(self.body(), self.status, headers=self.headers, media_type="application/json")


def bad_request(message: str, *, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """A 400 that names the field at fault."""
    return ApiError(400, message, param=param, code=code)


def as_api_error(error: Exception) -> ApiError:
    """What a client is told about ``error``. Unforeseen errors keep their details in the log only."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.param, code=error.code)
    if isinstance(error, EngineDeadError):
        return ApiError(503, f"the engine is not running: {error}", code="engine_dead")
    _log.error("unforeseen error while answering a request", exc_info=error)
    return ApiError(500, "internal error; the server's log has the details", code="internal_error")


def install_error_handlers(app: FastAPI, on_rejected: Callable[[int], None]) -> None:
    """Make every error response of ``app`` carry the OpenAI error object; ``on_rejected`` counts statuses."""

    async def on_api_error(_request: Request, error: Exception) -> Response:
        api_error = as_api_error(error)
        on_rejected(api_error.status)
        return api_error.response()

    async def on_bad_query(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"][1:])
        return bad_request(f"{name}: {first['msg']}", param=name, code="invalid_value").response()

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = {
            404: f"no such endpoint: {request.method} {request.url.path}",
            405: f"{request.method} is not allowed on {request.url.path}",
        }.get(error.status_code, str(error.detail))
        return ApiError(error.status_code, message, headers=error.headers).response()

    async def on_disconnect(_request: Request, _error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    for kind in (ApiError, RequestError, EngineDeadError, Exception):
        app.add_exception_handler(kind, on_api_error)
    app.add_exception_handler(RequestValidationError, on_bad_query)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientDisconnect, on_disconnect)
