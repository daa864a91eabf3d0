"""Builds the HTTP application: an OpenAI-compatible API in front of an engine."""

from __future__ import annotations

import time

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from interlock.engine.client_protocol import EngineClient
from interlock.server.auth import ApiKeyMiddleware
from interlock.server.chat import chat_router
from interlock.server.chat_formats import ChatFormats
from interlock.server.completions import completions_router
from interlock.server.context import ServerContext
from interlock.server.cors import cors_policy
from interlock.server.errors import install_error_handlers
from interlock.server.gate import Gate, GateMiddleware
from interlock.server.info import info_router
from interlock.server.metrics import Metrics, plan_digest
from interlock.server.page_router import page_router
from interlock.server.prompts import ContextLimit
from interlock.server.refusals import refusals_router
from interlock.server.request_log import RequestLogMiddleware
from interlock.server.responses import responses_router
from interlock.server.settings import ServerSettings
from interlock.server.token_names import TokenNames
from interlock.server.tokens import tokens_router
from interlock.server.tracing import NoTracer, Tracer
from interlock.structured.checker import GrammarChecker
from interlock.tokenizer import Tokenizer


def create_app(
    engine: EngineClient, tokenizer: Tokenizer, settings: ServerSettings, *, tracer: Tracer | None = None
) -> FastAPI:
    """The application. ``app.state.context`` holds what its endpoints share.

    There is no CORS header unless asked for, and no interactive documentation (it would load scripts from
    elsewhere); ``/openapi.json`` describes the API.
    """
    context = ServerContext(
        engine=engine,
        tokenizer=tokenizer,
        settings=settings,
        metrics=Metrics(engine, settings.model_names[0]),
        names=TokenNames(tokenizer),
        chat_formats=ChatFormats.of(tokenizer, settings),
        grammars=GrammarChecker(engine.plan),
        tracer=tracer or NoTracer(),
        gate=Gate(),
        limit=ContextLimit.from_plan(engine.plan),
        vocab_size=min(tokenizer.vocab_size, engine.plan.card.vocab_size),
        created=int(time.time()),
        fingerprint=f"plan-{plan_digest(engine.plan)}",
    )
    app = FastAPI(title="Interlock", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.context = context
    routers = (completions_router, chat_router, responses_router, tokens_router, refusals_router, info_router)
    for router in routers:
        app.include_router(router(context))
    app.include_router(page_router())
    install_error_handlers(app, context.metrics.rejected)
    rejected = context.metrics.rejected
    app.add_middleware(GateMiddleware, gate=context.gate, on_rejected=rejected)
    if settings.api_key is not None:
        app.add_middleware(ApiKeyMiddleware, api_key=settings.api_key, on_rejected=rejected)
    if settings.cors_origins:
        app.add_middleware(CORSMiddleware, **cors_policy(settings.cors_origins))
    app.add_middleware(RequestLogMiddleware)
    return app
