"""What the compiler of grammars keeps and says is bounded, whatever was sent to it."""

from __future__ import annotations

import pytest

from interlock.structured.compiler import SHOWN_CHARS, GrammarCompiler, GrammarError, plain_message
from interlock.structured.spec import GrammarSpec
from tests.structured.walks import vocabulary

pytest.importorskip("xgrammar")


def test_nothing_is_kept_of_what_was_compiled() -> None:
    """Every client may have schemas of its own, and the library's cache counts only a part of what it has."""
    compiler = GrammarCompiler(vocabulary())
    compiled = sum(
        compiler.compile(GrammarSpec(kind="regex", text=f"[a-z]{{{count}}}[0-9]")).memory_size_bytes
        for count in range(1, 20)
    )
    assert compiled > 0
    assert compiler._compiler(()).get_cache_size_bytes() == 0


def test_what_the_compiler_says_is_cut() -> None:
    assert plain_message("[12:00:00] /x/y.cc:7: Warning: a  b\n c") == "a b c"
    assert len(plain_message("x" * 10_000)) == SHOWN_CHARS + 3
    with pytest.raises(GrammarError) as caught:
        GrammarCompiler(vocabulary()).compile(GrammarSpec(kind="ebnf", text="root ::= " + "a" * 50_000))
    assert len(str(caught.value)) <= SHOWN_CHARS + 3
