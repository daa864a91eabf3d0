"""The ``openai`` package against a real server: sync, async, streams, tools, schemas, responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Literal

import jsonschema
import openai
import pydantic
import pytest

from tests.clients.conftest import MESSAGES, TOOL, WEATHER
from tests.e2e.processes import Served

MODEL = {"model": "tiny-random"}


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def test_chat_whole_and_streamed_say_the_same(client: openai.OpenAI) -> None:
    fields = {**MODEL, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**fields)
    stream = client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == (whole.choices[0].message.content or "")
    assert (
        chunks[-1].usage == whole.usage or chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    )


def test_many_at_once(served: Served) -> None:
    async def ask(client: openai.AsyncOpenAI, seed: int) -> str:
        fields = {**MODEL, "prompt": "x", "max_tokens": 16, "seed": seed}
        answer = await client.completions.create(**fields)
        stream = await client.completions.create(**fields, stream=True)
        streamed = "".join([chunk.choices[0].text async for chunk in stream])
        assert streamed == answer.choices[0].text
        return streamed

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, seed) for seed in range(16)))

    assert len(set(asyncio.run(all_of_them()))) > 1


@pytest.mark.parametrize("seed", range(3))
def test_json_schema(client: openai.OpenAI, seed: int) -> None:
    pytest.importorskip("xgrammar")
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
    answer = client.chat.completions.create(
        **MODEL, messages=MESSAGES, response_format=form, max_tokens=400, seed=seed
    )
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), WEATHER)


def test_parse_into_a_pydantic_model(client: openai.OpenAI) -> None:
    pytest.importorskip("xgrammar")

    class Step(pydantic.BaseModel):
        done: bool
        count: int

    class Plan(pydantic.BaseModel):
        steps: tuple[Step, Step]
        kind: Literal["slow", "fast"] | None

    answer = client.chat.completions.parse(
        **MODEL, messages=MESSAGES, response_format=Plan, max_tokens=600, seed=1
    )
    assert isinstance(answer.choices[0].message.parsed, Plan)


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_tool_call(client: openai.OpenAI, stream: bool) -> None:
    pytest.importorskip("xgrammar")
    choice = {"type": "function", "function": {"name": "get_weather"}}
    fields = {
        **MODEL,
        "messages": MESSAGES,
        "tools": [TOOL],
        "tool_choice": choice,
        "max_tokens": 400,
        "seed": 3,
    }
    if stream:
        with client.chat.completions.stream(**fields) as events:
            answer = events.get_final_completion()
    else:
        answer = client.chat.completions.create(**fields)
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), WEATHER)


def test_responses(client: openai.OpenAI) -> None:
    pytest.importorskip("xgrammar")
    form = {"type": "json_schema", "name": "aspect", "schema": {"enum": ["stop", "caution", "proceed"]}}
    fields = {
        **MODEL,
        "input": "Signal?",
        "max_output_tokens": 40,
        "temperature": 0,
        "text": {"format": form},
    }
    answer = client.responses.create(**fields)
    assert json.loads(answer.output_text) in form["schema"]["enum"]
    with client.responses.stream(**fields) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == answer.output_text


def test_errors_are_the_packages_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="'not' cannot be enforced"):
        client.chat.completions.create(
            **MODEL,
            messages=MESSAGES,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}},
        )
    with pytest.raises(openai.BadRequestError, match="no embedding head"):
        client.embeddings.create(**MODEL, input="x")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
