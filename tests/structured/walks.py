"""Random answers under a grammar, through the code that constrains a scheduler's rows."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from interlock.engine.grammar import Compiled, GrammarState, TokenBits
from interlock.structured.compiler import GrammarCompiler
from interlock.structured.schema import exact_schema
from interlock.structured.spec import GrammarSpec
from interlock.structured.vocabulary import Vocabulary

EOS, SPECIAL, FIRST_BYTE = 2, 1, 3
WORDS = (b"true", b"false", b"null", b'{"', b'":', b'", "', b"}}", b"12", b"ab", "ü".encode(), "漢".encode())
WIDTH = FIRST_BYTE + 256 + len(WORDS) + 5
CLOSING = frozenset(b'"}]')


def vocabulary() -> Vocabulary:
    """Three special tokens, every byte, some words, and logits wider than that."""
    tokens = [b"<pad>", b"<|im_start|>", b"<|im_end|>", *(bytes([byte]) for byte in range(256)), *WORDS]
    return Vocabulary((*tokens, *[b""] * (WIDTH - len(tokens))), frozenset({0, 1, 2}), (EOS,))


def schema_spec(schema: object) -> GrammarSpec:
    return GrammarSpec(kind="json_schema", text=json.dumps(exact_schema(schema)))


class Walker:
    """Draws tokens at random among those that a grammar leaves."""

    def __init__(self) -> None:
        self.vocabulary = vocabulary()
        self.compiler = GrammarCompiler(self.vocabulary)
        self._bits = TokenBits(self.vocabulary.texts())

    def state(self, spec: GrammarSpec) -> GrammarState:
        return GrammarState(Compiled(self.compiler.compile(spec), self._bits, is_json=spec.bounds_strings))

    def answers(self, spec: GrammarSpec, seeds: range, *, limit: int = 3000) -> Iterator[str]:
        """One finished answer for each seed, as text, without those longer than ``limit`` tokens."""
        for seed in seeds:
            text = self.answer(spec, random.Random(seed), limit)
            if text is not None:
                yield text

    def answer(self, spec: GrammarSpec, rng: random.Random, limit: int) -> str | None:
        state = self.state(spec)
        out: list[int] = []
        while len(out) < limit:
            allowed = allowed_ids(state)
            assert allowed, f"a dead end after {self.text(out)!r}"
            closing = [i for i in allowed if i == EOS or self.vocabulary.tokens[i][:1] in (b'"', b"}", b"]")]
            token = rng.choice(closing if closing and rng.random() < 0.25 else allowed)
            state.accept(token)
            if token == EOS:
                assert not allowed_ids(state)
                return self.text(out)
            out.append(token)
        return None

    def text(self, ids: list[int]) -> str:
        return b"".join(self.vocabulary.tokens[i] for i in ids).decode()


def allowed_ids(state: GrammarState) -> list[int]:
    if not state.applies:
        return list(range(WIDTH))
    words = torch.empty((1, -(-WIDTH // 32)), dtype=torch.int32)
    GrammarState.fill([state], words)
    bits = np.unpackbits(words.numpy().view(np.uint8), count=WIDTH, bitorder="little")
    found: list[int] = np.flatnonzero(bits).tolist()
    return found


def random_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    """A schema of at most ``depth`` levels out of what can be enforced."""
    leaves = [_string, _integer, _number, _enum, _plain]
    branches = [_object, _object, _array, _choice, _tuple, _all_of, _nullable]
    make = rng.choice(leaves if depth <= 1 or rng.random() < 0.3 else branches)
    return make(rng, depth)


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(4)
    return {
        "type": "string",
        **rng.choice(
            [
                {},
                {"minLength": low, "maxLength": low + rng.randrange(6)},
                {"maxLength": rng.randrange(1, 9)},
                {"minLength": low},
                {
                    "pattern": rng.choice(
                        ["^[a-c]{1,4}$", "^x[0-9]+y?$", "^(red|green)$", "^a.b$", "^[^q]{2}$"]
                    )
                },
                {"format": rng.choice(["uuid", "date-time", "whatever"])},
            ]
        ),
    }


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(-1000, 1000)
    bounds = [
        {},
        {"minimum": low},
        {"maximum": low},
        {"minimum": low, "maximum": low + rng.randrange(50)},
        {"exclusiveMinimum": low, "exclusiveMaximum": low + 2 + rng.randrange(50)},
        {"multipleOf": rng.randrange(1, 9)},
        {"minimum": low + 0.5},
    ]
    return {"type": "integer", **rng.choice(bounds)}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(-100, 100) / 4
    bounds = [{}, {"minimum": low}, {"exclusiveMaximum": low}, {"minimum": low, "maximum": low + 1.5}]
    return {"type": "number", **rng.choice(bounds)}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    values = [1, -2.5, "a", 'q"\\\n', "ü漢", None, True, [1, "x"], {"k": [None]}, ""]
    if rng.random() < 0.3:
        return {"const": rng.choice(values)}
    if rng.random() < 0.3:
        return {"type": "string", "enum": ["a", "bc", 5]}
    return {"enum": rng.sample(values, rng.randrange(1, 5))}


def _plain(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = [
        {"type": "boolean"},
        {"type": "null"},
        {"minimum": 3},
        {"maxLength": 4},
        {"type": ["integer", "null"]},
    ]
    return rng.choice(kinds)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["id", "name", "tags", "größe", 'q"uote', "x y", "n"], rng.randrange(1, 5))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randrange(len(names) + 1)),
    }
    if rng.random() < 0.2:
        schema["required"].append("another")
    more = rng.random()
    if more < 0.3 and "another" not in schema["required"]:
        schema["additionalProperties"] = False
    elif more < 0.4:
        schema["additionalProperties"] = random_schema(rng, 1)
    if rng.random() < 0.2:
        schema["maxProperties"] = max(len(names), len(schema["required"]))
    if rng.random() < 0.3:
        del schema["type"]
        schema["title"] = "T"
        schema["type"] = ["object"]
    return schema


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(3)
    return {
        "type": "array",
        "items": random_schema(rng, depth - 1),
        **rng.choice([{}, {"minItems": low}, {"minItems": low, "maxItems": low + rng.randrange(3)}]),
    }


def _tuple(rng: random.Random, depth: int) -> dict[str, Any]:
    first = [random_schema(rng, depth - 1) for _ in range(rng.randrange(1, 3))]
    return {"type": "array", "prefixItems": first, **rng.choice([{}, {"items": False}, {"maxItems": 1}])}


def _choice(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.2:
        tagged = [
            {
                "type": "object",
                "properties": {"kind": {"const": f"t{index}"}, "value": random_schema(rng, depth - 2)},
                "required": ["value"],
            }
            for index in range(2)
        ]
        return {"oneOf": [*tagged, {"type": "integer"}]} if rng.random() < 0.5 else {"oneOf": tagged}
    if rng.random() < 0.3:
        sides = {"minimum": 5} if rng.random() < 0.5 else {"maxLength": 3}
        return {**sides, "anyOf": [{"type": "integer"}, {"type": "string"}]}
    return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randrange(1, 4))]}


def _all_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {
        "allOf": [
            {"type": "object", "properties": {"a": random_schema(rng, depth - 1)}, "required": ["a"]},
            {"properties": {"b": random_schema(rng, depth - 1)}, "required": ["b"]},
        ]
    }


def _nullable(rng: random.Random, depth: int) -> dict[str, Any]:
    return {
        "$defs": {"node": {"type": "object", "properties": {"leaf": random_schema(rng, depth - 1)}}},
        "type": "array",
        "maxItems": 2,
        "items": {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]},
    }
