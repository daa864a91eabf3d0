"""``POST /tokenize`` and ``POST /detokenize``: the server's own tokenizer, for clients that count tokens."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from interlock.server.body import read_model
from interlock.server.chat_prompt import render_chat
from interlock.server.context import ServerContext
from interlock.server.errors import bad_request
from interlock.server.openapi import describes
from interlock.server.prompts import encode_text
from interlock.server.protocol import DetokenizeBody, TokenizeBody


def tokens_router(context: ServerContext) -> APIRouter:
    """The endpoints, bound to ``context``."""
    router = APIRouter()
    max_bytes = context.settings.max_body_bytes

    @router.post("/tokenize", openapi_extra=describes(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        """Token ids of a prompt, or of messages through the chat template."""
        body = await read_model(request, TokenizeBody, max_bytes=max_bytes)
        context.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give either prompt or messages", param="prompt")
        text = body.prompt if body.prompt is not None else render_chat(body, context.tokenizer)
        special = body.add_special_tokens
        if special is None:
            special = body.prompt is not None
        ids = await encode_text(context.tokenizer, text, add_special_tokens=special)
        answer: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": context.engine.plan.max_model_len,
            "tokens": ids,
        }
        if body.return_token_strs:
            answer["token_strs"] = [context.names.text(token_id) for token_id in ids]
        return Response(msgspec.json.encode(answer), media_type="application/json")

    @router.post("/detokenize", openapi_extra=describes(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """Text of token ids."""
        body = await read_model(request, DetokenizeBody, max_bytes=max_bytes)
        context.check_model(body.model)
        for token_id in body.tokens:
            if token_id >= context.vocab_size:
                raise bad_request(
                    f"tokens has {token_id}; ids are 0 to {context.vocab_size - 1}", param="tokens"
                )
        text = context.tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
        return Response(msgspec.json.encode({"prompt": text}), media_type="application/json")

    return router
