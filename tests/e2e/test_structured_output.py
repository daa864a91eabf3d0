"""Constrained answers of a real server whose model writes random tokens: what ends by itself is valid."""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import pytest

from tests.e2e.processes import Served, serving
from tests.structured.walks import random_schema

pytest.importorskip("xgrammar")

PLAIN = {"model": "tiny-random", "prompt": "signal", "temperature": 0, "max_tokens": 40, "ignore_eos": True}
SCHEMA = {
    "type": "object",
    "properties": {
        "line": {"type": "string", "maxLength": 12},
        "speed": {"type": "integer", "minimum": 0, "maximum": 160},
        "stops": {"type": "array", "items": {"enum": ["A", "B"]}, "maxItems": 3},
    },
    "required": ["line", "speed"],
}


def ask(server: Served, **fields: Any) -> httpx.Response:
    body = {"model": "tiny-random", "prompt": "x", "max_tokens": 200, **fields}
    return server.post("/v1/completions", body)


def one(server: Served, **fields: Any) -> dict[str, Any]:
    choice: dict[str, Any] = ask(server, **fields).raise_for_status().json()["choices"][0]
    return choice


def schema_format(schema: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def test_json_schema_holds_at_any_temperature(server: Served) -> None:
    """G19: random weights at T=1, many seeds: what finishes with stop parses and validates."""
    fields = {"max_tokens": 100, **schema_format(SCHEMA)}
    with ThreadPoolExecutor(10) as pool:
        choices = list(
            pool.map(lambda seed: one(server, seed=seed, temperature=1 + seed % 2, **fields), range(20))
        )
    ended = [choice["text"] for choice in choices if choice["finish_reason"] == "stop"]
    for text in ended:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(ended) >= 10


def test_regex_grammar_and_choice_hold(server: Served) -> None:
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", one(server, regex="[0-9]{3}-[a-f]{2}")["text"])
    assert one(server, guided_choice=["north", "south"])["text"] in ("north", "south")
    text = one(server, ebnf='root ::= "<" [a-z]{1,5} ">"')["text"]
    assert re.fullmatch("<[a-z]{1,5}>", text)


def test_logprobs_are_raw_under_a_grammar(server: Served) -> None:
    """G26: the logprob of a forced token is the model's, whatever was masked."""
    prompt = server.post("/tokenize", {"prompt": "xabc"}).json()["tokens"]
    scored = one(server, prompt=prompt, echo=True, logprobs=0, max_tokens=0)["logprobs"]["token_logprobs"]
    forced = one(server, ebnf='root ::= "abc"', logprobs=0, temperature=2, top_p=0.1)
    texts = forced["logprobs"]["tokens"][:-1]
    assert "".join(texts) == "abc"
    start = len(prompt) - len(texts)
    if server.post("/tokenize", {"prompt": "x"}).json()["tokens"] == prompt[:start]:
        assert forced["logprobs"]["token_logprobs"][:-1] == pytest.approx(scored[start:], abs=1e-4)


@pytest.mark.slow
def test_a_slow_grammar_disturbs_nobody(server: Served) -> None:
    """F03, G19: while one is tried and given up, plain requests go on, and their answers are the same."""
    clean = one(server, **PLAIN)["text"]
    slow = schema_format({"type": "string", "pattern": r'^[^"\\\x00-\x1f]{0,6000}$'})
    with ThreadPoolExecutor(2) as pool:
        refused = pool.submit(ask, server, **slow)
        during = 0
        while not refused.done():
            assert one(server, **PLAIN)["text"] == clean
            during += 1
        assert refused.result().status_code == 400
        assert "longer than" in refused.result().json()["error"]["message"]
    assert during >= 2


def test_a_dead_end_fails_alone(server: Served) -> None:
    """G24: a grammar that leaves no token ends its own request; others do not notice."""
    clean = one(server, **PLAIN)["text"]
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(one, server, **PLAIN) for _ in range(3)]
        dead = pool.submit(ask, server, structured_outputs={"structural_tag": DEAD_END})
        assert dead.result().status_code == 400
        assert "no token is allowed next" in dead.result().json()["error"]["message"]
        assert [other.result()["text"] for other in others] == [clean] * 3


DEAD_END = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "a"},
            {"type": "exclude_token", "exclude_tokens": list(range(512))},
        ],
    },
}


@pytest.mark.slow
def test_500_random_schemas_hold(server: Served) -> None:
    """G19 at length: 500 schemas of depth <= 4, every finished answer valid."""
    with ThreadPoolExecutor(8) as pool:
        finished = sum(pool.map(lambda seed: _holds(server, seed), range(500)))
    print(f"{finished} of 500 answers finished, all valid")
    assert finished >= 250


def _holds(server: Served, seed: int) -> bool:
    schema = random_schema(random.Random(seed), 4)
    choice = one(server, seed=seed, **schema_format(schema))
    if choice["finish_reason"] != "stop":
        return False
    jsonschema.validate(json.loads(choice["text"]), schema)
    return True


@pytest.mark.slow
def test_every_replica_and_rank_keeps_to_the_grammar() -> None:
    """Two attention replicas of two ranks each: every leader compiles for itself, followers never sample."""
    flags = ("--tp-size", "4", "--attn-dp-size", "2", "--moe-a2a-backend", "collective")
    with serving(*flags) as four, ThreadPoolExecutor(8) as pool:
        fields = {"temperature": 1, "max_tokens": 100, **schema_format(SCHEMA)}
        choices = list(pool.map(lambda seed: one(four, seed=seed, **fields), range(16)))
    ended = [choice["text"] for choice in choices if choice["finish_reason"] == "stop"]
    for text in ended:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(ended) >= 8
