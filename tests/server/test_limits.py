"""Prompts, context limits and lengths."""

from __future__ import annotations

from typing import Any

import pytest

from interlock.tokenizer import Tokenizer
from tests.server.conftest import Post, Serve
from tests.server.fake_engine import PADDED_VOCAB, VOCAB, FakeEngine, byte_ids, fake_plan
from tests.server.sse import events

BAD_PROMPTS = [
    "",
    [],
    [[]],
    [-1],
    [VOCAB],
    [PADDED_VOCAB - 1],
    [10**30],
    [1.5],
    [True],
    ["a", [1]],
    ["a", ""],
    [[1], []],
    None,
    5,
    {"a": 1},
    [[["a"]]],
    [None],
]


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=repr)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_prompts(complete: Post, engine: FakeEngine, prompt: Any, stream: bool) -> None:
    """G14: 400 naming ``prompt``, and nothing reaches the engine."""
    answer = complete(prompt=prompt, stream=stream)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
    assert engine.requests == []


@pytest.mark.parametrize(
    "messages", [[], None, [{}], ["x"], [{"role": "user"}], [{"role": "king", "content": "x"}]]
)
def test_bad_messages(chat: Post, engine: FakeEngine, messages: Any) -> None:
    """G14 for chat."""
    answer = chat(messages=messages)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("messages")
    assert engine.requests == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "generated"),
    [
        (126, None, 2),
        (126, 1, 1),
        (126, 2, 2),
        (126, 3, None),
        (126, 200, None),
        (127, None, 1),
        (127, 1, 1),
        (127, 2, None),
        (128, None, None),
        (128, 1, None),
        (129, 1, None),
        (5000, None, None),
        (5000, 1, None),
        (100, 28, 28),
        (100, 29, None),
        (100, None, 16),
    ],
)
def test_context_limit(
    complete: Post,
    engine: FakeEngine,
    prompt_tokens: int,
    max_tokens: int | None,
    generated: int | None,
    stream: bool,
) -> None:
    """F20, G21: at the limit the most possible is generated; beyond it 400, before any stream."""
    engine.script("", eos=False)
    fields = {} if max_tokens is None else {"max_tokens": max_tokens}
    answer = complete(prompt=byte_ids("x") * prompt_tokens, stream=stream, **fields)
    if generated is None:
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert str(prompt_tokens) in error["message"]
        assert "128" in error["message"]
        assert error["param"] == ("prompt" if prompt_tokens >= 128 else "max_tokens")
    else:
        assert events(answer) if stream else answer.status_code == 200
        assert engine.requests[0].sampling.max_tokens == generated
        assert list(engine.emitted.values()) == [generated]
    assert complete(max_tokens=1).status_code == 200


def test_chat_takes_the_rest_of_the_context(chat: Post, engine: FakeEngine) -> None:
    """F20: without max_tokens a chat answer may fill the context."""
    engine.script("", eos=False)
    usage = chat().json()["usage"]
    assert usage["total_tokens"] == 128
    answer = chat(messages=[{"role": "user", "content": "word " * 200}])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("max_tokens", [-1, 0, 1, 2])
def test_short_lengths(complete: Post, engine: FakeEngine, max_tokens: int, echo: bool, stream: bool) -> None:
    """F19: exactly max_tokens tokens; 0 only scores an echoed prompt; negative is refused."""
    engine.script("", eos=False)
    fields = {"max_tokens": max_tokens, "echo": echo}
    answer = complete(
        **fields, stream=stream, **({"stream_options": {"include_usage": True}} if stream else {})
    )
    if max_tokens < 0 or (max_tokens == 0 and not echo):
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "max_tokens"
        return
    if stream:
        chunks = events(answer)
        usage, text = chunks[-1]["usage"], "".join(c["choices"][0]["text"] for c in chunks[:-1])
        finish = chunks[-2]["choices"][0]["finish_reason"]
    else:
        body = answer.json()
        usage, text = body["usage"], body["choices"][0]["text"]
        finish = body["choices"][0]["finish_reason"]
    assert text == ("Hello" if echo else "") + "z" * max_tokens
    assert usage["completion_tokens"] == max_tokens
    assert finish == "length"


def test_chat_refuses_zero_tokens(chat: Post) -> None:
    """F19: 0 is 400 for chat, under both names."""
    for name in ("max_tokens", "max_completion_tokens"):
        answer = chat(**{name: 0})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


def test_request_larger_than_the_pool(serve: Serve) -> None:
    """F01: what fits the model but not the KV pool is 400 at once with both numbers; others are served."""
    plan = fake_plan(max_model_len=4096, full_pages=16, page_size=16)
    engine, http = serve(FakeEngine(plan=plan))
    engine.script("ok")

    def send(**fields: Any) -> Any:
        return http.post("/v1/completions", json={"model": "tiny", **fields})

    answer = send(prompt=byte_ids("x") * 300)
    assert answer.status_code == 400
    assert "300" in answer.json()["error"]["message"]
    assert "256" in answer.json()["error"]["message"]
    assert send(prompt=byte_ids("x") * 200, max_tokens=200).status_code == 400
    assert [send(prompt="short").status_code for _ in range(5)] == [200] * 5


def test_special_tokens_are_added_once(
    complete: Post, chat: Post, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    """G23: the template writes its own special tokens; token-list prompts stay as they are."""
    ids = [1, *byte_ids("abc"), 2]
    answer = complete(prompt=ids, echo=True, max_tokens=0, skip_special_tokens=False).json()
    assert engine.requests[-1].token_ids == tuple(ids)
    assert answer["choices"][0]["text"] == "<|im_start|>abc<|im_end|>"
    usage = chat().json()["usage"]
    text = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert engine.requests[-1].token_ids == tuple(tokenizer.encode(text, add_special_tokens=False))
    assert usage["prompt_tokens"] == len(engine.requests[-1].token_ids)
    assert engine.requests[-1].token_ids.count(1) == 2


def test_too_many_choices(complete: Post) -> None:
    answer = complete(prompt=["x"] * 100, n=128)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
