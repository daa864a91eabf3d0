"""From a chat body to an answer that only has to run, for ``/v1/chat/completions`` and ``/v1/responses``."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from interlock.engine.messages import SamplingParams
from interlock.server.chat_output import OutputFormat
from interlock.server.chat_prompt import render_chat
from interlock.server.context import ServerContext
from interlock.server.errors import bad_request
from interlock.server.generation import Generation
from interlock.server.meeting import meetings
from interlock.server.prompts import Prompt, encode_text
from interlock.server.protocol import ChatBody
from interlock.server.sampling import check_logprobs, sampling_params
from interlock.server.settings import ServerSettings
from interlock.server.structured_output import Wish, checked
from interlock.server.tools import checked_tools, wished_chat_grammar
from interlock.structured.spec import GrammarSpec


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """Everything that can be refused has been when it exists.

    Attributes:
        form: how the answers' texts are read.
    """

    request_id: str
    generation: Generation
    form: OutputFormat


async def prepare_chat(
    body: ChatBody, context: ServerContext, arrival: float, *, prefix: str
) -> PreparedChat:
    """Check ``body`` and make its engine requests.

    Args:
        prefix: of the request's id.

    Raises:
        ApiError: the request is refused.
    """
    context.check_model(body.model)
    _check_fields(body, context.settings)
    tools = checked_tools(body)
    formats = context.chat_formats
    wish = wished_chat_grammar(body, tools, formats.parser)
    n = body.n or 1
    context.check_choices(1, n)
    text = render_chat(body, context.tokenizer)
    ids = await encode_text(context.tokenizer, text, add_special_tokens=bool(body.add_special_tokens))
    if not ids:
        raise bad_request("the chat template renders these messages to no tokens", param="messages")
    prompt = Prompt(tuple(ids), text)
    sampling = _sampling(body, context, prompt)
    grammar = None if wish is None else await _grammar(wish, text, context)
    context.check_queue()
    request_id = f"{prefix}{uuid.uuid4().hex}"
    generation = Generation(
        context,
        prompts=[prompt],
        samplings=[sampling],
        n=n,
        request_id=request_id,
        priority=body.priority or 0,
        arrival=arrival,
        meetings=meetings(body, context.engine.plan, prompts=1, n=n),
        grammar=grammar,
        kept_tokens=formats.markers,
        timeout=body.timeout,
    )
    form = formats.output(
        text,
        [] if body.tool_choice == "none" else tools,
        single_call=body.parallel_tool_calls is False,
        separate=body.separate_reasoning is not False,
        show=body.include_reasoning is not False,
    )
    return PreparedChat(request_id, generation, form)


async def _grammar(wish: Wish, prompt: str, context: ServerContext) -> GrammarSpec:
    """The constraint of an answer to ``prompt``, after the reasoning that may come first."""
    return await checked((wish[0], context.chat_formats.constrained(wish[1], prompt)), context)


def _sampling(body: ChatBody, context: ServerContext, prompt: Prompt) -> SamplingParams:
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = context.limit.answer_tokens(
        len(prompt.token_ids), getattr(body, name), None, prompt_param="messages", answer_param=name
    )
    return sampling_params(
        body,
        settings=context.settings,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        vocab_size=context.vocab_size,
    )


def _check_fields(body: ChatBody, settings: ServerSettings) -> None:
    check_logprobs("top_logprobs", body.top_logprobs, settings.max_logprobs)
    check_logprobs("prompt_logprobs", body.prompt_logprobs, settings.max_logprobs)
    both = (body.max_tokens, body.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise bad_request(
            f"max_tokens {both[0]} and max_completion_tokens {both[1]} differ; give one of them",
            param="max_tokens",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", param="top_logprobs")
    if body.prompt_logprobs is not None and body.stream:
        raise bad_request("prompt_logprobs is not available in streams", param="prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream: true", param="stream_options")
