"""``/v1/responses``: bodies, objects and events as the real ``openai`` package reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from interlock.tokenizer import Tokenizer
from tests.server.conftest import Serve
from tests.server.fake_engine import FakeEngine, fake_plan
from tests.server.test_tool_parsers import TEXTS, TOOLS

FLAT_TOOLS = [{"type": "function", **function} for function in TOOLS]


@pytest.fixture
def served(serve: Serve) -> tuple[FakeEngine, httpx.Client]:
    engine = FakeEngine(plan=fake_plan(max_model_len=2048))
    return serve(engine, tool_call_parser="hermes", reasoning_parser="qwen3")


@pytest.fixture
def sdk(served: tuple[FakeEngine, httpx.Client]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served[1].base_url}/v1", api_key="x", max_retries=0) as client:
        yield client


def test_a_text(served: tuple[FakeEngine, httpx.Client], sdk: openai.OpenAI) -> None:
    engine, _ = served
    engine.script("All clear.", cached=3)
    answer = sdk.responses.create(model="tiny", instructions="Be short.", input="Signal?", temperature=0.5)
    assert answer.output_text == "All clear."
    assert answer.status == "completed"
    assert answer.usage.output_tokens == len("All clear.") + 1
    assert answer.usage.input_tokens_details.cached_tokens == 3
    assert answer.id.startswith("resp_")
    assert answer.store is False
    assert engine.requests[0].sampling.temperature == 0.5


def test_sampling_fields_of_chat_are_taken(served: tuple[FakeEngine, httpx.Client]) -> None:
    """Load generators fix the length of answers with fields that OpenAI's own API does not have."""
    engine, http = served
    own = {
        "ignore_eos": True,
        "min_tokens": 3,
        "top_k": 7,
        "min_p": 0.1,
        "stop_token_ids": [9],
        "priority": -2,
    }
    engine.script("abcdef")
    body = {"model": "tiny", "input": "x", "max_output_tokens": 16, "stop": None, **own}
    assert http.post("/v1/responses", json=body).status_code == 200
    (sent,) = engine.requests
    seen = {name: getattr(sent.sampling, name) for name in own if name not in ("priority", "stop_token_ids")}
    assert seen == {"ignore_eos": True, "min_tokens": 3, "top_k": 7, "min_p": 0.1}
    assert (sent.sampling.stop_token_ids, sent.priority, sent.sampling.max_tokens) == ((9,), -2, 16)
    engine.script("one two three")
    answer = http.post("/v1/responses", json={"model": "tiny", "input": "x", "stop": " two"}).json()
    assert answer["status"] == "completed"
    assert answer["output"][0]["content"][0]["text"] == "one"


def test_items_become_a_conversation(served: tuple[FakeEngine, httpx.Client], tokenizer: Tokenizer) -> None:
    engine, http = served
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Looking."}]},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Rom"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    ]
    engine.script("ok")
    assert http.post("/v1/responses", json={"model": "tiny", "input": items}).status_code == 200
    prompt = tokenizer.decode(engine.requests[0].token_ids)
    assert prompt.index("Weather?") < prompt.index("Looking.") < prompt.index("sunny")


def test_events_of_a_stream(served: tuple[FakeEngine, httpx.Client]) -> None:
    engine, http = served
    engine.script("<think>hm</think>yes")
    answer = http.post("/v1/responses", json={"model": "tiny", "input": "x", "stream": True})
    blocks = answer.text.strip().split("\n\n")
    events = [json.loads(block.split("\ndata: ")[1]) for block in blocks]
    assert [block.split("\n")[0] for block in blocks] == [f"event: {event['type']}" for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    names = [event["type"] for event in events]
    kept = [name for index, name in enumerate(names) if index == 0 or name != names[index - 1]]
    assert kept == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["reasoning", "message"]


def test_the_packages_stream_helper_joins_calls(
    served: tuple[FakeEngine, httpx.Client], sdk: openai.OpenAI
) -> None:
    """G20: text, then two calls, whole and streamed the same."""
    engine, _ = served
    engine.script(TEXTS["hermes"])
    whole = sdk.responses.create(model="tiny", input="Weather?", tools=FLAT_TOOLS)
    with sdk.responses.stream(model="tiny", input="Weather?", tools=FLAT_TOOLS) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response()
    assert kinds.count("response.function_call_arguments.done") == 2
    for answer in (whole, streamed):
        assert [item.type for item in answer.output] == ["message", "function_call", "function_call"]
        assert answer.output_text == "Let me look."
        assert json.loads(answer.output[1].arguments)["days"] == 3
        assert answer.output[1].status == "completed"


def test_cut_by_length_is_incomplete(served: tuple[FakeEngine, httpx.Client], sdk: openai.OpenAI) -> None:
    engine, _ = served
    engine.script("a long answer")
    answer = sdk.responses.create(model="tiny", input="x", max_output_tokens=4)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text == "a lo"
    kinds = [e.type for e in sdk.responses.create(model="tiny", input="x", max_output_tokens=4, stream=True)]
    assert kinds[-1] == "response.incomplete"


def test_a_failure_in_mid_stream_is_an_event(
    served: tuple[FakeEngine, httpx.Client], sdk: openai.OpenAI
) -> None:
    """G21: no completion is made up; before the first token it is a status."""
    engine, http = served
    engine.script("abcdef", error_at=3)
    events = list(sdk.responses.create(model="tiny", input="x", stream=True))
    assert events[-1].type == "response.failed"
    assert "scripted fault" in events[-1].response.error.message
    engine.script("abcdef", error_at=0)
    assert http.post("/v1/responses", json={"model": "tiny", "input": "x", "stream": True}).status_code == 500


def test_a_schema_reaches_the_engine(served: tuple[FakeEngine, httpx.Client], sdk: openai.OpenAI) -> None:
    pytest.importorskip("xgrammar")
    engine, _ = served
    engine.script("{}")
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    answer = sdk.responses.create(model="tiny", input="x", text={"format": form})
    assert answer.text.format.type == "json_schema"
    assert engine.requests[0].grammar is not None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input.0"),
        ({"input": [{"type": "computer_call"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
        ({"input": [{"role": "king", "content": "x"}]}, "input"),
        ({"max_output_tokens": 10_000}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.function.name"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text.format"),
        ({"nope": 1}, "nope"),
        ({"model": "other"}, "model"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_refused(served: tuple[FakeEngine, httpx.Client], fields: dict[str, Any], param: str) -> None:
    engine, http = served
    answer = http.post("/v1/responses", json={"model": "tiny", "input": "x", **fields})
    assert answer.status_code == (404 if param == "model" else 400)
    assert (answer.json()["error"]["param"] or "").startswith(param)
    assert engine.requests == []


def test_nothing_is_stored(served: tuple[FakeEngine, httpx.Client]) -> None:
    answer = served[1].get("/v1/responses/resp_1")
    assert answer.status_code == 404
    assert "not stored" in answer.json()["error"]["message"]
