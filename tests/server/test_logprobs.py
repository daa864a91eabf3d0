"""Logprobs of both endpoints: alignment, shapes, strict JSON."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from interlock.tokenizer import Tokenizer
from tests.server.conftest import Post
from tests.server.fake_engine import EOS, FakeEngine, byte_ids, scored
from tests.server.sse import events, strict_json, texts

TEXT = "one two three é four five"


def chat_content(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]


@pytest.mark.parametrize("per_delta", [1, 3, 8])
@pytest.mark.parametrize("stop", [None, "thr", "zzz", " f"])
def test_chat_stream_equals_whole(chat: Post, engine: FakeEngine, per_delta: int, stop: str | None) -> None:
    """G01: joined stream logprobs are the non-streamed ones, whatever one step brings and stops hold back."""
    engine.script(TEXT, per_delta=per_delta)
    fields = {"logprobs": True, "top_logprobs": 3, "stop": stop, "max_tokens": 60}
    whole = chat(**fields).json()["choices"][0]
    chunks = events(chat(**fields, stream=True))
    assert chat_content(chunks) == whole["logprobs"]["content"]
    assert texts(chunks) == whole["message"]["content"]
    entry = whole["logprobs"]["content"][2]
    expected = scored(byte_ids("e")[0], 2, 3)
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("e", expected.logprob, [ord("e")])
    assert [top["logprob"] for top in entry["top_logprobs"]] == [logprob for _, logprob in expected.top]


@pytest.mark.parametrize("per_delta", [1, 3, 8])
@pytest.mark.parametrize("echo", [False, True])
def test_completion_stream_equals_whole(
    complete: Post, engine: FakeEngine, per_delta: int, echo: bool
) -> None:
    """G01, G04: the four lists of a stream join to those of the whole answer, echoed prompt included."""
    engine.script(TEXT, per_delta=per_delta)
    fields = {"logprobs": 3, "echo": echo, "max_tokens": 60, "n": 2, "prompt": "Sägen sie"}
    whole = complete(**fields).json()["choices"]
    chunks = events(complete(**fields, stream=True))
    for index in range(2):
        joined: dict[str, list[Any]] = {}
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            if choice["index"] == index and choice["logprobs"]:
                for name, values in choice["logprobs"].items():
                    joined.setdefault(name, []).extend(values)
        assert joined == whole[index]["logprobs"]
        assert texts(chunks, index) == whole[index]["text"]


def test_minus_infinity_is_the_floor(either: Post, engine: FakeEngine) -> None:
    """G03: an alternative of minus infinity is -9999 in strict JSON; no entry is lost."""
    engine.script("abc")
    chat_fields = {"logprobs": True, "top_logprobs": 5}
    answer = either(**chat_fields)
    if answer.status_code == 400:
        answer = either(logprobs=5)
    choice = strict_json(answer.text)["choices"][0]
    if "content" in choice["logprobs"]:
        for entry in choice["logprobs"]["content"]:
            assert len(entry["top_logprobs"]) == 5
            assert entry["top_logprobs"][-1]["logprob"] == -9999.0
    else:
        for entry in choice["logprobs"]["top_logprobs"]:
            assert min(entry.values()) == -9999.0


@pytest.mark.parametrize(("max_tokens", "generated"), [(0, 0), (1, 1)])
def test_echo_scores_the_prompt(
    complete: Post, engine: FakeEngine, tokenizer: Tokenizer, max_tokens: int, generated: int
) -> None:
    """G04, F19: n_prompt + n_gen entries, the first null, offsets in characters, tokens join to the text."""
    engine.script("é")
    prompt = "café no."
    ids = tokenizer.encode(prompt)
    choice = complete(prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert {len(values) for values in logprobs.values()} == {len(ids) + generated}
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    expected = [scored(token, i, 1).logprob for i, token in enumerate(ids)][1:]
    assert logprobs["token_logprobs"][1 : len(ids)] == expected
    assert choice["finish_reason"] == "length"
    assert choice["text"].startswith(prompt)
    offsets = [*logprobs["text_offset"], len(choice["text"])]
    for token, (start, end) in zip(logprobs["tokens"], pairwise(offsets), strict=True):
        if not token.startswith("bytes:"):
            assert choice["text"][start:end] == token
    assert engine.requests[0].sampling.max_tokens == max_tokens
    assert engine.requests[0].sampling.prompt_logprobs == 1


def test_scoring_as_lm_eval_does(complete: Post, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    """lm-eval's local-completions: a batch of token ids, echo, ``[ctxlen:-1]``, greedy check."""
    engine.script("")
    prompts = [tokenizer.encode("The signal shows"), tokenizer.encode("danger")]
    answer = complete(prompt=prompts, echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234)
    for ids, choice in zip(prompts, answer.json()["choices"], strict=True):
        logprobs = choice["logprobs"]
        context = 1
        continuation = logprobs["token_logprobs"][context:-1]
        assert continuation == [scored(token, i, 1).logprob for i, token in enumerate(ids)][context:]
        for token, top in zip(
            logprobs["tokens"][context:-1], logprobs["top_logprobs"][context:-1], strict=True
        ):
            assert max(top, key=top.__getitem__) == token
        assert choice["text"].startswith(tokenizer.decode(ids))
        assert logprobs["tokens"][-1] == tokenizer.token_text(EOS)


def test_bytes_of_partial_characters_join(chat: Post, engine: FakeEngine) -> None:
    """G08: a token that is part of a character has its true bytes; joined they are the text."""
    engine.script("漢👋", eos=False)
    entries = chat(logprobs=True, max_tokens=7).json()["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "漢👋"
    assert entries[0]["token"] == "bytes:\\xe6"


def test_token_ids_instead_of_texts(complete: Post, engine: FakeEngine) -> None:
    engine.script("ab")
    choice = complete(logprobs=1, return_tokens_as_token_ids=True).json()["choices"][0]
    expected = [f"token_id:{token}" for token in [*byte_ids("ab"), EOS]]
    assert choice["logprobs"]["tokens"] == expected
    assert [list(top) for top in choice["logprobs"]["top_logprobs"]] == [[label] for label in expected]


def test_prompt_logprobs_extension(complete: Post, chat: Post, engine: FakeEngine) -> None:
    engine.script("ab")
    choice = complete(prompt=byte_ids("Hey"), prompt_logprobs=1).json()["choices"][0]
    assert choice["prompt_logprobs"][0] is None
    assert [list(entry) for entry in choice["prompt_logprobs"][1:]] == [[str(i)] for i in byte_ids("ey")]
    answer = chat(prompt_logprobs=1).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("endpoint", "fields", "param"),
    [
        ("complete", {"logprobs": 21}, "logprobs"),
        ("complete", {"logprobs": -1}, "logprobs"),
        ("complete", {"logprobs": True}, "logprobs"),
        ("complete", {"prompt_logprobs": 21}, "prompt_logprobs"),
        ("complete", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat", {"top_logprobs": 2}, "top_logprobs"),
        ("chat", {"logprobs": 3}, "logprobs"),
    ],
)
def test_refused(request: pytest.FixtureRequest, endpoint: str, fields: dict[str, Any], param: str) -> None:
    """G18: more alternatives than offered, and logprobs of the wrong kind."""
    answer = request.getfixturevalue(endpoint)(**fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
