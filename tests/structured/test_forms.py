"""Grammars put together: an answer or calls, and an answer after a reasoning that is free."""

from __future__ import annotations

import json
import random

import pytest

from interlock.engine.grammar import GrammarState
from interlock.structured.forms import after_reasoning, either
from interlock.structured.spec import GrammarSpec
from tests.structured.walks import EOS, Walker, allowed_ids, schema_spec

SCHEMA = {
    "$defs": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/n"}},
    "required": ["a"],
}
ANSWERS = [
    schema_spec(SCHEMA),
    GrammarSpec(kind="regex", text='\\{"a": [1-9][0-9]?\\}'),
    GrammarSpec(kind="ebnf", text='root ::= "{" "\\"a\\": " [0-9] "}"'),
]


@pytest.fixture(scope="module")
def walker() -> Walker:
    pytest.importorskip("xgrammar")
    return Walker()


def write(walker: Walker, state: GrammarState, text: str) -> None:
    """Take ``text`` in, byte by byte; each must be allowed."""
    for byte in text.encode():
        token = 3 + byte
        assert token in allowed_ids(state), f"{chr(byte)!r} of {text!r}"
        state.accept(token)


def finish(walker: Walker, state: GrammarState, seed: int) -> str:
    rng, out = random.Random(seed), []
    for _ in range(300):
        allowed = allowed_ids(state)
        closing = [t for t in allowed if t == EOS or walker.vocabulary.tokens[t][:1] in (b'"', b"}")]
        token = rng.choice(closing if closing and rng.random() < 0.3 else allowed)
        state.accept(token)
        if token == EOS:
            return walker.text(out)
        out.append(token)
    raise AssertionError("no end")


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda spec: spec.kind)
def test_a_reasoning_may_come_first(walker: Walker, answer: GrammarSpec) -> None:
    """With it or without it, what follows is the answer."""
    spec = after_reasoning(answer, "<think>", "</think>")
    for seed, thought in enumerate(["", "<think></think>", '<think>any < text\t{"a"</think>\n\n']):
        state = walker.state(spec)
        write(walker, state, thought)
        assert 0 <= json.loads(finish(walker, state, seed))["a"] <= 99


def test_a_reasoning_that_is_open_must_end(walker: Walker) -> None:
    state = walker.state(after_reasoning(ANSWERS[1], "", "</think>"))
    write(walker, state, "still thinking</think>\n")
    assert 0 <= json.loads(finish(walker, state, 0))["a"] <= 99


def test_either_of_two(walker: Walker) -> None:
    both = either(ANSWERS[0], GrammarSpec(kind="regex", text="none"))
    texts = {text[:1] for text in walker.answers(both, range(30))}
    assert texts == {"{", "n"}
