"""Many ranks on one GPU, for correctness: what is asked of the machine, planned, set and observed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.errors import Refusal
from interlock.options import Options
from interlock.plan import nccl
from interlock.plan.explain import summary
from interlock.plan.facts import MachineFacts
from interlock.plan.launch_plan import LaunchPlan
from interlock.plan.nccl import NcclLibrary, nccl_libraries, version_numbers
from interlock.plan.receipts import check
from interlock.plan.rehearsal import ENVIRONMENT, rank_environment
from interlock.plan.resolve import resolve
from tests.plan.machines import GIB, gpu_machine, machine, mimo_pro_card, tiny_card
from tests.plan.test_receipts import honest

OWN = NcclLibrary(path="/torch/nvidia/nccl/lib/libnccl.so.2", version="2.28.9", of_torch=True)
NEWER = NcclLibrary(path="/extra/nvidia/nccl/lib/libnccl.so.2", version="2.30.7")
SHARED = {"model": "m", "tp_size": 4, "ranks_per_gpu": 4, "moe_a2a_backend": "collective"}


def one_gpu(*nccl: NcclLibrary, gpus: int = 1) -> MachineFacts:
    return msgspec.structs.replace(gpu_machine(gpus), nccl=nccl)


def plan(nccl: tuple[NcclLibrary, ...] = (OWN, NEWER), gpus: int = 1, **changes: Any) -> LaunchPlan:
    card = tiny_card(dtype="bfloat16")
    return resolve(Options.of(**{**SHARED, **changes}), card, one_gpu(*nccl, gpus=gpus))


def test_four_ranks_on_one_gpu_are_planned_with_a_newer_nccl() -> None:
    made = plan()
    assert (made.device, made.tp_size, made.ranks_per_gpu) == ("cuda", 4, 4)
    assert made.nccl_library == NEWER.path
    assert "in place of torch's own 2.28.9" in made.provenance["nccl_library"].reason
    assert "rehearsal: 4 ranks share a GPU; not a speed measurement" in summary(made)


def test_torchs_own_nccl_is_taken_where_it_is_new_enough() -> None:
    own = msgspec.structs.replace(OWN, version="2.30.4")
    assert plan((own, NEWER)).nccl_library == own.path


@pytest.mark.parametrize(
    "libraries", [(), (OWN,), (NcclLibrary(path="/x/libnccl.so.2", version=""),)], ids=["none", "old", "?"]
)
def test_an_nccl_that_refuses_shared_gpus_is_refused_up_front(libraries: tuple[NcclLibrary, ...]) -> None:
    with pytest.raises(Refusal) as refused:
        plan(libraries)
    assert refused.value.option == "--ranks-per-gpu"
    assert "pip install --no-deps --target nccl 'nvidia-nccl-cu13>=2.30.4'" in str(refused.value)


def test_without_the_option_nothing_is_shared_and_nothing_is_said() -> None:
    made = resolve(Options.of(model="m", tp_size=4), tiny_card(dtype="bfloat16"), one_gpu(OWN, gpus=4))
    assert (made.ranks_per_gpu, made.nccl_library, made.stall_timeout) == (1, "", 60.0)
    assert "rehearsal" not in summary(made)


def test_too_few_gpus_offer_a_rehearsal() -> None:
    with pytest.raises(Refusal, match="4 ranks of this machine need 4 GPUs; 1 found") as refused:
        plan(ranks_per_gpu=1, device="cuda")
    assert "--ranks-per-gpu 4" in refused.value.alternatives


def test_ranks_are_spread_evenly_over_the_gpus() -> None:
    assert plan(gpus=2, ranks_per_gpu=2).ranks_per_gpu == 2
    with pytest.raises(Refusal, match="cannot be spread evenly, 3 to a GPU"):
        plan(ranks_per_gpu=3)
    with pytest.raises(Refusal, match="need 2 GPUs; 1 found"):
        plan(ranks_per_gpu=2)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_cpu_shares_without_the_option(device: str | None) -> None:
    given = {**SHARED, **({"device": device} if device else {})}
    facts = machine() if device is None else one_gpu(OWN, NEWER)
    with pytest.raises(Refusal, match="on a CPU the ranks share the machine without this option"):
        resolve(Options.of(**given), tiny_card(), facts)


def test_ranks_share_the_memory_of_a_gpu() -> None:
    facts, card = one_gpu(OWN, NEWER), mimo_pro_card()
    flags = {"model": "m", "load_format": "dummy", "num_hidden_layers": 3, "tp_size": 4}
    made = resolve(Options.of(**flags, ranks_per_gpu=4), card, facts)
    alone = resolve(Options.of(**flags), card, one_gpu(OWN, gpus=4))
    assert made.memory.total <= made.memory.available < 139 * GIB // 4
    assert made.memory.available * 4 < alone.memory.available
    assert made.memory.weights == alone.memory.weights


def test_patience_is_longer_unless_it_was_chosen() -> None:
    assert plan().stall_timeout == 600.0
    assert plan(stall_timeout=45).stall_timeout == 45.0


def test_receipts_of_ranks_that_do_not_share_are_a_mismatch() -> None:
    made = plan()
    receipts = honest(made)
    assert check(made, receipts) == []
    receipts[1]["ranks_per_gpu"], receipts[2]["nccl_library"] = 1, OWN.path
    found = {(mismatch.item, mismatch.rank) for mismatch in check(made, receipts)}
    assert found == {("ranks_per_gpu", 1), ("nccl_library", 2)}


def test_the_environment_of_ranks() -> None:
    inherited = {"PATH": "/bin", "NCCL_NVLS_ENABLE": "1", "LD_PRELOAD": "/lib/a.so /lib/b.so"}
    assert rank_environment(1, "", inherited) == inherited
    found = rank_environment(4, NEWER.path, inherited)
    assert ENVIRONMENT.items() <= found.items()
    assert found["PATH"] == "/bin"
    assert found["LD_PRELOAD"] == f"{NEWER.path}:/lib/a.so:/lib/b.so"
    assert rank_environment(4, NEWER.path, found) == found


def wheel(folder: Path, version: str, *, header: bool = True) -> Path:
    """A wheel's files under ``folder``; the library is empty."""
    root = folder / "nvidia" / "nccl"
    (root / "lib").mkdir(parents=True)
    library = root / "lib" / "libnccl.so.2"
    library.write_bytes(b"")
    if header:
        (root / "include").mkdir()
        names = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
        lines = [f"#define NCCL_{name} {number}" for name, number in names]
        (root / "include" / "nccl.h").write_text("\n".join(lines))
    else:
        info = folder / f"nvidia_nccl_cu13-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nvidia-nccl-cu13\nVersion: {version}\n")
    return library


@pytest.mark.parametrize("header", [True, False])
def test_wheels_on_the_search_path_are_found_with_their_version(tmp_path: Path, header: bool) -> None:
    library = wheel(tmp_path / "extra", "2.30.7", header=header)
    found = [each for each in nccl_libraries([str(tmp_path / "extra"), "/nowhere"]) if not each.of_torch]
    assert NcclLibrary(path=str(library), version="2.30.7") in found


def test_an_installation_beside_torch_is_torchs_own(tmp_path: Path) -> None:
    library = wheel(tmp_path, "2.28.9")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('imported')")
    code = "from interlock.plan.nccl import nccl_libraries; print(nccl_libraries())"
    paths = [str(tmp_path), *filter(None, sys.path)]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}; {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"path='{library}', version='2.28.9', of_torch=True" in done.stdout


@given(st.lists(st.integers(0, 99), min_size=1, max_size=4))
def test_versions_are_compared_as_numbers(parts: list[int]) -> None:
    assert version_numbers(".".join(map(str, parts))) == tuple(parts)


@pytest.mark.parametrize("text", ["", "2.x", "2.30.7rc1", "-1"])
def test_what_is_no_version_is_nothing(text: str) -> None:
    assert version_numbers(text) == ()


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_mapped_library_itself_says_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not torch, which states the headers that it was compiled with."""
    source, library = tmp_path / "nccl.c", tmp_path / "libnccl.so.2"
    source.write_text("int ncclGetVersion(int *number) { *number = 23007; return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    monkeypatch.setattr(nccl, "mapped_nccl", lambda: (library,))
    assert nccl.loaded_version() == (2, 30, 7)
    monkeypatch.setattr(nccl, "mapped_nccl", tuple)
    assert nccl.loaded_version() == ()
