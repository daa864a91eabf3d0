"""Request bodies of the OpenAI API, as pydantic models at the edge of the server.

Unknown fields are refused. Fields of the OpenAI API that have no effect here are accepted at the values
that ask for nothing, and refused otherwise, so that no field is silently ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Host = Annotated[str, Field(min_length=1, max_length=255)]
Port = Annotated[int, Field(ge=1, le=65535)]
Room = Annotated[int, Field(ge=0, le=2**63 - 1)]
MAX_N = 128


class Body(BaseModel):
    """A JSON object of a request: unknown fields and values of another type are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)


class StreamOptions(Body):
    """``continuous_usage_stats`` (vLLM) puts the usage so far in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] | None = None


class JsonSchemaFormat(Body):
    """``strict`` changes nothing: a schema is always enforced in full."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[Any, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's way to constrain an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body):
    """vLLM's way; exactly one field."""

    json_: Annotated[Any, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None


class SamplingFields(Body):
    """How tokens are drawn and when an answer ends; all endpoints that generate have them. None means: use
    the server's default."""

    min_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: dict[str, float] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Any = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: Int32 | None = None
    timeout: Annotated[float, Field(gt=0, le=86_400)] | None = None


class GenerationBody(SamplingFields):
    """Fields that completions and chat share."""

    model: str
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    max_tokens: Count | None = None
    prompt_logprobs: Count | None = None
    return_tokens_as_token_ids: bool | None = None

    bootstrap_host: Host | list[Host | None] | None = None
    bootstrap_port: Port | list[Port | None] | None = None
    bootstrap_room: Room | list[Room | None] | None = None
    no_stop_trim: Literal[False] | None = None
    return_hidden_states: Literal[False] | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionBody(GenerationBody):
    """``POST /v1/completions``."""

    prompt: Any
    logprobs: Count | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    suffix: Literal[""] | None = None
    add_special_tokens: bool | None = None


class ChatMessage(Body):
    """One message. ``content`` is a string, a list of text parts or, for assistants, null."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Any = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: Any = None
    audio: None = None
    function_call: None = None


class TemplateBody(Body):
    """Fields that decide how messages become a prompt."""

    messages: list[ChatMessage]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ToolName(Body):
    """A function by its name."""

    name: str


class NamedToolChoice(Body):
    """Forces a call of one function."""

    type: Literal["function"]
    function: ToolName


class ChatBody(GenerationBody, TemplateBody):
    """``POST /v1/chat/completions``."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: Literal[True] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None
    audio: None = None
    prediction: None = None
    web_search_options: None = None
    functions: None = None
    function_call: Literal["none", "auto"] | None = None


class TokenizeBody(Body):
    """``POST /tokenize``: either ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool = False
