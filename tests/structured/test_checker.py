"""Grammars are tried in a child process: what is wrong, too slow or fatal is an error of one request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from interlock.demo.tiny_tokenizer import tiny_tokenizer, tiny_tokenizer_config
from interlock.structured.checker import GrammarChecker, GrammarLimits, GrammarsBusy
from interlock.structured.compiler import GrammarError
from interlock.structured.spec import GrammarSpec
from tests.server.fake_engine import VOCAB, fake_plan

Check = Callable[..., str | None]
SLOW_PATTERN = r'^[^"\\\x00-\x1f]{0,4000}$'
SLOW = GrammarSpec(kind="json_schema", text=json.dumps({"type": "string", "pattern": SLOW_PATTERN}))
GOOD = GrammarSpec(kind="regex", text="[a-z]+")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("xgrammar")
    folder: Path = tmp_path_factory.mktemp("vocabulary")
    tiny_tokenizer(VOCAB).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tiny_tokenizer_config(4096)))
    return folder


@pytest.fixture(scope="module")
def check(folder: Path) -> Iterator[Check]:
    """Checks grammars in one loop with one checker; returns what is wrong, None for nothing."""
    loop = asyncio.new_event_loop()
    checker = GrammarChecker(
        fake_plan(model_path=str(folder)), GrammarLimits(seconds=1.0, memory=16 << 30, processes=1)
    )

    async def one(spec: GrammarSpec) -> str | None:
        try:
            await checker.check(spec)
        except GrammarError as error:
            return str(error)
        return None

    def run(*specs: GrammarSpec) -> Any:
        async def several() -> list[str | None]:
            return await asyncio.gather(*map(one, specs))

        work: Coroutine[Any, Any, list[str | None]] = several()
        found = loop.run_until_complete(work)
        return found[0] if len(found) == 1 else found

    yield run
    checker.close()
    loop.close()


def test_good_grammars_pass_and_are_remembered(check: Check) -> None:
    assert check(GOOD) is None
    assert check(GOOD, GOOD, GOOD) == [None] * 3


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (GrammarSpec(kind="regex", text="(a|b"), "parenthesis is not closed"),
        (GrammarSpec(kind="regex", text="(?=a)b"), "Lookahead is not supported"),
        (GrammarSpec(kind="regex", text="a$|^b"), "It is ignored"),
        (GrammarSpec(kind="ebnf", text="root ::= foo"), 'Rule "foo" is not defined'),
        (
            GrammarSpec(kind="json_schema", text='{"oneOf": [{"type": "integer"}, {"type": "number"}]}'),
            "oneOf",
        ),
        (GrammarSpec(kind="structural_tag", text="{}"), "structural tag"),
    ],
    ids=lambda value: value.kind if isinstance(value, GrammarSpec) else value,
)
def test_errors_and_warnings_are_the_compilers_words(check: Check, spec: GrammarSpec, words: str) -> None:
    """G19: also what the compiler only warns of, since it then drops a part of the constraint."""
    problem = check(spec)
    assert problem is not None
    assert words.lower() in problem.lower()
    assert "/cpp/" not in problem


def test_a_slow_grammar_is_given_up_and_the_next_one_served(check: Check) -> None:
    """F03, G19: time is limited, and only the request that asked pays."""
    assert check(SLOW) == "compiling it takes longer than 1 seconds"
    assert check(SLOW) == "compiling it takes longer than 1 seconds"
    assert check(GrammarSpec(kind="regex", text="[0-9]+")) is None


def test_a_grammar_that_ends_the_compiler_harms_nobody(check: Check) -> None:
    """G19: nesting that overflows the compiler's stack ends a child process, not the server."""
    fatal = GrammarSpec(kind="ebnf", text="root ::= " + "(" * 100_000 + '"a"' + ")" * 100_000)
    problem = check(fatal)
    assert problem is not None
    assert check(GrammarSpec(kind="regex", text="[0-9]{3}")) is None


def test_only_so_many_may_wait(folder: Path) -> None:
    """F24: a flood of new grammars is refused at once; those that are known do not wait."""
    checker = GrammarChecker(fake_plan(model_path=str(folder)), GrammarLimits(processes=1, pending=2))

    async def flood() -> list[object]:
        await checker.check(GOOD)
        specs = [GOOD, *(GrammarSpec(kind="regex", text=f"x{index}") for index in range(4))]
        return await asyncio.gather(*map(checker.check, specs), return_exceptions=True)

    found = asyncio.run(flood())
    checker.close()
    assert found[:3] == [None] * 3
    assert [type(error) for error in found[3:]] == [GrammarsBusy] * 2


def test_very_long_grammars_are_not_tried(check: Check) -> None:
    problem = check(GrammarSpec(kind="regex", text="a" * 300_000))
    assert problem is not None
    assert "300000 characters" in problem
