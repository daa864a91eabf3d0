"""The engine's parts on a GPU: logits against references made on a CPU, and graphs against eager steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from interlock import LLM, SamplingParams
from interlock.demo.tiny import write_tiny
from interlock.engine.batch import Batch
from interlock.engine.execution import StepExecutor
from interlock.engine.messages import AddRequest
from interlock.engine.model_runner import ModelRunner
from interlock.engine.scheduler import Scheduler
from interlock.moe.terms import Phase
from tests.gpu.engines import relative_errors, running
from tests.gpu.make_references import digest
from tests.gpu.models import PROMPTS, REFERENCES, SPECS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every checkpoint, with the weights that the references were made from."""
    root = tmp_path_factory.mktemp("models")
    with safe_open(REFERENCES, "pt") as file:
        wanted = file.metadata()
    for name, spec in SPECS.items():
        write_tiny(root / name, spec)
        assert digest(root / name) == wanted[name], "this torch draws other weights from the same seed"
    return {name: root / name for name in SPECS}


def errors(runner: ModelRunner, name: str) -> torch.Tensor:
    with safe_open(REFERENCES, "pt") as file:
        exact = [file.get_tensor(f"{name}.{index}") for index in range(len(PROMPTS))]
    return relative_errors(runner, exact)


def quantile(values: torch.Tensor, share: float) -> float:
    return float(values[min(len(values) - 1, int(share * len(values)))])


@pytest.mark.parametrize("name", SPECS)
def test_float32_is_the_reference(folders: dict[str, Path], name: str) -> None:
    """The plain kernels in float32: what is left is rounding."""
    with running(folders[name], device="cuda", kernels="torch", dtype="float32") as runner:
        assert quantile(errors(runner, name), 1.0) < 1e-4


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_own_kernels_err_as_their_formats_do(
    folders: dict[str, Path], name: str, quantization: str, record_property: Any
) -> None:
    """bfloat16 no worse than twice the CPU's bfloat16; fp8 activations (3 mantissa bits) a few percent.

    A row whose router is near a tie may choose another expert, so the worst tenth of the rows is left out.
    """
    with safe_open(REFERENCES, "pt") as file:
        usual = file.get_tensor(f"{name}.bfloat16")
    with running(folders[name], device="cuda", quantization=quantization, dtype="bfloat16") as runner:
        found = errors(runner, name)
    for share in (0.5, 0.9):
        record_property(f"error at {share}", (quantile(usual, share), quantile(found, share)))
    print(name, quantization, [f"{quantile(e, s):.4f}" for e in (usual, found) for s in (0.5, 0.9, 1.0)])
    allowed = 2.0 if quantization == "none" else 8.0
    assert quantile(found, 0.5) <= allowed * quantile(usual, 0.5)


def decode_batches(runner: ModelRunner, counts: tuple[int, ...]) -> Iterator[tuple[Batch, Scheduler]]:
    """Decode batches of the given sizes, one after the other, from sequences of differing lengths."""
    for count in counts:
        scheduler = Scheduler(runner.plan)
        for index in range(count):
            prompt = PROMPTS[index % len(PROMPTS)]
            request = AddRequest(request_id=str(index), token_ids=prompt, sampling=GREEDY)
            assert scheduler.add(request) == []
        while scheduler.has_work:
            batch = scheduler.schedule()
            assert batch is not None
            yield batch, scheduler
            scheduler.commit(batch, StepExecutor(runner).launch(batch).result())


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_a_replay_is_the_eager_bucket_bit_for_bit(folders: dict[str, Path], quantization: str) -> None:
    """I04: changing batch sizes with padding; the padding changes nothing and nothing is left from before.

    Each step is replayed twice: here, and by the executor that goes on from it.
    """
    with running(folders["tiny"], device="cuda", quantization=quantization, dtype="bfloat16") as runner:
        graphs = runner.graphs
        assert graphs is not None
        assert graphs.captured == (1, 2, 4, 8)
        replays = 0
        for batch, _ in decode_batches(runner, (1, 3, 8, 2, 5, 7, 1)):
            if batch.phase is not Phase.DECODE:
                continue
            first = runner.replay(batch.arrays)
            assert first is not None
            logits = first.logits.clone()
            bucket = next(size for size in graphs.sizes if size >= len(batch.requests))
            eager = graphs._compute(graphs._buffers.step(bucket)).rows(len(batch.requests))
            assert torch.equal(logits, eager.logits)
            assert torch.equal(first.best_ids, eager.best_ids)
            replays += 1
        assert graphs.replays == 2 * replays > 60


def test_nothing_is_allocated_by_a_replay(folders: dict[str, Path]) -> None:
    """Every buffer exists before the capture."""
    with running(folders["tiny"], device="cuda", dtype="bfloat16") as runner:
        for batch, _ in decode_batches(runner, (5,)):
            if batch.phase is not Phase.DECODE:
                continue
            runner.replay(batch.arrays)
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            runner.replay(batch.arrays)
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_a_batch_beyond_the_largest_graph_runs_eagerly_and_is_counted(folders: dict[str, Path]) -> None:
    with running(folders["tiny"], device="cuda", dtype="bfloat16", cuda_graph_max_batch=2) as runner:
        graphs = runner.graphs
        assert graphs is not None
        for batch, _ in decode_batches(runner, (3,)):
            if batch.phase is Phase.DECODE:
                assert runner.replay(batch.arrays) is None
        assert graphs.misses > 0
        assert graphs.replays == 0


def test_graphs_and_overlap_change_no_answer(folders: dict[str, Path]) -> None:
    """Over real processes, greedy and seeded sampling, with requests that end at different steps."""
    answers = []
    for options in (
        {"cuda_graph_max_batch": 0, "overlap_schedule": "off"},
        {"cuda_graph_max_batch": 0, "overlap_schedule": "on"},
        {"overlap_schedule": "off"},
        {},
    ):
        base = {"max_model_len": 256, "kv_memory": "64MiB", "max_running_requests": 8}
        with LLM(str(folders["tiny"]), device="cuda", quantization="none", **base, **options) as llm:
            done = [
                llm.generate([list(prompt) for prompt in PROMPTS], sampling)
                for sampling in (GREEDY, SamplingParams(temperature=0.7, top_p=0.9, seed=5, max_tokens=30))
            ]
            answers.append([each.token_ids for part in done for each in part])
            assert llm.receipts[0]["overlap_schedule"] is (options.get("overlap_schedule") != "off")
    assert answers[0] == answers[1]
    assert answers[2] == answers[3]
