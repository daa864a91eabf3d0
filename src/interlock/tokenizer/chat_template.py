"""Chat templates with the semantics of Hugging Face, in jinja2's immutable sandbox.

A template comes with a checkpoint and is not trusted: the sandbox lets it format text, not reach Python.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from interlock.errors import RequestError

Message = Mapping[str, Any]


class _GenerationTag(Extension):
    """``{% generation %}`` marks what the assistant wrote, for training; here its body is plain output."""

    tags = {"generation"}  # noqa: RUF012 - the attribute that jinja2 reads

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes for HTML, which a prompt must not."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplates:
    """The named templates of a model ("default", "tool_use", ...).

    Args:
        sources: template text by name; empty for a model without a chat template.
        special_tokens: what templates see as ``bos_token``, ``eos_token``, ...
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, Any]) -> None:
        self.sources = dict(sources)
        self.special_tokens = dict(special_tokens)
        self._compiled: dict[str, jinja2.Template] = {}

    @cached_property
    def _environment(self) -> ImmutableSandboxedEnvironment:
        return _environment()

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation.

        Args:
            tools: JSON schemas of functions; a template named "tool_use" is then preferred.
            add_generation_prompt: end with the header of an assistant's turn.
            continue_final_message: end inside the last message, so that the model goes on with it.
            variables: further template variables, such as ``enable_thinking``.

        Raises:
            RequestError: no template, or the template refuses or cannot render these messages.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other; set one of them",
                param="continue_final_message",
            )
        reserved = {"messages", "tools", "add_generation_prompt"} & variables.keys()
        if reserved:
            raise RequestError(
                f"the template variable {min(reserved)} is reserved", param="chat_template_kwargs"
            )
        values = {
            **self.special_tokens,
            "documents": None,
            **variables,
            "messages": messages,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._render(self._choose(has_tools=bool(tools)), values)
        return _cut_after_last(text, messages) if continue_final_message else text

    def _choose(self, *, has_tools: bool) -> str:
        if has_tools and "tool_use" in self.sources:
            return "tool_use"
        if "default" in self.sources:
            return "default"
        raise RequestError(
            "this model has no chat template, so messages cannot be turned into a prompt; send the prompt as "
            "text to /v1/completions, or add a chat_template.jinja to the model folder"
            + (f" (it has only templates named {', '.join(self.sources)})" if self.sources else ""),
            param="messages",
            code="no_chat_template",
        )

    def _render(self, name: str, values: Mapping[str, Any]) -> str:
        try:
            template = self._compiled.get(name)
            if template is None:
                template = self._compiled[name] = self._environment.from_string(self.sources[name])
            return template.render(values)
        except Exception as error:  # a template is a program of the checkpoint's: it can raise anything
            reason = str(error) or type(error).__name__
            raise RequestError(
                f"the model's chat template does not accept these messages: {reason}",
                param="messages",
                code="chat_template_error",
            ) from error


def _cut_after_last(text: str, messages: Sequence[Message]) -> str:
    content = messages[-1].get("content") if messages else None
    if isinstance(content, list | tuple) and content:
        content = content[-1].get("text")
    if not isinstance(content, str) or content.strip() not in text:
        raise RequestError(
            "continue_final_message needs a last message whose text the chat template renders unchanged",
            param="continue_final_message",
        )
    end = text.rindex(content.strip()) + len(content.strip())
    trailing = content[len(content.rstrip()) :]
    return text[:end] + (trailing if text[end:].startswith(trailing) else "")
