"""Token counts, and the order of choices."""

from __future__ import annotations

from typing import Any

import pytest

from interlock.engine.messages import AddRequest
from interlock.tokenizer import Tokenizer
from tests.server.conftest import Post
from tests.server.fake_engine import EOS, FakeEngine, Play, byte_ids
from tests.server.sse import events, texts


@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}])
def test_usage_in_streams_only_when_asked(either: Post, engine: FakeEngine, options: Any) -> None:
    """G09: one extra last chunk without choices; other chunks carry null; else no usage at all."""
    engine.script("hello")
    fields = {} if options is None else {"stream_options": options}
    chunks = events(either(stream=True, **fields))
    if options and options["include_usage"]:
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == either().json()["usage"]
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        chunks.pop()
    else:
        assert all("usage" not in chunk for chunk in chunks)
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_continuous_usage(either: Post, engine: FakeEngine) -> None:
    engine.script("hello")
    chunks = events(either(stream=True, stream_options={"continuous_usage_stats": True}))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == len("hello") + 1


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens_everywhere_the_same(either: Post, engine: FakeEngine, n: int, stream: bool) -> None:
    """G10: tokens reused at the first choice's admission; hits of sibling samples do not count."""

    def play(request: AddRequest) -> Play:
        return Play(tokens=[EOS], cached=4 if request.request_id.endswith("-0") else 64)

    engine.play = play
    if stream:
        usage = events(either(n=n, stream=True, stream_options={"include_usage": True}))[-1]["usage"]
    else:
        usage = either(n=n).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 4


@pytest.mark.parametrize("n", [1, 2, 8])
@pytest.mark.parametrize("stream", [False, True])
def test_usage_with_many_choices(complete: Post, engine: FakeEngine, n: int, stream: bool) -> None:
    """G25: each prompt counts once, completion tokens are the sum over all choices, all indices appear."""
    prompts = ["first prompt", "second"]
    fields = {"prompt": prompts, "n": n, "max_tokens": 25, "seed": 5}
    if stream:
        chunks = events(complete(**fields, stream=True, stream_options={"include_usage": True}))
        usage = chunks[-1]["usage"]
        finishes = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    else:
        answer = complete(**fields).json()
        usage, finishes = answer["usage"], [choice["index"] for choice in answer["choices"]]
    assert sorted(finishes) == list(range(2 * n))
    by_prompt = {request.token_ids: len(request.token_ids) for request in engine.requests}
    assert len(engine.requests) == 2 * n
    assert usage["prompt_tokens"] == sum(by_prompt.values())
    assert usage["completion_tokens"] == sum(engine.emitted.values())
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
def test_choices_keep_their_order(
    complete: Post, engine: FakeEngine, tokenizer: Tokenizer, stream: bool, as_ids: bool
) -> None:
    """G15: choice i * n + j is sample j of prompt i though the last prompt ends first."""
    prompts = ["a long first prompt", "the second", "third"]

    def play(request: AddRequest) -> Play:
        text = tokenizer.decode(request.token_ids)
        return Play(tokens=[*byte_ids(f"<{text}|{request.sampling.seed}>"), EOS], delay=len(text) / 8000)

    engine.play = play
    given = [tokenizer.encode(prompt) for prompt in prompts] if as_ids else prompts
    fields = {"prompt": given, "n": 2, "seed": 40, "echo": True, "max_tokens": 60}
    if stream:
        chunks = events(complete(**fields, stream=True))
        found = [texts(chunks, index) for index in range(6)]
    else:
        choices = complete(**fields).json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(6))
        found = [choice["text"] for choice in choices]
    assert found == [f"{prompt}<{prompt}|{40 + j}>" for prompt in prompts for j in range(2)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ["é", "漢字", "👋", "👨‍👩‍👧‍👦 family"])
@pytest.mark.parametrize("per_delta", [1, 3])
def test_characters_split_over_tokens(
    either: Post, engine: FakeEngine, text: str, stream: bool, per_delta: int
) -> None:
    """G08: every byte a token, yet no replacement character appears and nothing is lost."""
    engine.script(text, per_delta=per_delta)
    assert answer_text(either, stream) == text


@pytest.mark.parametrize("stream", [False, True])
def test_unfinished_character_at_the_end(either: Post, engine: FakeEngine, stream: bool) -> None:
    """G08: ending inside a character gives one U+FFFD; a run of invalid bytes is not held for ever."""
    engine.script(tokens=byte_ids("ab漢")[:-1], eos=False)
    assert answer_text(either, stream, max_tokens=4) == "ab\ufffd"
    engine.script(tokens=[0x80 + 3] * 20)
    assert answer_text(either, stream, max_tokens=30) == "\ufffd" * 20


def answer_text(post: Post, stream: bool, **fields: Any) -> str:
    answer = post(stream=stream, **{"max_tokens": 60, **fields})
    if stream:
        return texts(events(answer))
    choice = answer.json()["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def test_special_tokens_shown_on_request(complete: Post, engine: FakeEngine) -> None:
    engine.script(tokens=[*byte_ids("a"), 1, *byte_ids("b")])
    assert answer_text(complete, False) == "ab"
    assert answer_text(complete, False, skip_special_tokens=False) == "a<|im_start|>b"


def test_role_first_and_finish_last(chat: Post, engine: FakeEngine) -> None:
    """Every choice of a chat stream opens with its role and ends with its finish reason, once each."""
    engine.script("abc")
    chunks = events(chat(stream=True, n=3))
    for index in range(3):
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert [bool(choice["finish_reason"]) for choice in own] == [False] * (len(own) - 1) + [True]
        assert own[-1]["delta"] == {}


def test_empty_answer_still_has_role_and_finish(chat: Post, engine: FakeEngine) -> None:
    """K03: no chunk with empty content is counted as a token."""
    engine.script("")
    chunks = events(chat(stream=True))
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "stop"]
