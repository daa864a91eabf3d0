"""The real ``openai`` package against the server on a real port."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.server.fake_engine import FakeEngine

MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]


def test_completion(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script("All clear.")
    answer = client.completions.create(model="tiny", prompt="Signal?", max_tokens=50)
    assert answer.choices[0].text == "All clear."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len("All clear.") + 1
    assert answer.usage.prompt_tokens == len(engine.requests[0].token_ids)


def test_chat(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script("All clear.")
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert answer.choices[0].message.content == "All clear."
    assert answer.choices[0].message.role == "assistant"
    assert answer.object == "chat.completion"


def test_chat_stream(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script("Grüße, 漢字 👋")
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[1:-1]) == "Grüße, 漢字 👋"
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len("Grüße, 漢字 👋".encode()) + 1


def test_async_streams_side_by_side(base_url: str, engine: FakeEngine) -> None:
    engine.script("Hello there", delay=0.001)

    async def one(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.completions.create(
            model="tiny", prompt="Hi", max_tokens=40, stream=True, seed=seed
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def many() -> list[str]:
        async with openai.AsyncOpenAI(base_url=base_url + "/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, seed) for seed in range(20)))

    assert asyncio.run(many()) == ["Hello there"] * 20
    assert sorted(request.sampling.seed for request in engine.requests) == list(range(20))


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("other")
    assert error.value.code == "model_not_found"


def test_errors_are_the_packages_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="tiny", prompt="x", temperature=-1)
    assert error.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nope", messages=MESSAGES)


def test_error_in_mid_stream_raises(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script("abcdefgh", error_at=4)
    received = []

    def read() -> None:
        for chunk in client.completions.create(model="tiny", prompt="x", stream=True):
            received.append(chunk.choices[0].text)

    with pytest.raises(openai.APIError, match="scripted fault"):
        read()
    assert "".join(received) == "abcd"
