"""Compiles grammars with xgrammar for one vocabulary.

``xgrammar`` is imported when the first compiler is made: it takes a second, and most servers never need it.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from interlock.errors import InterlockError
from interlock.structured.spec import GrammarSpec
from interlock.structured.vocabulary import Vocabulary

if TYPE_CHECKING:
    import xgrammar

MAX_WHITESPACE = 32
"""Blanks between two tokens of JSON; without a limit a model may write them for ever."""
MAX_THREADS = 4
SHOWN_CHARS = 500
"""Of what the compiler says; it may repeat the whole grammar."""
_LOG_PREFIX = re.compile(r"^\[[\d:]+\] \S+?:\d+: (?:Warning: )?", re.MULTILINE)


class GrammarError(InterlockError):
    """A grammar that does not compile; the message is for the client."""


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Methods may be called from any one thread at a time.

    The library's own cache is off: it holds several times what it counts towards its limit, so a stream of
    new schemas would fill memory. Who calls keeps what is used again.

    Raises:
        GrammarError: xgrammar is not installed.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._xgrammar = _import_xgrammar()
        self._threads = min(MAX_THREADS, os.cpu_count() or 1)
        self._compilers: dict[tuple[int, ...], Any] = {}

    def compile(self, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
        """The compiled grammar.

        Raises:
            GrammarError: ``spec`` is no grammar, with the words of the compiler.
        """
        try:
            compiled: xgrammar.CompiledGrammar = self._compile(spec)
        except Exception as error:  # the binding raises its own classes, RuntimeError and ValueError
            raise GrammarError(plain_message(str(error))) from None
        return compiled

    def _compile(self, spec: GrammarSpec) -> Any:
        compiler = self._compiler(spec.markers)
        match spec.kind:
            case "json_schema":
                return compiler.compile_json_schema(
                    spec.text, any_whitespace=True, max_whitespace_cnt=MAX_WHITESPACE, strict_mode=True
                )
            case "regex":
                return compiler.compile_regex(spec.text)
            case "ebnf":
                return compiler.compile_grammar(spec.text)
            case "structural_tag":
                return compiler.compile_structural_tag(spec.text)

    def _compiler(self, markers: tuple[int, ...]) -> Any:
        compiler = self._compilers.get(markers)
        if compiler is None:
            xgr = self._xgrammar
            info = xgr.TokenizerInfo(
                self.vocabulary.texts(markers),
                xgr.VocabType.RAW,
                vocab_size=len(self.vocabulary.tokens),
                stop_token_ids=list(self.vocabulary.stop_ids),
            )
            compiler = xgr.GrammarCompiler(info, max_threads=self._threads, cache_enabled=False)
            self._compilers[markers] = compiler
        return compiler


def plain_message(text: str) -> str:
    """A message of the C++ library without its time, file and line, cut to a readable length."""
    plain = " ".join(_LOG_PREFIX.sub("", text).split())
    return plain if len(plain) <= SHOWN_CHARS else plain[:SHOWN_CHARS] + "..."


def _import_xgrammar() -> Any:
    try:
        import xgrammar
    except ImportError as error:
        raise GrammarError(
            f"this server cannot constrain answers: xgrammar cannot be imported ({error}); "
            'install it with pip install "xgrammar>=0.2.9,<0.3"'
        ) from None
    return xgrammar
