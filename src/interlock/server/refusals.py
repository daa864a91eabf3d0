"""Endpoints of the OpenAI API that this server does not have, with the reason."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from interlock.server.context import ServerContext
from interlock.server.errors import bad_request


def refusals_router(context: ServerContext) -> APIRouter:
    """The endpoints; they answer 400 whatever the body is."""
    router = APIRouter()

    @router.post("/v1/embeddings")
    async def embeddings() -> Response:
        """Refused: the served models generate text."""
        raise bad_request(
            f"{context.settings.model_names[0]} generates text and has no embedding head; serve an embedding "
            "model with an engine that has them",
            code="unsupported_endpoint",
        )

    return router
