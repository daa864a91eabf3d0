"""Endpoints that tell about the server: models, health, metrics, plan, version; and the cache flush."""

from __future__ import annotations

import asyncio
import time
from importlib.metadata import version
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from interlock.server.context import ServerContext
from interlock.server.errors import ApiError
from interlock.server.load_view import experts_json, load_json
from interlock.server.metrics import plan_digest
from interlock.server.plan_view import plan_view

_POLL_SECONDS = 0.02


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value, enc_hook=str), status, media_type="application/json")


def info_router(context: ServerContext) -> APIRouter:
    """The endpoints, bound to ``context``."""
    router = APIRouter()
    _add_models(router, context)
    _add_probes(router, context)
    _add_views(router, context)
    _add_flush(router, context)
    return router


def _add_models(router: APIRouter, context: ServerContext) -> None:
    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": context.created,
            "owned_by": "interlock",
            "max_model_len": context.engine.plan.max_model_len,
        }

    @router.get("/v1/models")
    async def models() -> Response:
        """Models that are served."""
        return _json({"object": "list", "data": [card(name) for name in context.settings.model_names]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """One model."""
        context.check_model(name)
        return _json(card(name))


def _add_probes(router: APIRouter, context: ServerContext) -> None:
    @router.get("/health")
    async def health() -> Response:
        """200 while the engine steps or idles as it should, else 503 with the reason: for restarts."""
        reason = context.engine.health()
        if reason is None:
            return _json({"status": "healthy"})
        return _json({"status": "unhealthy", "reason": reason}, 503)

    @router.get("/ready")
    async def ready() -> Response:
        """200 while new requests are taken, else 503 with the reason: for load balancers."""
        reason = context.engine.health()
        if reason is not None:
            return _json({"status": "unhealthy", "reason": reason}, 503)
        if not context.gate.is_open:
            return _json({"status": "draining", "in_flight": context.gate.in_flight}, 503)
        return _json({"status": "ready"})


def _add_views(router: APIRouter, context: ServerContext) -> None:
    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text format."""
        return Response(context.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/load")
    async def load() -> Response:
        """Requests, tokens a second and KV pages now, and their course over the last minutes."""
        return _json(load_json(context.engine, context.live_requests()))

    @router.get("/experts")
    async def experts() -> Response:
        """Rows that each expert and each rank received in the counted steps of the last minute."""
        return _json(experts_json(context.engine))

    @router.get("/plan")
    async def plan() -> Response:
        """The launch plan with provenance, and what each rank observed. Holds no secret: the plan knows only
        whether a key is set."""
        engine = context.engine
        receipts = {str(rank): items for rank, items in engine.receipts.items()}
        view = plan_view(engine.plan, engine.receipts)
        return _json(
            {"digest": plan_digest(engine.plan), "plan": engine.plan, "receipts": receipts, "view": view}
        )

    @router.get("/version")
    async def version_() -> Response:
        """Version of the package, and whether requests need an API key."""
        return _json(
            {"version": version("interlock"), "api_key_required": context.settings.api_key is not None}
        )


def _add_flush(router: APIRouter, context: ServerContext) -> None:
    @router.post("/flush_cache")
    async def flush_cache(wait: Annotated[float, Query(ge=0, le=600, allow_inf_nan=False)] = 0.0) -> Response:
        """Empty the prefix cache; while requests run, 409 or wait up to ``wait`` seconds."""
        deadline = time.monotonic() + wait
        while (live := context.live_requests()) and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
        if live:
            raise ApiError(
                409,
                f"not flushed: {live} requests are live; try again when idle, or with ?wait=SECONDS",
                code="busy",
            )
        await context.engine.flush_cache()
        return _json({"status": "flushed"})
