"""Pages of a GPU between a prefill and a decode engine on one device, through page-locked host memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from interlock.demo.tiny import write_tiny
from interlock.engine.messages import SamplingParams
from interlock.kv.transfer.registry import transfer_backends
from interlock.kv.transfer.staged.mover import Blocks, CpuMover, CudaMover
from interlock.plugins import load_symbol
from tests.engine.disaggregation.engines import Pair, World, compare, same, workload
from tests.gpu.models import TINY
from tests.kv.transfer.backends import NAMES, need
from tests.kv.transfer.test_staged import HOST, SIZES, expected, random_buffers, some_pieces

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_gpu_gathers_and_scatters_what_a_cpu_does() -> None:
    for seed in range(6):
        pieces, mine = some_pieces(seed, 40), random_buffers()
        due = torch.zeros(pieces.nbytes, dtype=torch.uint8)
        CpuMover(mine).gather(Blocks.source(pieces), due)
        found = torch.zeros(pieces.nbytes + 100, dtype=torch.uint8).pin_memory()
        CudaMover([each.cuda() for each in mine]).gather(Blocks.source(pieces), found)
        assert torch.equal(found[: pieces.nbytes], due)
        theirs = [torch.zeros(size, dtype=torch.uint8, device="cuda") for size in SIZES]
        CudaMover(theirs).scatter(Blocks.target(pieces), found)
        for a, b in zip(theirs, expected(mine, pieces), strict=True):
            assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("name", NAMES)
def test_a_backend_moves_pages_of_a_gpu(name: str) -> None:
    need(name, "cuda")
    backend = transfer_backends().get(name)
    sender, receiver = (load_symbol(path)(HOST, timeout=10.0) for path in (backend.sender, backend.receiver))
    try:
        mine = random_buffers()
        theirs = [torch.zeros(size, dtype=torch.uint8, device="cuda") for size in SIZES]
        description = receiver.register(theirs)
        sender.register([each.cuda() for each in mine])
        number = sender.connect(description, SIZES)
        pieces = some_pieces(1, 40)
        sender.write(number, pieces)
        for a, b in zip(theirs, expected(mine, pieces), strict=True):
            assert torch.equal(a.cpu(), b)
    finally:
        sender.close()
        receiver.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny(made, TINY)
    return made


@contextmanager
def world_of(folder: Path, **options: object) -> Iterator[World]:
    made = World(folder, device="cuda", chunked_prefill_size=64, **options)
    try:
        yield made
    finally:
        made.close()


def greedy_requests() -> list[tuple[tuple[int, ...], SamplingParams]]:
    """Prompts of one to several chunks, some of which begin with another one."""
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    return [(prompt, sampling) for prompt, _ in workload(2, 12, longest=200)]


@pytest.mark.parametrize("backend", NAMES)
def test_a_pair_on_one_gpu_answers_as_one_engine(folder: Path, backend: str) -> None:
    """Prompts of several chunks, windows, cached prompts: tokens equal, logprobs to float32's rounding."""
    need(backend, "cuda")
    with world_of(folder, kernels="torch") as world:
        world.run(_answers_agree(world, backend))


async def _answers_agree(world: World, backend: str) -> None:
    async with world.pair({}, {}, backend=backend) as each:
        await compare(each, greedy_requests(), tolerance=1e-3)
        told_what_moved(each)


def test_decode_graphs_go_on_from_moved_pages_bit_for_bit(folder: Path) -> None:
    """A decode server that replays graphs, own kernels in bfloat16, beside one engine with the same graphs.

    One request at a time and no cached prefixes: each step of the pair has the shape that the one engine's
    has, so the same kernels see the same bits, if pages moved right; nothing is left to rounding.
    """
    graphs: dict[str, object] = {"cuda_graph_max_batch": 4}
    same_steps: dict[str, object] = {
        "kernels": "triton",
        "dtype": "bfloat16",
        "quantization": "none",
        "prefix_cache": False,
    }
    with world_of(folder, **same_steps) as world:
        world.run(_bits_agree(world, graphs))


async def _bits_agree(world: World, graphs: dict[str, object]) -> None:
    async with world.pair({"cuda_graph_max_batch": 0}, {}, **graphs) as each:
        assert each.decode.plan.cuda_graph_sizes == each.plain.plan.cuda_graph_sizes == (1, 2, 4)
        for prompt, sampling in greedy_requests():
            due, again = [await each.expect(prompt, sampling) for _ in range(2)]
            same(due, again, tolerance=1e-9)
            _, answer = await each.ask(prompt, sampling)
            same(due, answer, tolerance=1e-9)
            assert len(answer.tokens) == sampling.max_tokens
        await each.quiet()
        told_what_moved(each)


def told_what_moved(each: Pair) -> None:
    stats = each.prefill.stats()[0].transfer
    assert stats is not None
    assert stats.bytes_total > 0
    print("moved", stats.bytes_total, "bytes in", stats.copies_total, "copies,", stats.seconds_total, "s")
