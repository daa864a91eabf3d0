"""Constrained requests in the scheduler's process: masks, waiting for the compiler, pressure."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from interlock.engine import grammar as grammar_module
from interlock.engine.grammar import Compiled, GrammarGate, GrammarState, TokenBits
from interlock.engine.grammar_masks import apply_grammars, unpacked
from interlock.engine.messages import AddRequest, SamplingParams
from interlock.engine.request import Request
from interlock.engine.sampled import NO_TOKEN_ALLOWED
from interlock.engine.sampler import NOTHING_ALLOWED
from interlock.structured.compiler import GrammarCompiler, GrammarError
from interlock.structured.spec import GrammarSpec
from interlock.structured.vocabulary import Vocabulary
from tests.engine.simulation import EOS, VOCAB, Stream, sim_plan
from tests.engine.test_scheduler_sampling import SampledSimulation
from tests.structured.walks import WIDTH, Walker

pytest.importorskip("xgrammar")


@pytest.fixture(scope="module")
def walker() -> Walker:
    return Walker()


def request_with(state: GrammarState | None) -> Request:
    message = AddRequest(request_id="r", token_ids=(5,), sampling=SamplingParams())
    request = Request(message, arrival=0, seed=0, eos_ids=frozenset({2}))
    request.grammar = state
    return request


def test_masks_are_set_for_constrained_rows_only(walker: Walker) -> None:
    """The rows of a batch: free, constrained, free; what is forbidden is what the grammar forbids."""
    spec = GrammarSpec(kind="ebnf", text='root ::= "a" | "b"')
    requests = [request_with(None), request_with(walker.state(spec)), request_with(None)]
    logits = torch.randn(3, WIDTH)
    before = logits.clone()
    apply_grammars(logits, requests, range(3))
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    left = torch.isfinite(logits[1]).nonzero()[:, 0].tolist()
    assert [walker.vocabulary.tokens[token] for token in left] == [b"a", b"b"]
    assert torch.equal(logits[1, left], before[1, left])


def test_words_unpack_as_numpy_does() -> None:
    rng = np.random.default_rng(0)
    words = rng.integers(-(2**31), 2**31, size=(3, 5), dtype=np.int64).astype(np.int32)
    expected = np.unpackbits(words.view(np.uint8), axis=1, count=141, bitorder="little").astype(bool)
    assert np.array_equal(unpacked(torch.from_numpy(words), 141).numpy(), expected)


def test_an_empty_mask_is_the_requests_own_fault() -> None:
    """G24."""
    assert NOTHING_ALLOWED.startswith(NO_TOKEN_ALLOWED)


def add(name: str, spec: GrammarSpec) -> AddRequest:
    return AddRequest(request_id=name, token_ids=(5,), sampling=SamplingParams(), grammar=spec)


def wait_released(gate: GrammarGate, count: int) -> list[tuple[AddRequest, GrammarState | str]]:
    found: list[tuple[AddRequest, GrammarState | str]] = []
    for _ in range(2000):
        found += gate.released()
        if len(found) >= count:
            break
        time.sleep(0.005)
    return found


@pytest.fixture
def gate(walker: Walker, monkeypatch: pytest.MonkeyPatch) -> GrammarGate:
    gate = GrammarGate(sim_plan())
    monkeypatch.setattr(gate, "_ready_compiler", lambda: walker.compiler)
    return gate


def test_requests_wait_outside_until_their_grammar_is_there(
    gate: GrammarGate, walker: Walker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F03: a compile that does not end holds nobody but its own request, and asking never blocks."""
    go_on = threading.Event()
    slow, quick = GrammarSpec(kind="regex", text="slow"), GrammarSpec(kind="regex", text="quick")
    compile_now = walker.compiler.compile

    def compile_late(spec: GrammarSpec) -> Any:
        if spec.text == "slow":
            go_on.wait(30)
        return compile_now(spec)

    monkeypatch.setattr(walker.compiler, "compile", compile_late)
    assert gate.take(add("a", slow)) is None
    assert gate.take(add("b", quick)) is None
    assert (len(gate), gate.released()) == (2, [])
    assert gate.drop("b")
    assert not gate.drop("b")
    go_on.set()
    (released,) = wait_released(gate, 1)
    assert released[0].request_id == "a"
    assert isinstance(released[1], GrammarState)
    assert isinstance(gate.take(add("c", slow)), GrammarState)
    assert len(gate) == 0


def test_a_grammar_that_fails_here_after_all_is_told(gate: GrammarGate) -> None:
    gate.take(add("a", GrammarSpec(kind="regex", text="(")))
    ((message, problem),) = wait_released(gate, 1)
    assert message.request_id == "a"
    assert isinstance(problem, str)
    assert "parenthesis" in problem


def test_a_large_vocabulary_is_ready_before_requests(
    gate: GrammarGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """J10: nothing is left to do in the background once the rank says ready."""
    made: list[int] = []
    monkeypatch.setattr(gate, "_ready_compiler", lambda: (time.sleep(0.05), made.append(1)))
    gate.prepare()
    gate.finish_preparing()
    assert made == []
    monkeypatch.setattr(grammar_module, "PREPARE_FROM_TOKENS", 1)
    gate.prepare()
    gate.finish_preparing()
    assert made == [1]


def test_grammars_at_hand_are_bounded_in_bytes(gate: GrammarGate, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [GrammarSpec(kind="regex", text=f"[a-z]{{{count}}}") for count in (3, 4, 5, 6)]
    for index, spec in enumerate(specs):
        gate.take(add(str(index), spec))
    sizes = len(wait_released(gate, 4))
    assert sizes == 4
    assert all(gate.take(add(spec.text, spec)) for spec in specs)
    monkeypatch.setattr(gate, "_most_bytes", 1)
    gate.take(add("new", GrammarSpec(kind="regex", text="new")))
    wait_released(gate, 1)
    assert gate.take(add("again", GrammarSpec(kind="regex", text="new"))) is not None
    assert gate.take(add("old", specs[0])) is None


def test_a_compiler_that_cannot_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Any:
        raise GrammarError("xgrammar cannot be imported")

    monkeypatch.setattr(grammar_module, "GrammarCompiler", fail)
    monkeypatch.setattr(grammar_module.Vocabulary, "load", lambda *_, **__: None)
    gate = GrammarGate(sim_plan())
    gate.take(add("a", GrammarSpec(kind="regex", text="a")))
    ((_, problem),) = wait_released(gate, 1)
    assert problem == "xgrammar cannot be imported"


LETTERS = tuple(b"" if token == EOS else bytes([97 + token % 26]) for token in range(VOCAB))


def run(indices: list[int], **plan: Any) -> SampledSimulation:
    """Constrained requests beside free ones, in one pool."""
    vocabulary = Vocabulary(LETTERS, frozenset({EOS}), (EOS,))
    compiled = GrammarCompiler(vocabulary).compile(GrammarSpec(kind="regex", text="([a-e][v-z]){10,15}"))
    bits = TokenBits(vocabulary.texts())
    sim = SampledSimulation(sim_plan(max_model_len=96, **plan))
    for index in indices:
        params = SamplingParams(temperature=float(index % 2), seed=index, max_tokens=40, logprobs=0)
        prompt = tuple((index * 5 + j * j) % VOCAB for j in range(20 + 7 * index))
        message = AddRequest(request_id=str(index), token_ids=prompt, sampling=params)
        state = None if index % 3 == 2 else GrammarState(Compiled(compiled, bits, is_json=False))
        sim.streams[message.request_id] = Stream(message)
        sim.receive(sim.scheduler.add(message, grammar=state))
    sim.drive()
    return sim


@pytest.mark.parametrize("windows", [(None,), (None, 8)])
def test_retraction_and_companions_change_no_constrained_answer(windows: tuple[int | None, ...]) -> None:
    """F13, F17: a retracted grammar stands where it stood; each answer is that of the request alone."""
    crowded = run(list(range(6)), windows=windows, full_pages=32, window_pages=16, chunked_prefill_size=7)
    assert crowded.scheduler.stats().retractions_total > 0
    for index in range(6):
        name = str(index)
        alone = run([index], windows=windows, full_pages=200, window_pages=200, prefix_cache=False)
        assert crowded.streams[name].tokens == alone.streams[name].tokens
        assert crowded.logprobs(name) == alone.logprobs(name)
        if index % 3 != 2:
            text = b"".join(LETTERS[token] for token in alone.streams[name].tokens).decode()
            assert re.fullmatch("([a-e][v-z]){10,15}", text)
            assert alone.streams[name].finish == "stop"
