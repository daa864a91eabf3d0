"""Turns a Responses body into the chat body that means the same."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from interlock.server.errors import ApiError, bad_request
from interlock.server.protocol import ChatBody, SamplingFields
from interlock.server.responses_protocol import FunctionChoice, ResponsesBody

_FIELDS = (
    ("messages", "input"),
    ("max_completion_tokens", "max_output_tokens"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
)
_TEXT_PARTS = frozenset({"input_text", "output_text", "text"})


def chat_body(body: ResponsesBody) -> ChatBody:
    """The same request as a chat body.

    Raises:
        ApiError: 400 for what this server does not keep or take: stored conversations, other inputs than text
            and functions.
    """
    if body.previous_response_id is not None:
        raise bad_request(
            "responses are not stored here, so previous_response_id names nothing; send the whole "
            "conversation in input",
            param="previous_response_id",
            code="unsupported_value",
        )
    if body.store:
        raise bad_request("store: true is not offered: responses are not stored here", param="store")
    effort = body.reasoning.effort if body.reasoning else None
    fields: dict[str, Any] = {
        **{name: getattr(body, name) for name in SamplingFields.model_fields},
        "model": body.model,
        "messages": _messages(body),
        "stream": body.stream,
        "max_completion_tokens": body.max_output_tokens,
        "tools": _tools(body.tools),
        "tool_choice": _choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": effort,
        "chat_template_kwargs": body.chat_template_kwargs,
        "response_format": _format(body),
    }
    try:
        return ChatBody.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise bad_request(f"input cannot be read: {first['msg']}", param="input") from None


def own_error(error: ApiError) -> ApiError:
    """A refusal of the chat body in the words of this API's fields."""
    param = error.param
    for theirs, ours in _FIELDS:
        if param is not None and param.startswith(theirs):
            param = ours + param[len(theirs) :]
            break
    return ApiError(error.status, error.message, param=param, code=error.code, headers=error.headers)


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    if not isinstance(body.input, list) or not body.input:
        raise bad_request("input must be a text or a list of items", param="input")
    for index, item in enumerate(body.input):
        _append(messages, item, f"input.{index}")
    return messages


def _append(messages: list[dict[str, Any]], item: Any, param: str) -> None:
    if not isinstance(item, dict):
        raise bad_request(f"{param} must be an object", param=param)
    kind = item.get("type", "message")
    match kind:
        case "message":
            messages.append({"role": item.get("role"), "content": _text(item.get("content"), param)})
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            last = messages[-1] if messages else None
            if last is not None and last["role"] == "assistant":
                last.setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        case "function_call_output":
            content = _text(item.get("output"), param)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        case "reasoning":
            return
        case _:
            raise _unsupported(
                f"{param} is a {kind!r:.40}; this server takes messages and function calls", param
            )


def _text(content: Any, param: str) -> Any:
    if not isinstance(content, list):
        return content
    texts = []
    for position, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS:
            raise _unsupported(f"{param}.content.{position} is no text", f"{param}.content.{position}")
        texts.append({"type": "text", "text": part.get("text")})
    return texts


def _tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Functions lie flat in this API and one level deeper in the chat API."""
    if tools is None:
        return None
    return [
        {"type": tool.get("type"), "function": {key: value for key, value in tool.items() if key != "type"}}
        for tool in tools
    ]


def _choice(choice: str | FunctionChoice | None) -> Any:
    if isinstance(choice, FunctionChoice):
        return {"type": "function", "function": {"name": choice.name}}
    return choice


def _format(body: ResponsesBody) -> dict[str, Any] | None:
    wanted = body.text.format if body.text else None
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    schema = {"name": wanted.name, "schema": wanted.schema_, "strict": wanted.strict}
    return {"type": "json_schema", "json_schema": schema}


def _unsupported(message: str, param: str) -> ApiError:
    return bad_request(message, param=param, code="unsupported_value")
