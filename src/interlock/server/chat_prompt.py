"""Renders chat messages to prompt text through the tokenizer's own template."""

from __future__ import annotations

from typing import Any

import msgspec

from interlock.server.errors import bad_request
from interlock.server.protocol import ChatBody, ChatMessage, TemplateBody, TokenizeBody
from interlock.server.template_arguments import TemplateArguments
from interlock.tokenizer import Tokenizer

_RESERVED_KWARGS = {
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "conversation",
    "tokenize",
}


def render_chat(body: TemplateBody | TokenizeBody, tokenizer: Tokenizer) -> str:
    """The prompt of ``body.messages``.

    Text parts of one message are joined with newlines, the role "developer" is rendered as "system", and
    ``tool_choice: "none"`` leaves the tools out.

    Raises:
        ApiError: 400 for messages of a wrong shape.
        RequestError: the template refuses the messages, with the template's own words.
    """
    messages = [_template_message(message, index) for index, message in enumerate(body.messages or [])]
    if not messages:
        raise bad_request("messages is empty; give at least one message", param="messages")
    continue_final = bool(body.continue_final_message)
    if continue_final and body.add_generation_prompt:
        raise bad_request(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    if continue_final and not messages[-1].get("content"):
        raise bad_request("continue_final_message needs a final message with text", param="messages")
    kwargs = _template_kwargs(body)
    return tokenizer.apply_chat_template(
        messages,
        tools=_tools(body),
        add_generation_prompt=not continue_final and body.add_generation_prompt is not False,
        continue_final_message=continue_final,
        **kwargs,
    )


def _tools(body: TemplateBody | TokenizeBody) -> list[dict[str, Any]] | None:
    if isinstance(body, ChatBody) and body.tool_choice == "none":
        return None
    return body.tools or None


def _template_kwargs(body: TemplateBody | TokenizeBody) -> dict[str, Any]:
    kwargs = dict(body.chat_template_kwargs or {})
    for name in kwargs:
        if name in _RESERVED_KWARGS:
            raise bad_request(
                f"chat_template_kwargs may not set {name!r}; use the request field",
                param=f"chat_template_kwargs.{name}",
            )
    if isinstance(body, ChatBody) and body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    return kwargs


def _template_message(message: ChatMessage, index: int) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    rendered: dict[str, Any] = {"role": role, "content": _content_text(message, index)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            rendered[name] = value
    if message.tool_calls:
        rendered["tool_calls"] = [
            _template_tool_call(call, f"messages.{index}.tool_calls.{position}")
            for position, call in enumerate(message.tool_calls)
        ]
    return rendered


def _content_text(message: ChatMessage, index: int) -> str:
    content, param = message.content, f"messages.{index}.content"
    if isinstance(content, str):
        return content
    if content is None:
        if message.role == "assistant":
            return ""
        raise bad_request(f"{param} is missing", param=param)
    if not isinstance(content, list):
        raise bad_request(f"{param} must be a string or a list of text parts", param=param)
    texts: list[str] = []
    for position, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str) or part.keys() - {"type", "text"}:
            raise bad_request(
                f"{param}.{position} is no text part; this server takes {{'type': 'text', 'text': ...}} only",
                param=f"{param}.{position}",
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _template_tool_call(call: dict[str, Any], param: str) -> dict[str, Any]:
    """The API carries ``function.arguments`` as a JSON string; templates want an object, or a text."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(f"{param}.function.name is missing", param=f"{param}.function.name")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        text = arguments
        try:
            arguments = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise bad_request(
                f"{param}.function.arguments is not JSON: {error}", param=f"{param}.function.arguments"
            ) from None
        if isinstance(arguments, dict):
            arguments = TemplateArguments(arguments, text)
    return {**call, "function": {**function, "arguments": arguments}}
