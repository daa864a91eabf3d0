"""Random bodies and headers: every answer is 200 or a 4xx with the error object, and the server lives on."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interlock.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from interlock.server.responses_protocol import ResponsesBody
from tests.server.fake_engine import VOCAB, FakeEngine
from tests.server.sse import strict_json
from tests.server.test_requests import error_of

PATHS = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponsesBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
_numbers = (
    st.integers()
    | st.integers(-3, 130)
    | st.sampled_from([2**31, 2**63, -(2**63), 10**30, VOCAB, VOCAB - 1])
    | st.floats()
)
_texts = st.text(max_size=12) | st.sampled_from(
    ["tiny", "Hello", "user", "assistant", "tool", "text", "none"]
)
_scalars = st.none() | st.booleans() | _numbers | _texts
_values = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_texts, inner, max_size=3),
    max_leaves=8,
)
_messages = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system", "tool", "king"]),
            "content": _texts | _values,
        },
        optional={"name": _texts, "tool_calls": _values, "extra": _values},
    ),
    max_size=3,
)
_schemas = st.recursive(
    st.sampled_from(
        [{}, {"type": "string"}, {"type": "nope"}, {"minimum": 3}, {"$ref": "#"}, {"enum": [1, "a"]}]
    )
    | _values,
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["object", "array", ["string", "null"], 5]),
            "properties": st.dictionaries(_texts, inner, max_size=2),
            "required": st.lists(_texts, max_size=2),
            "items": inner,
            **dict.fromkeys(["anyOf", "oneOf", "allOf"], st.lists(inner, max_size=2)),
            **dict.fromkeys(["minItems", "maxLength", "maximum"], _numbers),
            "pattern": _texts,
            "$defs": st.dictionaries(_texts, inner, max_size=1),
        },
    ),
    max_leaves=5,
)
_grammars = st.sampled_from(['root ::= "a"', "root ::= root", "[a-z]+", "(", "a{1,5}", ""]) | _texts
_functions = st.fixed_dictionaries(
    {"name": st.sampled_from(["f", "g", "a b"])}, optional={"parameters": _schemas}
)
_tools = st.lists(
    st.fixed_dictionaries({"type": st.just("function"), "function": _functions}) | _functions | _values,
    max_size=2,
)
_choices = st.sampled_from(["none", "auto", "required", {"type": "function", "function": {"name": "f"}}])
_formats = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "json_object", "json_schema"])},
    optional={"json_schema": st.fixed_dictionaries({"name": _texts}, optional={"schema": _schemas})},
)
_likely: dict[str, st.SearchStrategy[Any]] = {
    "prompt": _texts | st.lists(st.integers(-1, VOCAB), max_size=5) | st.lists(_texts, max_size=3),
    "messages": _messages,
    "model": st.just("tiny"),
    "stream": st.booleans(),
    "stop": st.lists(_texts, max_size=4) | _texts,
    "logit_bias": st.dictionaries(st.integers(-1, VOCAB).map(str), st.floats(-101, 101), max_size=3),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "logprobs": st.booleans() | st.integers(-1, 22),
    **dict.fromkeys(["n", "best_of"], st.integers(1, 4)),
    **dict.fromkeys(["max_tokens", "min_tokens", "max_completion_tokens"], st.integers(0, 20)),
    **dict.fromkeys(["temperature", "top_p", "min_p", "repetition_penalty"], st.floats(0, 1)),
    **dict.fromkeys(["presence_penalty", "frequency_penalty"], st.floats(-2, 2)),
    **dict.fromkeys(["top_k", "seed", "priority", "top_logprobs", "prompt_logprobs"], st.integers(-1, 20)),
    **dict.fromkeys(["echo", "ignore_eos", "skip_special_tokens", "add_generation_prompt"], st.booleans()),
    **dict.fromkeys(["include_stop_str_in_output", "continue_final_message"], st.booleans()),
    "stop_token_ids": st.lists(st.integers(0, VOCAB), max_size=3),
    "chat_template_kwargs": st.dictionaries(_texts, _values, max_size=2),
    "tools": _tools,
    "tool_choice": _choices,
    "response_format": _formats,
    "guided_json": _schemas,
    "json_schema": _schemas.map(json.dumps),
    "structured_outputs": st.fixed_dictionaries(
        {}, optional={"json": _schemas, "regex": _grammars, "structural_tag": _values}
    ),
    **dict.fromkeys(["guided_regex", "regex", "guided_grammar", "ebnf"], _grammars),
    "timeout": st.floats(5, 100),
    "input": _texts | _messages | _values,
    "tokens": st.lists(st.integers(-1, VOCAB), max_size=6),
}


@st.composite
def bodies(draw: st.DrawFn, path: str) -> dict[str, Any]:
    """A body with mostly likely fields, and now and then anything."""
    names = sorted(PATHS[path].model_fields)
    body: dict[str, Any] = {"model": "tiny"}
    if "prompt" in names and path != "/tokenize":
        body["prompt"] = "Hello"
    if "input" in names:
        body["input"] = "Hello"
    if path == "/v1/chat/completions":
        body["messages"] = [{"role": "user", "content": "Hi"}]
    for name in draw(st.lists(st.sampled_from(names), max_size=4, unique=True)):
        likely = _likely.get(name, _scalars)
        body[name] = draw(likely if draw(st.integers(0, 9)) else _values)
    if draw(st.integers(0, 19)) == 0:
        body[draw(_texts)] = draw(_values)
    return body


def check(answer: httpx.Response) -> None:
    if answer.status_code == 504:
        assert error_of(answer, 504)["code"] == "timeout"
    elif answer.status_code != 200:
        assert 400 <= answer.status_code < 500, answer.text
        error_of(answer, answer.status_code)
    elif answer.headers["content-type"].startswith("application/json"):
        strict_json(answer.text)
    elif answer.headers["content-type"].startswith("text/html"):
        assert answer.url.path == "/"
    elif answer.text.startswith("event: response.created\n"):
        assert '"type":"response.failed"' not in answer.text
    else:
        assert answer.text.endswith("data: [DONE]\n\n")
        assert '"error"' not in answer.text


def fuzz(http: httpx.Client, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(PATHS)))
    body = data.draw(bodies(path))
    content = json.dumps(body).encode()
    check(http.post(path, content=content, headers={"content-type": "application/json"}))


_fixtures_are_reusable = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=400, deadline=None, suppress_health_check=_fixtures_are_reusable)
@given(data=st.data())
def test_no_body_gives_500(http: httpx.Client, engine: FakeEngine, data: st.DataObject) -> None:
    """G17, G18: any JSON, known and unknown fields, all types; then the engine has nothing left running."""
    fuzz(http, data)
    assert engine.live == set()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=20_000, deadline=None, suppress_health_check=_fixtures_are_reusable)
@given(data=st.data())
def test_no_body_gives_500_long(http: httpx.Client, engine: FakeEngine, data: st.DataObject) -> None:
    fuzz(http, data)
    assert engine.live == set()


@settings(max_examples=150, deadline=None, suppress_health_check=_fixtures_are_reusable)
@given(
    body=st.binary(max_size=200), path=st.sampled_from([*sorted(PATHS), "/flush_cache", "/v1/models", "/x"])
)
def test_no_bytes_give_500(http: httpx.Client, body: bytes, path: str) -> None:
    """G17: any bytes on any path."""
    check(http.post(path, content=body, headers={"content-type": "application/json"}))


@settings(max_examples=100, deadline=None, suppress_health_check=_fixtures_are_reusable)
@given(
    path=st.text("ab/%.?#v1", max_size=30).map(lambda path: "/" + path.lstrip("/")),
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"]),
    content_type=st.text("abc/;+= jsonapplication", max_size=40).map(str.strip),
)
def test_no_path_or_header_gives_500(http: httpx.Client, path: str, method: str, content_type: str) -> None:
    check(http.request(method, httpx.URL(path), headers={"content-type": content_type}, content=b"{}"))
