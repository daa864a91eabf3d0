"""The ``tools`` and ``tool_choice`` of a chat request, checked, and the grammar that they ask for."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from interlock.server.errors import bad_request
from interlock.server.protocol import ChatBody, NamedToolChoice
from interlock.server.structured_output import Wish, schema_text, wished_grammar
from interlock.server.tool_parsers.base import Tool, ToolParser, among_text
from interlock.structured.forms import either
from interlock.structured.spec import GrammarSpec

MAX_TOOLS = 512
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_FIELDS = frozenset({"name", "description", "parameters", "strict"})
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def checked_tools(body: ChatBody) -> list[Tool]:
    """The functions that the client offers.

    Raises:
        ApiError: 400 for anything that is no function with a name and a schema, and for a ``tool_choice``
            that names none of them.
    """
    tools = body.tools or []
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"tools has {len(tools)} entries; at most {MAX_TOOLS} are allowed", param="tools")
    functions = [_function(tool, f"tools.{index}") for index, tool in enumerate(tools)]
    names = [function["name"] for function in functions]
    if len(set(names)) < len(names):
        raise bad_request("tools has two functions of one name", param="tools")
    choice = body.tool_choice
    if choice == "required" and not functions:
        raise bad_request("tool_choice required needs tools", param="tool_choice")
    if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
        raise bad_request(
            f"tool_choice names {choice.function.name[:64]!r}, which is not among the tools",
            param="tool_choice.function.name",
        )
    return functions


def wished_chat_grammar(
    body: ChatBody, tools: Sequence[Tool], parser: type[ToolParser] | None
) -> Wish | None:
    """The grammar of a chat answer: calls that are forced, a constrained text, or a choice of both.

    Raises:
        ApiError: 400, see ``wished_grammar`` and ``forced_calls``.
    """
    wish = wished_grammar(body)
    if not tools or body.tool_choice == "none":
        return wish
    if body.tool_choice in (None, "auto"):
        if parser is None:
            return wish
        if wish is None:
            return _strict_calls(body, tools, parser)
        return wish[0], either(wish[1], calls_grammar(body, tools, parser))
    if wish is not None:
        raise bad_request(
            f"tool_choice forces a call and {wish[0]} constrains the text; give one of them",
            param="tool_choice",
        )
    return "tool_choice", forced_calls(body, tools, parser)


def _strict_calls(body: ChatBody, tools: Sequence[Tool], parser: type[ToolParser]) -> Wish | None:
    """Any text, but calls as the tools' schemas have them, where a tool asks for that."""
    if not any(tool.get("strict") for tool in tools):
        return None
    _check_companions(body, "a strict tool")
    forced = json.loads(calls_grammar(body, tools, parser).text)
    form = among_text(forced, parser.opening, parallel=body.parallel_tool_calls is not False)
    return "tools", GrammarSpec(kind="structural_tag", text=json.dumps(form, ensure_ascii=False))


def _check_companions(body: ChatBody, what: str) -> None:
    if body.ignore_eos or body.min_tokens:
        name = "ignore_eos" if body.ignore_eos else "min_tokens"
        raise bad_request(f"{name} and {what} exclude each other", param=name)


def forced_calls(body: ChatBody, tools: Sequence[Tool], parser: type[ToolParser] | None) -> GrammarSpec:
    """The grammar of an answer that must be calls.

    Raises:
        ApiError: 400 when this server has no parser, or the parameters of a tool cannot be enforced.
    """
    if parser is None:
        raise bad_request(
            "tool_choice forces a call and this server knows no format of tool calls for its model; "
            "start it with --tool-call-parser",
            param="tool_choice",
        )
    _check_companions(body, "a forced tool_choice")
    return calls_grammar(body, tools, parser)


def calls_grammar(body: ChatBody, tools: Sequence[Tool], parser: type[ToolParser]) -> GrammarSpec:
    """One call or more of the tools that ``tool_choice`` leaves, in the model's own format."""
    choice = body.tool_choice
    wanted = [
        (index, tool)
        for index, tool in enumerate(tools)
        if not isinstance(choice, NamedToolChoice) or tool["name"] == choice.function.name
    ]
    schemas = [
        json.loads(schema_text(_parameters(tool), f"tools.{index}.function.parameters"))
        for index, tool in wanted
    ]
    parallel = body.parallel_tool_calls is not False and not isinstance(choice, NamedToolChoice)
    form = parser.structure([tool for _, tool in wanted], schemas, parallel=parallel)
    return GrammarSpec(kind="structural_tag", text=json.dumps(form, ensure_ascii=False))


def _parameters(tool: Tool) -> Any:
    parameters = tool.get("parameters")
    if not parameters:
        return _NO_PARAMETERS
    return {**parameters, "type": "object"} if "type" not in parameters else parameters


def _function(tool: dict[str, Any], param: str) -> Tool:
    if tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise bad_request(
            f"{param} must be {{'type': 'function', 'function': {{...}}}}; other tools are not offered here",
            param=param,
        )
    function: dict[str, Any] = tool["function"]
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bad_request(
            f"{param}.function.name must be 1 to 64 letters, digits, '_', '.' or '-'",
            param=f"{param}.function.name",
        )
    unknown = sorted(function.keys() - _FIELDS)
    if unknown:
        raise bad_request(
            f"unknown field {unknown[0][:60]!r} in {param}.function",
            param=f"{param}.function",
            code="unknown_field",
        )
    if not isinstance(function.get("parameters"), dict | None):
        raise bad_request(
            f"{param}.function.parameters must be a JSON schema", param=f"{param}.function.parameters"
        )
    return function
