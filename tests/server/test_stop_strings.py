"""Stop strings: the matcher against a plain search, and what reaches the client, streamed or not."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.engine.messages import SamplingParams, TokenDelta
from interlock.server.stop_strings import StopMatcher
from interlock.server.text_output import Piece, TextOutput
from interlock.tokenizer import Detokenizer, Tokenizer
from tests.server.conftest import Post
from tests.server.fake_engine import EOS, VOCAB, FakeEngine, byte_ids, scored
from tests.server.sse import events, texts

_letters = st.text("abé", min_size=0, max_size=40)
_stops = st.lists(st.text("abé", min_size=1, max_size=5), min_size=1, max_size=4)


def first_stop(text: str, stops: list[str], since: int = 0) -> tuple[int, str] | None:
    """(start, stop) of the occurrence that ends first, the longest of those; by plain search."""
    found = [(text.find(stop, since) + len(stop), -len(stop), stop) for stop in stops if stop in text[since:]]
    if not found:
        return None
    end, _, stop = min(found)
    return end - len(stop), stop


def run(
    tokenizer: Tokenizer, deltas: list[list[int]], sampling: SamplingParams, *, finish: str | None = "length"
) -> tuple[list[Piece], TextOutput]:
    """Pieces of one choice until it finishes; the last delta carries ``finish``."""
    output = TextOutput(sampling, Detokenizer(tokenizer, sampling.skip_special_tokens, continues=True))
    pieces: list[Piece] = []
    position = 0
    for number, ids in enumerate(deltas):
        last = number == len(deltas) - 1
        logprobs = tuple(scored(token, position + i, 2) for i, token in enumerate(ids))
        position += len(ids)
        stop_token = ids[-1] if last and finish == "stop" else None
        delta = TokenDelta(
            request_id="r",
            token_ids=tuple(ids),
            logprobs=logprobs,
            finish_reason=finish if last else None,
            stop_token_id=stop_token,
        )
        pieces.append(output.push(delta))
        if pieces[-1].finish_reason is not None:
            break
    return pieces, output


def cut_into(draw: st.DrawFn, ids: list[int]) -> list[list[int]]:
    deltas: list[list[int]] = []
    while ids:
        count = draw(st.integers(1, 5))
        deltas.append(ids[:count])
        ids = ids[count:]
    return deltas


@given(text=_letters, stops=_stops, cuts=st.lists(st.integers(0, 40)))
def test_matcher_equals_plain_search(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    match = None
    for start, end in itertools.pairwise(bounds):
        match = matcher.feed(text[start:end])
        if match is not None:
            break
        held = max(
            (k for stop in stops for k in range(len(stop)) if text[:end].endswith(stop[:k])), default=0
        )
        assert matcher.held == held
    assert (match and (match.start, match.stop)) == first_stop(text, stops)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_streamed_text_is_the_text_cut_at_the_first_stop(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """G06, G07: for random tokens, cuts and stops, the pieces join to the decoded text before the first stop;
    entries are those whose text starts before the cut; and the way the tokens were cut
    into deltas changes nothing."""
    ids = data.draw(st.lists(st.integers(EOS + 1, VOCAB - 1), min_size=1, max_size=30))
    whole = tokenizer.decode(ids)
    slices = st.tuples(st.integers(0, len(whole)), st.integers(1, 6)).map(lambda s: whole[s[0] : s[0] + s[1]])
    stops = data.draw(st.lists(slices.filter(bool) | st.text(min_size=1, max_size=3), min_size=1, max_size=4))
    include = data.draw(st.booleans())
    sampling = SamplingParams(
        stop=tuple(stops), include_stop_str_in_output=include, logprobs=2, max_tokens=99
    )
    deltas = cut_into(data.draw, ids)
    pieces, output = run(tokenizer, deltas, sampling)
    found = first_stop(whole, stops)
    cut = len(whole) if found is None else found[0] + (len(found[1]) if include else 0)
    assert "".join(piece.text for piece in pieces) == whole[:cut]
    assert pieces[-1].finish_reason == ("length" if found is None else "stop")
    assert pieces[-1].stop_reason == (found and found[1])
    entries = [token for piece in pieces for token in piece.tokens]
    assert [entry.logprob.token_id for entry in entries] == ids[: len(entries)]
    if found is None:
        assert len(entries) == len(ids) == output.completion_tokens
    else:
        assert all(entry.start < cut for entry in entries)
    one_by_one, again = run(tokenizer, [[token] for token in ids], sampling)
    assert [token for piece in one_by_one for token in piece.tokens] == entries
    assert again.completion_tokens == output.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "stops", "expected", "reason"),
    [
        ("abENDxyz", ["END", "ND!"], "ab", "END"),
        ("abEN", ["END"], "abEN", None),
        ("please stop! now", ["stop"], "please ", "stop"),
        ("aaab", ["aab"], "a", "aab"),
        ("漢字。终", ["。"], "漢字", "。"),
        ("STOP", "STOP", "", "STOP"),
    ],
)
def test_examples(
    either: Post,
    engine: FakeEngine,
    stream: bool,
    script: str,
    stops: object,
    expected: str,
    reason: str | None,
) -> None:
    """G07: stops over token edges, inside a token, never completed, multi-byte; streamed equals whole."""
    engine.script(script, per_delta=2)
    answer = either(stop=stops, stream=stream, max_tokens=60)
    if stream:
        chunks = events(answer)
        final = chunks[-1]["choices"][0]
        assert texts(chunks) == expected
    else:
        final = answer.json()["choices"][0]
        assert (final["text"] if "text" in final else final["message"]["content"]) == expected
    assert final["finish_reason"] == "stop"
    assert final["stop_reason"] == reason


def test_stop_string_aborts_the_engines_request(complete: Post, engine: FakeEngine) -> None:
    """G07: once the stop is seen the engine is told, and usage counts up to the token that completed it."""
    engine.script("abENDxyz" * 10, eos=False)
    answer = complete(stop="END", max_tokens=100).json()
    assert answer["usage"]["completion_tokens"] == len("abEND")
    assert engine.aborted == [engine.requests[0].request_id]
    assert engine.live == set()


def test_all_lists_follow_the_cut(complete: Post, engine: FakeEngine) -> None:
    """G06: with the stop spread over tokens, text and logprobs end together."""
    engine.script("a b c STOP d")
    answer = complete(stop="STOP", logprobs=2, max_tokens=60).json()
    choice = answer["choices"][0]
    assert choice["text"] == "a b c " == "".join(choice["logprobs"]["tokens"])
    assert {len(values) for values in choice["logprobs"].values()} == {6}
    assert answer["usage"]["completion_tokens"] == len("a b c STOP")


def test_min_tokens_protects_from_stop_strings(complete: Post, engine: FakeEngine) -> None:
    engine.script("xxaxx")
    choice = complete(stop="x", min_tokens=4, max_tokens=60).json()["choices"][0]
    assert choice["text"] == "xxa"
    assert engine.requests[0].sampling.min_tokens == 4


def test_stop_token_ids(complete: Post, engine: FakeEngine) -> None:
    """A stop token's text is left out (or kept when asked); its id is the stop reason; EOS has none."""
    engine.script("abc!de")
    bang = byte_ids("!")[0]
    choice = complete(stop_token_ids=[bang], max_tokens=60).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abc", "stop", bang)
    choice = complete(stop_token_ids=[bang], include_stop_str_in_output=True, max_tokens=60).json()[
        "choices"
    ][0]
    assert choice["text"] == "abc!"
    choice = complete(max_tokens=60).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abc!de", "stop", None)


@pytest.mark.parametrize("stop", [[""], "", [1], {"a": 1}, ["x"] * 17, ["y" * 513], 5])
def test_bad_stops_are_refused(either: Post, stop: object) -> None:
    answer = either(stop=stop)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stop"
