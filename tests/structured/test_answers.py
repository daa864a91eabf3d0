"""Answers drawn at random under a grammar are valid whenever they end."""

from __future__ import annotations

import json
import random
import re

import jsonschema
import pytest

from interlock.engine.grammar import Compiled, GrammarState, TokenBits
from interlock.structured.spec import GrammarSpec
from tests.structured.walks import EOS, SPECIAL, WIDTH, Walker, allowed_ids, random_schema, schema_spec


@pytest.fixture(scope="module")
def walker() -> Walker:
    pytest.importorskip("xgrammar")
    return Walker()


def assert_valid(walker: Walker, seed: int, answers: int) -> int:
    schema = random_schema(random.Random(seed), 4)
    validator = jsonschema.Draft202012Validator(schema)
    count = 0
    for text in walker.answers(schema_spec(schema), range(answers)):
        errors = [error.message for error in validator.iter_errors(json.loads(text))]
        assert not errors, f"seed {seed}: {schema} gave {text!r}: {errors[0]}"
        count += 1
    return count


def test_random_schemas_give_valid_answers(walker: Walker) -> None:
    """G19: strings with any bytes, numbers, nesting, references: what ends is valid."""
    assert sum(assert_valid(walker, seed, 2) for seed in range(25)) >= 40


@pytest.mark.slow
def test_500_random_schemas_give_valid_answers(walker: Walker) -> None:
    """G19 at length."""
    assert sum(assert_valid(walker, seed, 4) for seed in range(100, 600)) >= 1600


def test_characters_are_whole_even_from_single_bytes(walker: Walker) -> None:
    """Bytes that spell surrogates or overlong forms never come: every answer is UTF-8."""
    spec = schema_spec({"type": "string", "minLength": 30, "maxLength": 60})
    for text in walker.answers(spec, range(40)):
        assert 30 <= len(json.loads(text)) <= 60


def test_regex_and_ebnf_and_choice(walker: Walker) -> None:
    regex = GrammarSpec(kind="regex", text="[a-z]{2,5}-[0-9]+")
    assert all(re.fullmatch(regex.text, text) for text in walker.answers(regex, range(20)))
    ebnf = GrammarSpec(kind="ebnf", text='root ::= "(" root ")" | "x"')
    for text in walker.answers(ebnf, range(20)):
        depth = (len(text) - 1) // 2
        assert text == "(" * depth + "x" + ")" * depth


def test_special_tokens_are_no_text_unless_they_are_markers(walker: Walker) -> None:
    free = GrammarSpec(kind="regex", text=".*")
    assert SPECIAL not in allowed_ids(walker.state(free))
    marked = GrammarSpec(kind="ebnf", text='root ::= "<|im_start|>" "x"', markers=(SPECIAL,))
    compiled = walker.state(marked)
    assert SPECIAL in allowed_ids(compiled)
    compiled.accept(SPECIAL)
    assert [walker.vocabulary.tokens[i] for i in allowed_ids(compiled)] == [b"x"]


def test_only_the_end_is_allowed_after_a_complete_answer(walker: Walker) -> None:
    state = walker.state(GrammarSpec(kind="ebnf", text='root ::= "a"'))
    (a,) = allowed_ids(state)
    state.accept(a)
    assert allowed_ids(state) == [EOS]
    state.accept(EOS)
    assert allowed_ids(state) == []


def test_a_constraint_can_wait_for_the_end_of_reasoning(walker: Walker) -> None:
    grammar = walker.compiler.compile(GrammarSpec(kind="ebnf", text='root ::= "a"'))
    bits = TokenBits(walker.vocabulary.texts())
    state = GrammarState(Compiled(grammar, bits, is_json=False), after_token=7)
    assert len(allowed_ids(state)) == WIDTH
    state.accept(100)
    assert len(allowed_ids(state)) == WIDTH
    state.accept(7)
    assert [walker.vocabulary.tokens[i] for i in allowed_ids(state)] == [b"a"]
