"""Historical faults of exchanges, each met where it must be: an option's name and the way out, no hang."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from interlock.errors import StartupError
from interlock.moe.a2a.deepep_v2 import buffer
from interlock.moe.conformance.processes import run_ranks
from tests.moe import fault_work


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("gin", ("GIN", "set EP_DISABLE_GIN=1")),
        ("nccl", ("compile-time and runtime versions", "LD_PRELOAD", "EP_NCCL_ROOT_DIR")),
        ("no nvlink", ("the plan reserves", "--nnodes 1", "NVLink")),
        ("narrow ids", ("torch.int32", "EP_NUM_TOPK_IDX_BITS")),
        ("next generation", ("has no ElasticBuffer", "install DeepEP 2.1.0")),
        ("not importable", ("cannot be imported", "install DeepEP 2.1.0")),
    ],
)
def test_what_the_library_finds_while_it_is_built(fault: str, words: tuple[str, ...]) -> None:
    """GIN missing, another NCCL, other links than planned, another build or generation."""
    for said in run_ranks(fault_work.elastic_build, 2, fault):
        assert said.startswith("StartupError: --moe-a2a-backend deepep_v2")
        for word in words:
            assert word in said


def test_an_idle_rank_takes_part_with_a_row_for_nobody() -> None:
    """Prefill waits for counts, so a rank without tokens sends one row to nobody; decode sends nothing."""
    (busy, busy_errors), (idle, idle_errors) = run_ranks(fault_work.elastic_calls, 2)
    sent = [(details["n"], details["T"], details["cpu_sync"]) for name, details in busy if name == "dispatch"]
    assert sent == [(3, 8, True), (3, 4, False)]
    sent = [(details["n"], details["T"], details["cpu_sync"]) for name, details in idle if name == "dispatch"]
    assert sent == [(1, 8, True), (0, 4, False)]
    for errors in (busy_errors, idle_errors):
        assert "combined or released already" in errors[0]
        assert "EngineDeadError: expert-parallel ranks [1] did not reach the dispatch" in errors[1]


def test_a_buffer_is_never_built_within_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """I01: a host error that says when it is built instead."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    spec = fault_work.spec_of(_Groups(), device=torch.device("cuda"))
    with pytest.raises(StartupError, match="before graphs are captured"):
        buffer.open_buffer(object(), spec)


class _Groups:
    class ep:
        rank, size = 0, 2


def test_nccl_of_another_version_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = tmp_path / "include" / "nccl.h"
    header.parent.mkdir()
    header.write_text("#define NCCL_MAJOR 2\n#define NCCL_MINOR 30\n#define NCCL_PATCH 7\n")
    assert buffer.header_version(header) == (2, 30, 7)
    assert buffer.header_version(tmp_path / "none.h") == ()

    class Packages:
        @staticmethod
        def find_nccl_root(optional: bool) -> str:
            return str(tmp_path)

    monkeypatch.setattr(buffer.importlib, "import_module", lambda name: Packages)
    monkeypatch.setattr(buffer, "loaded_version", lambda: (2, 28, 9))
    spec = fault_work.spec_of(_Groups(), device=torch.device("cuda"))
    with pytest.raises(StartupError, match=r"NCCL 2\.30\.7 .* loaded NCCL 2\.28\.9: start with LD_PRELOAD="):
        buffer.check_nccl(object(), spec)
    monkeypatch.setattr(buffer, "loaded_version", lambda: (2, 30, 7))
    buffer.check_nccl(object(), spec)


def test_late_ranks_are_read_from_the_librarys_counts() -> None:
    assert buffer.late_ranks("Dispatch CPU wait: received count (scaleup: 1): -1 0 -8 0 # -1 0") == [1, 3]
    assert buffer.late_ranks("something else") == []


def test_a_rank_that_the_library_gave_up_ends_the_step() -> None:
    """Mooncake goes on without a silent rank; answers that lack its experts must not."""
    for said in run_ranks(fault_work.mooncake_silence, 2):
        assert said == "EngineDeadError: expert-parallel ranks [1] did not reach the dispatch within 2 s"


def test_call_shapes_of_torch_npu() -> None:
    """Rows go there and back within the published limits; combine multiplies by the weights."""
    assert run_ranks(fault_work.ascend_exchange, 2) == [[], []]
