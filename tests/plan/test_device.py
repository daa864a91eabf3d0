"""Device, kernels, threads and dtypes from machine facts; the facts themselves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from interlock.errors import Refusal
from interlock.kernels.availability import native_cpu_unavailable
from interlock.launch import machine_facts, plan_launch
from interlock.options import Options
from interlock.plan import nvml
from interlock.plan.explain import summary
from interlock.plan.facts import MachineFacts, load_facts, probe
from interlock.plan.join import Declarations
from interlock.plan.kernel_choice import ROW_INVARIANT
from interlock.plan.launch_plan import LaunchPlan
from interlock.plan.resolve import resolve
from tests.plan.machines import gpu_machine, machine, tiny_card

NO_COMPILER = machine(native_kernels_problem="no C++ compiler is on PATH")


def plan_for(facts: MachineFacts | None = None, **asked: object) -> LaunchPlan:
    return resolve(Options.of(model="m", **asked), tiny_card(), facts or machine())


def test_native_kernels_where_a_compiler_is_and_the_reason_where_not() -> None:
    assert plan_for().kernels == "cpu"
    plan = plan_for(NO_COMPILER)
    assert plan.kernels == "torch"
    assert "no C++ compiler" in plan.provenance["kernels"].reason
    with pytest.raises(Refusal, match="no C") as caught:
        plan_for(NO_COMPILER, kernels="cpu")
    assert caught.value.alternatives == ("--kernels torch",)


def bf16_plan(facts: MachineFacts, **asked: object) -> LaunchPlan:
    card = tiny_card(weight_format="bfloat16", dtype="bfloat16")
    return resolve(Options.of(model="m", **asked), card, facts)


def test_triton_on_a_gpu_that_can_and_the_reason_where_not() -> None:
    plan = bf16_plan(gpu_machine(gpus=1))
    assert (plan.device, plan.kernels) == ("cuda", "triton")
    assert "triton 3.6.0" in plan.provenance["kernels"].reason
    assert bf16_plan(gpu_machine(gpus=1), kernels="torch").kernels == "torch"
    for facts, reason in (
        (gpu_machine(gpus=1, triton=None), "not installed"),
        (gpu_machine(gpus=1, capability="7.5"), "8.0 or more, and one has 7.5"),
        (gpu_machine(gpus=1, capability=""), "one has none"),
    ):
        plan = bf16_plan(facts)
        assert plan.kernels == "torch"
        assert reason in plan.provenance["kernels"].reason
        with pytest.raises(Refusal, match=reason) as caught:
            bf16_plan(facts, kernels="triton")
        assert "--kernels torch" in caught.value.alternatives


def test_triton_without_a_gpu_is_refused_with_kernels_that_run() -> None:
    with pytest.raises(Refusal, match="run on an NVIDIA GPU, and --device is cpu") as caught:
        plan_for(kernels="triton")
    assert caught.value.alternatives == ("--kernels cpu", "--kernels torch")
    with pytest.raises(Refusal, match="--device is cpu") as caught:
        bf16_plan(gpu_machine(gpus=1), kernels="triton", device="cpu")
    assert caught.value.alternatives[0] == "--device cuda"


def test_cores_are_shared_among_the_ranks_of_a_node() -> None:
    assert plan_for(tp_size=4).threads == 16
    assert plan_for(tp_size=4, nnodes=2, dist_init="a:1").threads == 32
    assert plan_for(machine(cores=1), tp_size=2).threads == 1
    assert plan_for(threads=3).threads == 3


def test_one_host_thread_launches_the_kernels_of_a_gpu() -> None:
    assert bf16_plan(gpu_machine(gpus=1)).threads == 1
    with pytest.raises(Refusal, match="one host thread launches them"):
        bf16_plan(gpu_machine(gpus=1), threads=4)


def test_gpus_are_taken_where_there_are_enough() -> None:
    assert plan_for(gpu_machine(gpus=2), tp_size=2).device == "cuda"
    few = plan_for(gpu_machine(gpus=2), tp_size=4)
    assert few.device == "cpu"
    assert "4 GPUs; 2 found" in few.provenance["device"].reason
    with pytest.raises(Refusal, match="2 found") as caught:
        plan_for(gpu_machine(gpus=2), tp_size=4, device="cuda")
    assert caught.value.alternatives == ("--device cpu", "--tp-size 2", "--ranks-per-gpu 2")


def test_a_cpu_build_of_torch_cannot_use_gpus() -> None:
    facts = msgspec.structs.replace(gpu_machine(), packages={"torch": "2.13.0+cpu"})
    assert "without CUDA" in plan_for(facts).provenance["device"].reason
    with pytest.raises(Refusal, match="without CUDA"):
        plan_for(facts, device="cuda")


def test_determinism_needs_row_invariant_kernels() -> None:
    assert plan_for(deterministic=True).kernels == "cpu"
    for facts, asked in ((machine(), {"kernels": "torch"}), (NO_COMPILER, {}), (gpu_machine(), {})):
        with pytest.raises(Refusal, match="row-invariant") as caught:
            plan_for(facts, deterministic=True, **asked)
        assert caught.value.option == "--deterministic"
        assert caught.value.alternatives


def test_row_invariant_kernel_sets_are_those_whose_classes_say_so() -> None:
    from interlock.kernels.torch_reference import TorchKernels

    assert ("torch" in ROW_INVARIANT) == TorchKernels.row_invariant
    assert "triton" not in ROW_INVARIANT
    if native_cpu_unavailable() is None:
        from interlock.kernels.cpu.kernels import CpuKernels

        assert ("cpu" in ROW_INVARIANT) == CpuKernels.row_invariant


def test_fp8_checkpoints_say_that_they_are_dequantised() -> None:
    card = tiny_card(weight_format="fp8_block", dtype="bfloat16")
    plan = resolve(Options.of(model="m"), card, machine())
    assert plan.dtype == "bfloat16"
    assert "dequantised" in plan.provenance["attention_weight_format"].reason
    assert plan.kv_cache_dtype == "bfloat16"


def test_facts_of_this_machine_are_probed_without_torch() -> None:
    code = (
        "import sys; from interlock.plan.facts import probe; f = probe(packages={'hypothesis', 'nonesuch'});"
        "import msgspec; print(msgspec.json.encode(f).decode()); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    facts = json.loads(done.stdout)
    assert facts["cores"] >= 1
    assert 0 < facts["memory_available"] <= facts["memory_total"]
    assert "hypothesis" in facts["packages"]
    assert "nonesuch" not in facts["packages"]
    assert "torch" in facts["packages"]


def test_facts_travel_as_json(tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    file.write_bytes(msgspec.json.encode(gpu_machine()))
    assert load_facts(str(file)) == gpu_machine()
    file.write_text("{}")
    with pytest.raises(Refusal, match="cannot be read"):
        load_facts(str(file))
    with pytest.raises(Refusal, match="cannot be read"):
        load_facts(str(tmp_path / "none"))


def test_probe_agrees_with_the_machine() -> None:
    facts = probe()
    assert facts.native_kernels_problem == native_cpu_unavailable()


def test_every_way_to_a_plan_sees_the_devices_that_cuda_would(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(nvml, "nvidia_gpus", lambda visible: seen.append(visible) or nvml.Gpus())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    given = {"load_format": "dummy", "num_hidden_layers": 1, "max_model_len": 256}
    plan_launch("shape:qwen3-30b-a3b", Options.of(**given))
    machine_facts()
    assert seen == ["1", "1"]


def test_the_facts_name_every_library_that_a_declaration_needs() -> None:
    assert machine_facts().libraries.keys() == Declarations.registered().libraries()


def test_an_fp8_cache_is_said_to_have_no_calibrated_scale() -> None:
    """D11: in the plan that ``/plan`` shows, and once in what ``serve`` prints."""
    plan = bf16_plan(gpu_machine(gpus=1), kv_cache_dtype="fp8_e4m3")
    assert "every value has scale 1, uncalibrated" in plan.provenance["kv_cache_dtype"].reason
    assert summary(plan).count("warning: keys and values are cached as fp8_e4m3") == 1
    assert "warning" not in summary(bf16_plan(gpu_machine(gpus=1)))


def test_an_fp8_cache_where_the_kernels_can_convert_it() -> None:
    plan, plain = bf16_plan(gpu_machine(gpus=1), kv_cache_dtype="fp8_e4m3"), bf16_plan(gpu_machine(gpus=1))
    assert (plan.kv_cache_dtype, plain.kv_cache_dtype) == ("fp8_e4m3", "bfloat16")
    pages = plan.full_pages + plan.window_pages
    bytes_a_page = (plan.memory.kv_full + plan.memory.kv_window) / pages
    assert 2 * bytes_a_page * pages == pytest.approx(plain.memory.kv_full + plain.memory.kv_window)
    assert plan_for(kv_cache_dtype="fp8_e4m3", kernels="torch").kv_cache_dtype == "fp8_e4m3"
    for facts, words in ((machine(), "--kernels cpu cache"), (gpu_machine(gpus=1, capability="8.0"), "8.9")):
        with pytest.raises(Refusal, match=words) as caught:
            bf16_plan(facts, kv_cache_dtype="fp8_e4m3")
        assert caught.value.alternatives[0] == "--kv-cache-dtype auto"
