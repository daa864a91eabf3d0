"""Pages of a GPU between a prefill and a decode engine on one device, through page-locked host memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from interlock.demo.tiny import write_tiny
from interlock.engine.messages import SamplingParams
from interlock.kv.transfer.registry import transfer_backends
from interlock.kv.transfer.staged.mover import Blocks, CpuMover, CudaMover
from interlock.plugins import load_symbol
from tests.engine.disaggregation.engines import World, compare, workload
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
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny(folder, TINY)
    made = World(folder, device="cuda", kernels="torch", chunked_prefill_size=64)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("backend", "decode"), [("shared_memory", {}), ("shared_memory", {"cuda_graph_max_batch": 4})]
)
def test_a_pair_on_one_gpu_answers_as_one_engine(world: World, backend: str, decode: dict[str, Any]) -> None:
    """Prompts of several chunks, windows, cached prompts: tokens equal, logprobs to float32's rounding."""
    need(backend, "cuda")

    async def check() -> None:
        async with world.pair({}, decode, backend=backend) as each:
            requests = [
                (prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1))
                for prompt, _ in workload(2, 12, longest=200)
            ]
            await compare(each, requests, tolerance=1e-3)
            stats = each.prefill.stats()[0].transfer
            assert stats is not None
            assert stats.bytes_total > 0
            print(
                "moved",
                stats.bytes_total,
                "bytes in",
                stats.copies_total,
                "copies,",
                stats.seconds_total,
                "s",
            )

    world.run(check())
