"""The body of ``POST /v1/responses``: the part of OpenAI's Responses API that is about text and functions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from interlock.server.protocol import Body, SamplingFields


class TextFormat(Body):
    """What the answer must match."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[Any, Field(alias="schema")] = None
    strict: bool | None = None


class TextSettings(Body):
    """``format`` as ``response_format`` of chat."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningSettings(Body):
    """``effort`` goes to the chat template; summaries are not made."""

    effort: str | None = None
    summary: None = None
    generate_summary: None = None


class FunctionChoice(Body):
    """Forces a call of one function."""

    type: Literal["function"]
    name: str


class ObfuscationOptions(Body):
    """Streams are not padded with noise."""

    include_obfuscation: Literal[False] | None = None


class ResponsesBody(SamplingFields):
    """Fields without effect here are accepted at values that ask for nothing."""

    model: str
    input: Any
    instructions: str | None = None
    stream: bool | None = False
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    previous_response_id: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    store: bool | None = None
    background: Literal[False] | None = None
    conversation: None = None
    prompt: None = None
    max_tool_calls: None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    stream_options: ObfuscationOptions | None = None
    top_logprobs: Literal[0] | None = None
    truncation: Literal["disabled"] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "default"] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
