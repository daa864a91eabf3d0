"""Constrained requests in a scheduler's process: compiled beside the loop, applied to their rows' logits."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from interlock.engine.messages import AddRequest
from interlock.errors import InterlockError
from interlock.plan.launch_plan import LaunchPlan
from interlock.structured.compiler import GrammarCompiler
from interlock.structured.spec import GrammarSpec
from interlock.structured.vocabulary import Vocabulary

if TYPE_CHECKING:
    import xgrammar

_log = logging.getLogger("interlock.engine")
Int32s = npt.NDArray[np.int32]

BYTES_AT_HAND_PER_TOKEN = 1024
LEAST_BYTES_AT_HAND = 4 << 20
"""Some 100 usual grammars, whatever the vocabulary: their masks grow with it."""
ROWS_FOR_THREADS = 4
PREPARE_FROM_TOKENS = 8192
"""Vocabularies from this size on are made ready while weights are read; smaller ones take milliseconds."""
_NOT_AFTER = {
    0xE0: range(0x80, 0xA0),
    0xED: range(0xA0, 0xC0),
    0xF0: range(0x80, 0x90),
    0xF4: range(0x90, 0xC0),
}
"""First bytes of characters, and second bytes that would make them no UTF-8 (Unicode 17, table 3-7)."""


class TokenBits:
    """What applying a grammar needs to know of a vocabulary, as words of one bit a token.

    Tokens of single bytes could spell overlong forms and surrogates, which are no UTF-8 and which grammars
    let through; so what may follow a token that ends in the first byte of a character is kept here. So are
    control characters, which grammars of bounded strings let through and JSON does not.

    Args:
        texts: bytes by token id, as many as the logits are wide.
    """

    def __init__(self, texts: Sequence[bytes]) -> None:
        self._width = len(texts)
        self._lead = {i: text[-1] for i, text in enumerate(texts) if text and text[-1] in _NOT_AFTER}
        self._after = {
            lead: self._all_but(i for i, text in enumerate(texts) if text and text[0] in second)
            for lead, second in _NOT_AFTER.items()
        }
        self._printable = self._all_but(
            i for i, text in enumerate(texts) if any(byte < 0x20 and byte not in b"\n\r" for byte in text)
        )

    @cached_property
    def filler(self) -> xgrammar.BatchGrammarMatcher:
        """Fills the masks of many rows with several threads."""
        from xgrammar import BatchGrammarMatcher

        return BatchGrammarMatcher(max_threads=max(1, (os.cpu_count() or 1) // 2))

    def restrict(self, words: Int32s, last_token: int, *, is_json: bool) -> None:
        """Take the tokens that must not come after ``last_token`` out of ``words`` [W], in place."""
        if is_json:
            words &= self._printable
        lead = self._lead.get(last_token)
        if lead is not None:
            words &= self._after[lead]

    def _all_but(self, banned: Iterable[int]) -> Int32s:
        bits = np.ones(-(-self._width // 32) * 32, dtype=np.uint8)
        bits[np.fromiter(banned, dtype=np.int64)] = 0
        return np.packbits(bits, bitorder="little").view(np.int32)


class Compiled:
    """A compiled grammar. ``bits`` is shared by all grammars of a vocabulary."""

    __slots__ = ("bits", "bytes", "grammar", "is_json")

    def __init__(self, grammar: xgrammar.CompiledGrammar, bits: TokenBits, *, is_json: bool) -> None:
        self.grammar = grammar
        self.bytes = int(grammar.memory_size_bytes)
        self.bits = bits
        self.is_json = is_json


class GrammarState:
    """How far one request's answer has come in its grammar.

    Args:
        after_token: the constraint begins after this token; None is from the start.
    """

    __slots__ = ("_after_token", "_bits", "_is_json", "_last_token", "_matcher")

    def __init__(self, compiled: Compiled, after_token: int | None = None) -> None:
        from xgrammar import GrammarMatcher

        self._matcher = GrammarMatcher(compiled.grammar)
        self._bits = compiled.bits
        self._is_json = compiled.is_json
        self._after_token = after_token
        self._last_token = -1

    @property
    def applies(self) -> bool:
        """Whether the next token is constrained; not while reasoning is still being written."""
        return self._after_token is None

    @staticmethod
    def fill(states: Sequence[GrammarState], words: torch.Tensor) -> None:
        """Write the tokens that may come next for each of ``states`` to its row of ``words``, int32 [rows, W]
        on the host; many rows are filled by several threads."""
        words.zero_()
        live = [index for index, state in enumerate(states) if not state._matcher.is_terminated()]
        if len(live) >= ROWS_FOR_THREADS:
            filler = states[0]._bits.filler
            filler.batch_fill_next_token_bitmask([states[index]._matcher for index in live], words, live)
        else:
            for index in live:
                states[index]._matcher.fill_next_token_bitmask(words, index)
        for index in live:
            state = states[index]
            state._bits.restrict(words[index].numpy(), state._last_token, is_json=state._is_json)

    def accept(self, token_id: int) -> None:
        """Take in the token that was chosen (an end token ends the grammar)."""
        if self._after_token is not None:
            if token_id == self._after_token:
                self._after_token = None
            return
        if not self._matcher.is_terminated():
            self._matcher.accept_token(token_id)
        self._last_token = token_id


class GrammarGate:
    """Holds constrained requests back until their grammar is compiled. Never blocks the loop that asks.

    Held requests are in no queue of the scheduler and take none of its slots.
    """

    def __init__(self, plan: LaunchPlan) -> None:
        self._plan = plan
        self._compiler: GrammarCompiler | None = None
        self._bits: dict[tuple[int, ...], TokenBits] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="interlock-grammar")
        self._at_hand: OrderedDict[bytes, Compiled] = OrderedDict()
        self._bytes_at_hand = 0
        self._most_bytes = max(LEAST_BYTES_AT_HAND, BYTES_AT_HAND_PER_TOKEN * plan.card.vocab_size)
        self._held: dict[str, tuple[AddRequest, Future[Compiled]]] = {}
        self._preparing: Future[GrammarCompiler] | None = None

    def __len__(self) -> int:
        return len(self._held)

    def prepare(self) -> None:
        """Make the compiler ready in the background, where that takes long."""
        if self._plan.card.vocab_size >= PREPARE_FROM_TOKENS:
            self._preparing = self._thread.submit(self._ready_compiler)

    def finish_preparing(self) -> None:
        """Wait for what ``prepare`` began, so that it takes no time from requests; a failure is told to the
        first constrained request."""
        if self._preparing is not None:
            wait([self._preparing])

    def take(self, message: AddRequest) -> GrammarState | None:
        """The request's grammar when it is at hand; None when the request is held for it now."""
        spec = message.grammar
        assert spec is not None
        compiled = self._at_hand.get(spec.key)
        if compiled is not None:
            self._at_hand.move_to_end(spec.key)
            return GrammarState(compiled, spec.after_token)
        self._held[message.request_id] = (message, self._thread.submit(self._compile, spec))
        return None

    def drop(self, request_id: str) -> bool:
        """Forget a held request; whether there was one."""
        held = self._held.pop(request_id, None)
        if held is not None:
            held[1].cancel()
        return held is not None

    def released(self) -> list[tuple[AddRequest, GrammarState | str]]:
        """Requests whose compiling has ended, with the grammar or what is wrong with it, as they arrived."""
        done = [name for name, (_, future) in self._held.items() if future.done()]
        return [self._release(*self._held.pop(name)) for name in done]

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _release(
        self, message: AddRequest, future: Future[Compiled]
    ) -> tuple[AddRequest, GrammarState | str]:
        assert message.grammar is not None
        try:
            compiled = future.result()
        except InterlockError as error:
            return message, str(error)
        except Exception as error:  # whatever it is, it ends this request and not the loop
            _log.exception("compiling a grammar failed in an unforeseen way")
            return message, f"the grammar cannot be compiled here: {error}"
        self._remember(message.grammar.key, compiled)
        return message, GrammarState(compiled, message.grammar.after_token)

    def _remember(self, key: bytes, compiled: Compiled) -> None:
        """Keep a grammar at hand, and drop those that were not used for longest where they take too much."""
        if key not in self._at_hand:
            self._bytes_at_hand += compiled.bytes
        self._at_hand[key] = compiled
        while self._bytes_at_hand > self._most_bytes and len(self._at_hand) > 1:
            _, dropped = self._at_hand.popitem(last=False)
            self._bytes_at_hand -= dropped.bytes

    def _ready_compiler(self) -> GrammarCompiler:
        if self._compiler is None:
            plan = self._plan
            vocabulary = Vocabulary.load(
                plan.model_path, size=plan.card.vocab_size, stop_ids=plan.card.eos_token_ids
            )
            self._compiler = GrammarCompiler(vocabulary)
        return self._compiler

    def _compile(self, spec: GrammarSpec) -> Compiled:
        compiler = self._ready_compiler()
        bits = self._bits.get(spec.markers)
        if bits is None:
            bits = self._bits[spec.markers] = TokenBits(compiler.vocabulary.texts(spec.markers))
        return Compiled(compiler.compile(spec), bits, is_json=spec.bounds_strings)
