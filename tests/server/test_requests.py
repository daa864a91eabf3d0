"""What a body may say: fields, values, JSON; and that everything else is refused by name."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.conftest import Post, Serve
from tests.server.fake_engine import PADDED_VOCAB, VOCAB, FakeEngine
from tests.server.sse import strict_json


def error_of(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object of a refused request; checks its shape."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = strict_json(answer.text)
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("model", "status"), [("nope", 404), ("", 404), (5, 400), (None, 400), (["tiny"], 400)]
)
def test_wrong_models(either: Post, engine: FakeEngine, model: Any, status: int, stream: bool) -> None:
    """G16: an unknown model is 404 model_not_found, a value of another type 400; never 200."""
    error = error_of(either(model=model, stream=stream), status)
    assert error["param"] == "model"
    assert error["code"] == ("model_not_found" if status == 404 else "invalid_value")
    assert engine.requests == []


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"",
        b"[]",
        b"null",
        b"5",
        b"\xff\xfe",
        b'{"model": "tiny", "prompt": "\xff"}',
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "x", "temperature": 1e999}',
        b'{"model": "tiny", "prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b"[" * 10_000_000,
        b'{"model": "tiny", "metadata": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001,
        b'{"model": "tiny", "prompt": "x"} trailing',
    ],
    ids=lambda body: repr(body[:30]),
)
def test_malformed_bodies(
    http: httpx.Client, engine: FakeEngine, complete: Post, path: str, body: bytes
) -> None:
    """G17: 400 with the error object, and the next request is answered."""
    error_of(http.post(path, content=body, headers={"content-type": "application/json"}))
    assert complete().status_code == 200


def test_missing_fields(http: httpx.Client) -> None:
    """G16: no default model, no default prompt."""
    assert error_of(http.post("/v1/completions", json={"prompt": "x"}))["param"] == "model"
    assert error_of(http.post("/v1/completions", json={"model": "tiny"}))["param"] == "prompt"
    assert error_of(http.post("/v1/chat/completions", json={"model": "tiny"}))["param"] == "messages"


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("application/json; charset=utf-8", 200),
        ("APPLICATION/JSON", 200),
        (None, 200),
    ],
)
def test_content_types(http: httpx.Client, engine: FakeEngine, content_type: str | None, status: int) -> None:
    """G17: another content type is 415."""
    headers = {} if content_type is None else {"content-type": content_type}
    answer = http.post("/v1/completions", content=b'{"model": "tiny", "prompt": "x"}', headers=headers)
    if status == 200:
        assert answer.status_code == 200
    else:
        error_of(answer, status)


def test_wrong_method_and_path(http: httpx.Client) -> None:
    """G17: 405 and 404 carry the error object too."""
    answer = http.get("/v1/completions")
    error_of(answer, 405)
    assert answer.headers["allow"] == "POST"
    error_of(http.post("/v1/moderations", json={}), 404)
    error_of(http.get("/nowhere"), 404)


@pytest.mark.parametrize("declared", [True, False])
def test_oversized_body(serve: Serve, declared: bool) -> None:
    """G17: more bytes than the limit are 413, declared or streamed."""
    engine, http = serve(max_body_bytes=1000)
    body = b'{"model": "tiny", "prompt": "' + b"x" * 2000 + b'"}'
    content = body if declared else iter([body[:900], body[900:]])
    headers = {"content-type": "application/json"}
    error_of(http.post("/v1/completions", content=content, headers=headers), 413)
    assert http.post("/v1/completions", json={"model": "tiny", "prompt": "x"}).status_code == 200
    assert len(engine.requests) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", 101),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", 2**31),
        ("min_p", 1.5),
        ("min_p", -0.1),
        ("n", 0),
        ("n", 10**6),
        ("n", True),
        ("n", 10**40),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("max_tokens", "5"),
        ("max_tokens", -1),
        ("max_tokens", 5.0),
        ("max_tokens", 2**40),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("seed", 2**63),
        ("seed", "x"),
        ("seed", 1.5),
        ("stop_token_ids", [VOCAB]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", list(range(129))),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("priority", 2**31),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {str(VOCAB): 1}),
        ("logit_bias", {str(PADDED_VOCAB - 1): 1}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"": 1}),
        ("logit_bias", {"²": 1}),
        ("logit_bias", {"9" * 5000: 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": -100.5}),
        ("logit_bias", {"5": "1"}),
        ("logit_bias", [1]),
        ("user", 5),
        ("metadata", "x"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_values_out_of_range(either: Post, engine: FakeEngine, field: str, value: Any) -> None:
    """G12, G18: 400 that names the field; the engine sees nothing."""
    fields = {"max_tokens": 16, field: value}
    error = error_of(either(**fields))
    assert error["param"].partition(".")[0] == field
    assert field in error["message"]
    assert len(error["message"]) < 300
    assert engine.requests == []


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 2},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"top_k": -1},
        {"top_k": 0},
        {"top_k": VOCAB},
        {"min_p": 1},
        {"n": 1},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"repetition_penalty": 1.5},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1, "n": 2},
        {"min_tokens": 5, "max_tokens": 5},
        {"logit_bias": {"0": 100, str(VOCAB - 1): -100}},
        {"logit_bias": {}},
        {"stop": None},
        {"stop": []},
        {"stop": ["x"] * 16},
        {"stream_options": None},
    ],
    ids=repr,
)
def test_extremes_inside_the_range(either: Post, fields: dict[str, Any]) -> None:
    """G18: the ends of every range are accepted."""
    assert either(**fields).status_code == 200


def test_sampling_fields_reach_the_engine(either: Post, engine: FakeEngine) -> None:
    given = {
        "max_tokens": 7,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": 2.5},
        "seed": 11,
        "stop": ["a", "b"],
        "stop_token_ids": [9],
        "ignore_eos": True,
        "priority": 3,
    }
    assert either(**given).status_code == 200
    request = engine.requests[0]
    assert request.priority == given.pop("priority")
    given |= {"logit_bias": {5: 2.5}, "stop": ("a", "b"), "stop_token_ids": (9,)}
    assert {name: getattr(request.sampling, name) for name in given} == given


def test_seed_of_each_choice(either: Post, engine: FakeEngine) -> None:
    """G11: choice i draws from seed + i, so choices differ and repeat; unseeded choices carry no seed."""
    either(seed=7, n=4)
    assert [request.sampling.seed for request in engine.requests] == [7, 8, 9, 10]
    assert len({request.request_id for request in engine.requests}) == 4
    engine.reset()
    either(n=2)
    assert [request.sampling.seed for request in engine.requests] == [None, None]


@pytest.mark.parametrize(
    ("field", "nearest"),
    [
        ("temprature", "temperature"),
        ("max_token", "max_tokens"),
        ("rid", None),
        ("top-k", "top_k"),
        ("best", None),
    ],
)
def test_unknown_fields(either: Post, engine: FakeEngine, field: str, nearest: str | None) -> None:
    """A field this server does not know is refused with the nearest name; F21: so is a client's own id."""
    error = error_of(either(**{field: 1}))
    assert (error["param"], error["code"]) == (field, "unknown_field")
    if nearest is not None:
        assert repr(nearest) in error["message"]
    assert engine.requests == []


def test_fields_without_effect_at_neutral_values(either: Post) -> None:
    neutral = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "y",
        "logit_bias": None,
    }
    assert either(**neutral).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("store", True),
        ("service_tier", "flex"),
        ("response_format", {"type": "xml"}),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nope"}}},
        ),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("modalities", ["audio"]),
        ("audio", {"voice": "x"}),
        ("prediction", {"type": "content"}),
        ("web_search_options", {}),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
    ],
    ids=repr,
)
def test_unsupported_values_in_chat(chat: Post, engine: FakeEngine, field: str, value: Any) -> None:
    """G19: what cannot be honoured is refused, never silently dropped (response_format above all)."""
    assert error_of(chat(**{field: value}))["param"].partition(".")[0] == field
    assert engine.requests == []


@pytest.mark.parametrize(
    ("field", "value"), [("best_of", 0), ("suffix", "end"), ("store", True), ("echo", "yes")]
)
def test_unsupported_values_in_completions(complete: Post, field: str, value: Any) -> None:
    assert error_of(complete(**{field: value}))["param"] == field


def test_neutral_values_of_unsupported_fields(chat: Post, complete: Post) -> None:
    fields = {
        "response_format": {"type": "text"},
        "tool_choice": "auto",
        "modalities": ["text"],
        "audio": None,
    }
    assert chat(**fields).status_code == 200
    assert complete(best_of=2, n=2, suffix="").status_code == 200


def test_defaults_of_the_checkpoint(serve: Serve) -> None:
    """Fields left out take generation_config.json's values; fields given win; top_k -1 and 0 mean off."""
    from interlock.server.settings import SamplingDefaults

    config = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "min_p": None}
    engine, http = serve(sampling_defaults=SamplingDefaults.from_generation_config(config))
    body = {"model": "tiny", "prompt": "x"}
    http.post("/v1/completions", json=body)
    http.post("/v1/completions", json={**body, "temperature": 0, "top_k": -1, "top_p": None})
    found = [(r.sampling.temperature, r.sampling.top_k, r.sampling.top_p) for r in engine.requests]
    assert found == [(0.6, 20, 0.95), (0.0, 0, 0.95)]


@pytest.mark.parametrize("config", [{"temperature": "x"}, {"top_p": 2}, {"min_p": True}, {"top_k": -2}])
def test_bad_generation_config_is_refused_at_start(config: dict[str, Any]) -> None:
    from interlock.errors import StartupError
    from interlock.server.settings import SamplingDefaults

    with pytest.raises(StartupError, match=next(iter(config))):
        SamplingDefaults.from_generation_config(config)
