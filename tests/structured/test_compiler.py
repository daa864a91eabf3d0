"""What the compiler of grammars keeps and says is bounded, whatever was sent to it."""

from __future__ import annotations

import pytest

from interlock.structured import compiler as compiler_module
from interlock.structured.compiler import (
    LEAST_CACHE_BYTES,
    SHOWN_CHARS,
    GrammarCompiler,
    GrammarError,
    cache_bytes,
    plain_message,
)
from interlock.structured.spec import GrammarSpec
from tests.structured.walks import vocabulary

pytest.importorskip("xgrammar")


def test_a_stream_of_new_grammars_does_not_fill_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every client may have schemas of its own: what the compiler keeps stays below its limit."""
    limit = 200_000
    monkeypatch.setattr(compiler_module, "cache_bytes", lambda _: limit)
    compiler = GrammarCompiler(vocabulary())
    sizes, compiled = [], 0
    for count in range(1, 80):
        spec = GrammarSpec(kind="regex", text=f"[a-z]{{{count}}}[0-9]")
        compiled += compiler.compile(spec).memory_size_bytes
        sizes.append(compiler._compiler(()).get_cache_size_bytes())
    assert compiled > 3 * limit
    assert max(sizes) <= 1.5 * limit, "the library counts what it keeps approximately"
    assert max(sizes) > 0


def test_the_cache_grows_with_the_vocabulary() -> None:
    assert cache_bytes(512) == LEAST_CACHE_BYTES
    assert cache_bytes(152_000) == 256 * 152_000


def test_what_the_compiler_says_is_cut() -> None:
    assert plain_message("[12:00:00] /x/y.cc:7: Warning: a  b\n c") == "a b c"
    assert len(plain_message("x" * 10_000)) == SHOWN_CHARS + 3
    with pytest.raises(GrammarError) as caught:
        GrammarCompiler(vocabulary()).compile(GrammarSpec(kind="ebnf", text="root ::= " + "a" * 50_000))
    assert len(str(caught.value)) <= SHOWN_CHARS + 3
