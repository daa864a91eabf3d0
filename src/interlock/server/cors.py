"""Which web pages may ask this server, when any may."""

from __future__ import annotations

from typing import Any


def cors_policy(origins: tuple[str, ...]) -> dict[str, Any]:
    """Arguments of Starlette's ``CORSMiddleware``. Keys travel in a header, so no cookies are allowed."""
    return {
        "allow_origins": list(origins),
        "allow_methods": ["GET", "POST"],
        "allow_headers": ["Authorization", "Content-Type", "X-Request-Id"],
        "expose_headers": ["X-Request-Id", "Retry-After"],
        "allow_credentials": False,
        "max_age": 600,
    }
