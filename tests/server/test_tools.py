"""Tools and reasoning in the chat API, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from interlock.structured.spec import GrammarSpec
from tests.server.conftest import Post, Serve
from tests.server.fake_engine import FakeEngine, fake_plan
from tests.server.sse import events
from tests.server.test_tool_parsers import TEXTS, TOOLS

OFFERED = [{"type": "function", "function": function} for function in TOOLS]
MESSAGES = [{"role": "user", "content": "Weather?"}]


@pytest.fixture
def hermes(serve: Serve) -> tuple[FakeEngine, httpx.Client]:
    engine = FakeEngine(plan=fake_plan(max_model_len=2048))
    return serve(engine, tool_call_parser="hermes", reasoning_parser="qwen3")


def ask(http: httpx.Client, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "messages": MESSAGES, "tools": OFFERED, **fields}
    return http.post("/v1/chat/completions", json=body)


def test_a_whole_answer_has_its_calls(hermes: tuple[FakeEngine, httpx.Client]) -> None:
    engine, http = hermes
    engine.script("<think>hm</think>" + TEXTS["hermes"])
    (choice,) = ask(http).raise_for_status().json()["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["content"], message["reasoning_content"]) == ("Let me look.", "hm")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather", "stop"]
    assert all(
        call["id"].startswith("call_") and call["type"] == "function" for call in message["tool_calls"]
    )


def test_a_stream_joins_to_the_whole_answer(hermes: tuple[FakeEngine, httpx.Client]) -> None:
    """G20, G26: two choices side by side, byte by byte, with the logprobs of every token."""
    engine, http = hermes
    text = "<think>hm</think>" + TEXTS["hermes"]
    engine.script(text)
    chunks = events(ask(http, stream=True, n=2, logprobs=True))
    for index in range(2):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(c["delta"].get("reasoning_content", "") for c in own) == "hm"
        assert "".join(c["delta"].get("content", "") for c in own) == "Let me look."
        arguments = ["", ""]
        for choice in own:
            for call in choice["delta"].get("tool_calls", []):
                arguments[call["index"]] += call["function"]["arguments"]
        assert json.loads(arguments[0])["days"] == 3
        assert json.loads(arguments[1]) == {}
        assert own[-1]["finish_reason"] == "tool_calls"
        scored = [entry for c in own if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert len(scored) == len(text.encode()) + 1


def test_the_openai_package_reads_both(serve: Serve) -> None:
    engine, http = serve(FakeEngine(plan=fake_plan(max_model_len=2048)), tool_call_parser="hermes")
    engine.script(TEXTS["hermes"])
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="x", max_retries=0) as client:
        whole = client.chat.completions.create(model="tiny", messages=MESSAGES, tools=OFFERED)
        with client.chat.completions.stream(model="tiny", messages=MESSAGES, tools=OFFERED) as stream:
            final = stream.get_final_completion()
    for answer in (whole, final):
        calls = answer.choices[0].message.tool_calls
        assert [call.function.name for call in calls] == ["get_weather", "stop"]
        assert json.loads(calls[0].function.arguments)["days"] == 3


def test_one_call_only(hermes: tuple[FakeEngine, httpx.Client]) -> None:
    engine, http = hermes
    engine.script(TEXTS["hermes"])
    message = ask(http, parallel_tool_calls=False).json()["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather"]


def test_cut_by_length(hermes: tuple[FakeEngine, httpx.Client]) -> None:
    """G20: finish reason length, and the arguments that there were."""
    engine, http = hermes
    engine.script(TEXTS["hermes"])
    (choice,) = ask(http, max_tokens=80).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"city": "S')


def test_without_tools_or_parser_text_stays_text(
    hermes: tuple[FakeEngine, httpx.Client], serve: Serve
) -> None:
    engine, http = hermes
    engine.script(TEXTS["hermes"])
    assert ask(http, tool_choice="none").json()["choices"][0]["message"]["content"] == TEXTS["hermes"]
    assert ask(http, tools=None).json()["choices"][0]["message"]["content"] == TEXTS["hermes"]
    engine, http = serve(FakeEngine(plan=fake_plan(max_model_len=2048)), tool_call_parser="none")
    engine.script(TEXTS["hermes"])
    assert ask(http).json()["choices"][0]["message"]["content"] == TEXTS["hermes"]


def test_reasoning_can_be_left_in_or_out(hermes: tuple[FakeEngine, httpx.Client]) -> None:
    engine, http = hermes
    engine.script("<think>hm</think>yes")
    plain = ask(http, separate_reasoning=False).json()["choices"][0]["message"]
    assert plain["content"] == "<think>hm</think>yes"
    hidden = ask(http, include_reasoning=False).json()["choices"][0]["message"]
    assert hidden["content"] == "yes"
    assert "reasoning_content" not in hidden


def after_optional_reasoning(spec: GrammarSpec) -> Any:
    """The grammar of the answer, for a model that may think before it."""
    first, answer = json.loads(spec.text)["format"]["elements"]
    assert first["type"] == "optional"
    return answer


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", ["get_weather", "stop"]), ({"type": "function", "function": {"name": "stop"}}, ["stop"])],
)
def test_a_forced_call_reaches_the_engine_as_a_grammar(
    hermes: tuple[FakeEngine, httpx.Client], choice: object, names: list[str]
) -> None:
    pytest.importorskip("xgrammar")
    engine, http = hermes
    engine.script(TEXTS["hermes"])
    assert ask(http, tool_choice=choice).status_code == 200
    spec = engine.requests[-1].grammar
    assert spec is not None
    assert spec.kind == "structural_tag"
    tags = after_optional_reasoning(spec)["tags"]
    assert [json.loads(tag["begin"].split("\n")[1] + "0}")["name"] for tag in tags] == names


def test_an_answer_in_json_or_calls(hermes: tuple[FakeEngine, httpx.Client]) -> None:
    pytest.importorskip("xgrammar")
    engine, http = hermes
    engine.script("{}")
    assert ask(http, response_format={"type": "json_object"}).status_code == 200
    spec = engine.requests[-1].grammar
    assert spec is not None
    form = after_optional_reasoning(spec)
    assert [each["type"] for each in form["elements"]] == ["json_schema", "tags_with_separator"]


def bad_tool(**function: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": function}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tools": [{}]}, "tools.0"),
        ({"tools": bad_tool(name="has space")}, "tools.0.function.name"),
        ({"tools": bad_tool(name="a" * 65)}, "tools.0.function.name"),
        ({"tools": bad_tool(name="f", parameters=[])}, "tools.0.function.parameters"),
        ({"tools": bad_tool(name="f", returns={})}, "tools.0.function"),
        ({"tools": OFFERED + OFFERED}, "tools"),
        ({"tools": OFFERED * 400}, "tools"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice.function.name"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": "required", "regex": "a"}, "tool_choice"),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        (
            {
                "tools": bad_tool(name="f", parameters={"type": "object", "not": {}}),
                "tool_choice": "required",
            },
            "tools.0.function.parameters",
        ),
    ],
    ids=lambda value: repr(value)[:70],
)
def test_bad_tools_are_400(
    hermes: tuple[FakeEngine, httpx.Client], fields: dict[str, Any], param: str
) -> None:
    engine, http = hermes
    answer = ask(http, **fields)
    assert answer.status_code == 400
    assert (answer.json()["error"]["param"] or "").startswith(param)
    assert engine.requests == []


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ("maybe", "tool_choice"),
        ({"type": "function"}, "tool_choice"),
        ({"type": "allowed_tools"}, "tool_choice"),
    ],
)
def test_the_place_of_an_error_is_the_clients_own(chat: Post, choice: Any, param: str) -> None:
    """Branches of our own types do not show in ``param``."""
    error = chat(tools=OFFERED, tool_choice=choice).json()["error"]
    assert error["param"].partition(".")[0] == param
    assert "[" not in error["param"]
    assert "Choice" not in error["param"]


def test_forcing_needs_a_known_format(chat: Post) -> None:
    answer = chat(tools=OFFERED, tool_choice="required")
    assert answer.status_code == 400
    assert "--tool-call-parser" in answer.json()["error"]["message"]
