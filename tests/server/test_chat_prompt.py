"""From messages to the prompt text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from interlock.demo.tiny_tokenizer import tiny_tokenizer, tiny_tokenizer_config
from interlock.server.app import create_app
from interlock.server.settings import ServerSettings
from interlock.server.template_arguments import TemplateArguments
from interlock.tokenizer import Tokenizer, load_tokenizer
from interlock.tokenizer.chat_template import ChatTemplates
from tests.server.conftest import Post
from tests.server.fake_engine import VOCAB, FakeEngine
from tests.server.live import live_server
from tests.server.test_requests import error_of

TEMPLATE = """{%- if tools %}tools={{ tools | tojson }};{% endif -%}
{%- for m in messages -%}
[{{ m.role }}]{{ m.content }}
{%- for c in m.tool_calls or [] %}<{{ c.function.name }}:{{ c.function.arguments.x }}>{% endfor %}
{%- if m.role == 'tool' and not m.tool_call_id %}
{{- raise_exception('a tool message needs an id') }}{% endif -%}
{%- endfor -%}
{%- if thinking is defined %}think={{ thinking }}{% endif -%}
{%- if reasoning_effort is defined %}effort={{ reasoning_effort }}{% endif -%}
{%- if add_generation_prompt %}[assistant]{% endif -%}"""


@pytest.fixture(scope="module")
def rich_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("rich")
    tiny_tokenizer(VOCAB).save(str(folder / "tokenizer.json"))
    config = {**tiny_tokenizer_config(4096), "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def rich_url(rich_tokenizer: Tokenizer) -> Any:
    app = create_app(FakeEngine(), rich_tokenizer, ServerSettings(model_names=("tiny",)))
    with live_server(app) as url:
        yield url


@pytest.fixture
def render(rich_url: str, rich_tokenizer: Tokenizer) -> Post:
    """POST /tokenize with messages; the prompt text is under "text" for accepted requests."""

    def post(**fields: Any) -> Any:
        answer = httpx.post(rich_url + "/tokenize", json=fields)
        return rich_tokenizer.decode(answer.json()["tokens"]) if answer.status_code == 200 else answer

    return post


USER = {"role": "user", "content": "Hi"}


def test_roles_and_parts(render: Post) -> None:
    """Text parts join with newlines, "developer" is "system", an assistant's null content is empty."""
    messages = [
        {"role": "developer", "content": "Rule."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "refusal": None, "annotations": []},
        USER,
    ]
    assert render(messages=messages) == "[system]Rule.[user]a\nb[assistant][user]Hi[assistant]"


def test_tools_and_tool_messages(render: Post) -> None:
    """Arguments of tool calls reach the template as an object."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 5}'}}
    messages = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "1"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    expected = (
        'tools=[{"type": "function", "function": {"name": "f"}}];[user]Hi[assistant]<f:5>[tool]7[assistant]'
    )
    assert render(messages=messages, tools=tools) == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ '<sep>' + a + '<end>' }}", '<sep>{"x": [1,"é"]}<end>'),
        ("{{ a }}{{ 'x' ~ a }}", '{"x": [1,"é"]}x{"x": [1,"é"]}'),
        ("{{ a | tojson }}", '{"x": [1, "é"]}'),
        ("{% if a is string %}text{% elif a is mapping %}{{ a.x[0] }}{% endif %}", "1"),
        ("{% for k, v in a|items %}{{ k }}={{ v }}{% endfor %}", "x=[1, 'é']"),
        ("{% for k in a.keys() %}{{ k }}{% endfor %}", "x"),
    ],
)
def test_templates_may_read_arguments_as_object_or_text(template: str, expected: str) -> None:
    """G20: DeepSeek's templates add them to a text, Qwen's walk through them."""
    values = {"x": [1, "é"]}
    templates = ChatTemplates({"default": "{% set a = messages[0].arguments %}" + template}, {})
    message = {"arguments": TemplateArguments(values, '{"x": [1,"é"]}')}
    assert templates.render([message]) == expected


def test_generation_prompt_and_continuation(render: Post) -> None:
    assert render(messages=[USER], add_generation_prompt=False) == "[user]Hi"
    messages = [USER, {"role": "assistant", "content": "Well, I"}]
    assert render(messages=messages, continue_final_message=True) == "[user]Hi[assistant]Well, I"


def test_template_kwargs(render: Post) -> None:
    assert render(messages=[USER], chat_template_kwargs={"thinking": False}).endswith(
        "think=False[assistant]"
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "tool", "content": "7"}]}, "messages"),
        (
            {"messages": [USER], "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ({"messages": [{"role": "assistant"}], "continue_final_message": True}, "messages"),
        ({"messages": [USER], "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"messages": [USER], "chat_template_kwargs": {"tokenize": 1}}, "chat_template_kwargs.tokenize"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages.0.mood"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
                ]
            },
            "messages.0.tool_calls.0.function.arguments",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls.0.function.name"),
        ({"messages": [USER], "prompt": "x"}, "prompt"),
        ({}, "prompt"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_refused(render: Post, fields: dict[str, Any], param: str) -> None:
    """The template's own refusals and messages of a wrong shape are 400, never 500."""
    assert error_of(render(**fields))["param"] == param


def test_template_refusal_has_its_words(render: Post) -> None:
    error = error_of(render(messages=[{"role": "tool", "content": "7"}]))
    assert "a tool message needs an id" in error["message"]


def test_chat_only_fields(rich_url: str, rich_tokenizer: Tokenizer) -> None:
    """tool_choice none leaves the tools out; reasoning_effort reaches the template."""
    body = {"model": "tiny", "messages": [USER], "max_tokens": 1}
    body["tools"] = [{"type": "function", "function": {"name": "f"}}]
    url = rich_url + "/v1/chat/completions"
    without = httpx.post(url, json={**body, "tool_choice": "none", "reasoning_effort": "low"}).json()
    expected = rich_tokenizer.encode("[user]Hieffort=low[assistant]", add_special_tokens=False)
    assert without["usage"]["prompt_tokens"] == len(expected)
    with_tools = httpx.post(url, json={**body, "tool_choice": "auto"}).json()
    assert with_tools["usage"]["prompt_tokens"] > len(expected)


def test_tokenize_and_detokenize(http: httpx.Client, tokenizer: Tokenizer) -> None:
    text = "Grüße, signal!"
    answer = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == tokenizer.encode(text)
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 128)
    assert len(answer["token_strs"]) == answer["count"]
    back = http.post("/detokenize", json={"tokens": answer["tokens"]}).json()
    assert back == {"prompt": text}
    assert error_of(http.post("/detokenize", json={"tokens": [VOCAB]}))["param"] == "tokens"
    assert http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
