"""Constrained answers from Python."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest

from interlock import Grammar, SamplingParams
from interlock.errors import RequestError
from tests.engine.conftest import engine

pytest.importorskip("xgrammar")

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]}


def test_generate_keeps_to_a_grammar(tiny: Path) -> None:
    """G19: a batch of prompts under one grammar; what is wrong with another is an error of the call."""
    sampling = SamplingParams(temperature=1.0, seed=5, max_tokens=120)
    with engine(tiny) as llm:
        for done in llm.generate(["a", "b", "c"], sampling, grammar=Grammar.json_schema(SCHEMA)):
            if done.finish_reason == "stop":
                jsonschema.validate(json.loads(done.text), SCHEMA)
        (done,) = llm.generate("x", sampling, grammar=Grammar.regex("[a-c]{3}-[0-9]"))
        assert re.fullmatch("[a-c]{3}-[0-9]", done.text)
        with pytest.raises(RequestError, match="parenthesis is not closed"):
            llm.generate("x", sampling, grammar=Grammar.regex("("))
        assert llm.generate("x", sampling)[0].text
    with pytest.raises(RequestError, match="'not' cannot be enforced"):
        Grammar.json_schema({"not": {}})
