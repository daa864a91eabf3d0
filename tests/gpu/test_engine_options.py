"""Options of an engine on a GPU beyond plain decoding: an fp8 cache, grammars, the meter, many prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from interlock import LLM, Grammar, SamplingParams
from interlock.demo.tiny import write_tiny
from interlock.engine import grammar_masks
from interlock.engine.batch import Batch
from interlock.engine.execution import StepExecutor
from interlock.engine.load_report import LoadReport
from interlock.engine.messages import AddRequest, RankLoad
from interlock.engine.model_runner import ModelRunner
from interlock.engine.sampler import Sampler
from interlock.engine.scheduler import Scheduler
from interlock.moe.terms import Phase
from tests.gpu.engines import prompt_logits, running
from tests.gpu.models import PROMPTS, TINY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
BASE = {"max_model_len": 256, "kv_memory": "64MiB", "max_running_requests": 8, "device": "cuda"}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny(folder, TINY)
    return folder


def test_an_fp8_cache_errs_as_its_rounding_does(tiny: Path) -> None:
    """Logits with keys and values in e4m3 are as far from those with a wide cache as the plain kernels say on
    a CPU (random weights route by near ties, so that is far), and answers go on through decode graphs."""
    usual = cache_error(tiny, device="cpu", kernels="torch", dtype="float32", wide="float32")
    found = cache_error(tiny, device="cuda", quantization="none", dtype="bfloat16", wide="bfloat16")
    assert 0.0 < found < 2.5 * usual
    with running(tiny, device="cuda", dtype="bfloat16", kv_cache_dtype="fp8_e4m3") as runner:
        assert all(len(each) == GREEDY.max_tokens for each in answers(runner))
        assert runner.graphs is not None
        assert runner.graphs.replays > 0


def cache_error(folder: Path, *, wide: str, **options: str) -> float:
    """Median over rows of how far logits move when the cache is in e4m3 and not in ``wide``."""
    logits = {}
    for dtype in (wide, "fp8_e4m3"):
        with running(folder, kv_cache_dtype=dtype, **options) as runner:
            assert runner.receipts()["kv_cache_dtype"] == dtype
            logits[dtype] = torch.cat(prompt_logits(runner))
    assert bool(logits["fp8_e4m3"].isfinite().all())
    moved = (logits["fp8_e4m3"] - logits[wide]).norm(dim=1) / logits[wide].norm(dim=1)
    return float(moved.median())


def answers(runner: ModelRunner) -> list[list[int]]:
    """Greedy tokens of every prompt, computed together."""
    scheduler, executor = Scheduler(runner.plan), StepExecutor(runner)
    found: dict[str, list[int]] = {}
    for index, prompt in enumerate(PROMPTS):
        request = AddRequest(request_id=str(index), token_ids=prompt, sampling=GREEDY)
        assert scheduler.add(request) == []
    while scheduler.has_work:
        batch = scheduler.schedule()
        assert batch is not None
        for delta in scheduler.commit(batch, executor.launch(batch).result()):
            found.setdefault(delta.request_id, []).extend(delta.token_ids)
    return [found[str(index)] for index in range(len(PROMPTS))]


@dataclass
class Allowed:
    """Stands for a grammar: the tokens that may come next."""

    words: np.ndarray
    applies: bool = True

    @staticmethod
    def fill(states: Sequence[Allowed], words: torch.Tensor) -> None:
        for row, state in enumerate(states):
            words[row] = torch.from_numpy(state.words)


@contextmanager
def grammars_stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(grammar_masks, "GrammarState", Allowed)
        yield


@pytest.mark.parametrize("vocabulary", [480, 152_576])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_masked_rows_draw_on_the_device_what_they_draw_on_the_host(
    monkeypatch: pytest.MonkeyPatch, vocabulary: int, temperature: float
) -> None:
    """Some rows under a grammar, some free: the same tokens as on a CPU, every one allowed."""
    rng = np.random.default_rng(vocabulary)
    rows = 9
    states = [
        None if row % 3 == 2 else Allowed(rng.integers(-(2**31), 2**31, -(-vocabulary // 32), dtype=np.int32))
        for row in range(rows)
    ]
    lone = np.zeros(-(-vocabulary // 32), dtype=np.int32)
    lone[vocabulary // 64] = 1 << 7
    states[0] = Allowed(lone)
    logits = torch.from_numpy(rng.standard_normal((rows, vocabulary)).astype(np.float32) * 4)
    drawn = []
    with grammars_stand_in(monkeypatch):
        for device in ("cpu", "cuda"):
            batch = masked_batch(states, temperature)
            drawn.append(Sampler().start(logits.to(device), batch).result())
    host, device_ = drawn
    assert not host.errors
    assert not device_.errors
    assert host.token_ids.tolist() == device_.token_ids.tolist()
    for token, state in zip(device_.token_ids.tolist(), states, strict=True):
        if state is not None:
            assert state.words[token // 32] >> (token % 32) & 1
    assert device_.token_ids[0] == vocabulary // 64 * 32 + 7


def masked_batch(states: Sequence[Allowed | None], temperature: float) -> Batch:
    """What a sampler reads of a batch whose rows have these grammars."""
    rows = len(states)
    requests = tuple(
        SimpleNamespace(grammar=state, params=SamplingParams(), prompt_len=1, num_generated=0)
        for state in states
    )
    sampling = SimpleNamespace(
        temperature=np.full(rows, temperature, dtype=np.float32),
        top_k=np.zeros(rows, dtype=np.int64),
        top_p=np.ones(rows),
        min_p=np.zeros(rows),
        seed=np.arange(rows, dtype=np.uint64),
        positions=np.arange(rows, dtype=np.int64) + 3,
        adjusts=np.array([state is not None for state in states]),
        logprobs=np.full(rows, -1, dtype=np.int64),
        plain_greedy=False,
    )
    return SimpleNamespace(requests=requests, sampling=sampling)  # type: ignore[return-value]


def test_answers_of_a_gpu_keep_to_a_schema(tiny: Path) -> None:
    """Over real processes, with graphs and a step in flight, free requests beside constrained ones."""
    pytest.importorskip("xgrammar", reason="xgrammar is not installed on this machine")
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"],
        "additionalProperties": False,
    }
    sampling = SamplingParams(temperature=1.0, seed=3, max_tokens=120)
    with LLM(str(tiny), **BASE) as llm:
        done = llm.generate(["a", "b", "c", "d"], sampling, grammar=Grammar.json_schema(schema))
        assert any(each.finish_reason == "stop" for each in done)
        for each in done:
            if each.finish_reason == "stop":
                assert set(json.loads(each.text)) == {"n", "ok"}


def test_the_meter_counts_every_lane_of_graphs_and_chunks(tiny: Path) -> None:
    """Rows received over all experts are tokens x top-k in every layer, replayed or not, padding left out."""
    with running(tiny, device="cuda", dtype="bfloat16") as runner:
        meter = runner.context.moe.meter
        meter.every = 1
        report = LoadReport(runner)
        answers(runner)
        torch.cuda.synchronize()
        load = report()
        assert isinstance(load, RankLoad)
        layers = len(load.layers)
        assert layers == sum(layer.is_moe for layer in runner.plan.card.layers)
        for phase in (load.prefill, load.decode):
            received = np.frombuffer(phase.rows, "<i8").reshape(layers, load.experts)
            assert phase.tokens > 0
            assert received.sum(axis=1).tolist() == [phase.tokens * runner.plan.card.experts.top_k] * layers
        assert load.graph_replays == load.decode.steps > 0
        assert load.prefill.dispatch_calls == load.prefill.steps * layers
        assert load.prefill.dispatch_seconds > 0
        assert {Phase.PREFILL, Phase.DECODE} == set(meter.totals)


def test_prompts_of_one_call_share_a_chunk_on_a_gpu(tiny: Path) -> None:
    """A list of prompts is one prefill step where the chunk holds it; answers are those of single calls."""
    with LLM(str(tiny), **BASE, prefix_cache=False) as llm:
        together = llm.generate([list(prompt) for prompt in PROMPTS], GREEDY)
        steps = [stats.steps_prefill_total for stats in llm.engine.stats()]
        assert steps == [1]
        assert all(len(each.token_ids) == GREEDY.max_tokens for each in together)
