"""What joins the GPUs of a machine: a backend that needs it is neither chosen nor started without."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from interlock.errors import Refusal
from interlock.options import Options
from interlock.plan import nvml
from interlock.plan.facts import MachineFacts, probe
from interlock.plan.join import Declarations
from interlock.plan.launch_plan import LaunchPlan
from interlock.plan.matrix import matrix
from interlock.plan.resolve import resolve
from tests.plan.machines import gpu_machine, tiny_card

NOTHING_JOINS = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))


def machine_of(apart: tuple[tuple[int, int], ...], gpus: int = 4, **changes: Any) -> MachineFacts:
    return msgspec.structs.replace(gpu_machine(gpus), gpus_apart=apart, **changes)


def plan(facts: MachineFacts, declared: Declarations | None = None, **options: Any) -> LaunchPlan:
    card = tiny_card(dtype="bfloat16")
    return resolve(Options.of(model="m", **options), card, facts, declared=declared)


def test_auto_passes_over_what_needs_a_link_that_is_not_there() -> None:
    made = plan(machine_of(NOTHING_JOINS), tp_size=4, ep_size=4)
    assert made.moe_a2a_backend == "none"
    reason = made.provenance["moe_a2a_backend"].reason
    assert "symmetric needs NVLink between the GPUs, and GPUs 0 and 1 have none" in reason


def test_what_was_asked_for_is_refused_before_anything_starts() -> None:
    with pytest.raises(Refusal) as caught:
        plan(machine_of(((1, 3),)), tp_size=4, moe_a2a_backend="symmetric")
    text = str(caught.value)
    assert "--moe-a2a-backend symmetric" in text
    assert "GPUs 1 and 3 have none" in text
    assert "--moe-a2a-backend collective" in text


@pytest.mark.parametrize(
    "options", [{"tp_size": 2}, {"tp_size": 4, "ranks_per_gpu": 2}, {"tp_size": 2, "ranks_per_gpu": 2}]
)
def test_only_the_gpus_that_ranks_use_must_be_joined(options: dict[str, int]) -> None:
    made = plan(machine_of(((2, 3),)), moe_a2a_backend="symmetric", **options)
    assert made.moe_a2a_backend == "symmetric"


def test_what_goes_over_the_bus_needs_no_nvlink() -> None:
    for name in ("none", "collective"):
        assert plan(machine_of(NOTHING_JOINS), tp_size=4, moe_a2a_backend=name).moe_a2a_backend == name


@pytest.mark.parametrize(("rdma", "works"), [(("mlx5_0",), True), ((), False)])
def test_rdma_takes_the_place_of_nvlink_where_a_backend_declares_it(
    rdma: tuple[str, ...], works: bool
) -> None:
    declared = Declarations.registered()
    wants = replace(declared.a2a["collective"], links=frozenset({"nvlink", "rdma"}))
    declared = replace(declared, a2a={**declared.a2a, "collective": wants})
    facts = machine_of(NOTHING_JOINS, rdma_devices=rdma)
    if works:
        assert plan(facts, declared, tp_size=4, moe_a2a_backend="collective")
        return
    with pytest.raises(Refusal, match="needs NVLink or RDMA between the GPUs"):
        plan(facts, declared, tp_size=4, moe_a2a_backend="collective")


def test_the_list_of_backends_says_so() -> None:
    cells = matrix(Declarations.registered(), machine_of(NOTHING_JOINS), device="cuda", kernels="triton")
    problems = {cell.a2a: cell.problem for cell in cells if cell.runner == "triton"}
    assert problems["symmetric"] == "needs NVLink between the GPUs, and GPUs 0 and 1 have none"
    assert problems["collective"] is None


class Driver:
    """NVML with GPUs named by their number. ``status[capability]`` of a pair; what is missing is joined."""

    def __init__(self, gpus: int, nvlink: dict[tuple[int, int], int], atomics: int, told: int = 0) -> None:
        self._gpus, self._nvlink, self._atomics, self._told = gpus, nvlink, atomics, told

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlShutdown(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = self._gpus
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        handle._obj.value = index.value + 1
        return 0

    def nvmlDeviceGetName(self, handle: Any, name: Any, size: int) -> int:
        name.value = b"gpu %d" % (handle.value - 1)
        return 0

    def nvmlDeviceGetUUID(self, handle: Any, uuid: Any, size: int) -> int:
        uuid.value = b"GPU-%d" % handle.value
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total = 1 << 30
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        major._obj.value = 9
        return 0

    def nvmlDeviceGetP2PStatus(self, first: Any, second: Any, capability: Any, status: Any) -> int:
        pair = (first.value - 1, second.value - 1)
        answer = self._nvlink.get(pair, 0) if capability.value == nvml.NVLINK else self._atomics
        status._obj.value = answer
        return self._told


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("0,2", ["gpu 0", "gpu 2"]),
        ("", []),
        ("-1", []),
        ("2,9,0", ["gpu 2"]),
        ("GPU-2", ["gpu 1"]),
        ("GPU-", []),
        ("1,1", []),
    ],
)
def test_visible_devices_are_read_as_cuda_does(
    monkeypatch: pytest.MonkeyPatch, visible: str, names: list[str]
) -> None:
    facts = probed(monkeypatch, Driver(3, {}, atomics=0), visible)
    assert [device.name for device in facts.devices] == names


def probed(monkeypatch: pytest.MonkeyPatch, driver: Driver, visible: str | None = None) -> MachineFacts:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return probe()


def test_pairs_are_counted_among_the_gpus_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(4, {(1, 3): 5, (3, 1): 5, (0, 2): 5, (2, 0): 5}, atomics=5)
    assert probed(monkeypatch, driver).gpus_apart == ((0, 2), (1, 3))
    assert probed(monkeypatch, driver, "3,2,1").gpus_apart == ((0, 2),)


@pytest.mark.parametrize(
    "driver",
    [
        Driver(2, {(0, 1): 5}, atomics=0),
        Driver(2, {(0, 1): 6}, atomics=5),
        Driver(2, {(0, 1): 5}, atomics=5, told=3),
        Driver(1, {}, atomics=5),
    ],
    ids=["atomics work", "not known", "the driver does not tell", "one GPU"],
)
def test_only_what_the_driver_denies_is_apart(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    assert probed(monkeypatch, driver).gpus_apart == ()


def test_a_driver_without_the_question_leaves_it_open(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old(Driver):
        def __getattribute__(self, name: str) -> Any:
            if name == "nvmlDeviceGetP2PStatus":
                raise AttributeError(name)
            return super().__getattribute__(name)

    assert probed(monkeypatch, Old(2, {(0, 1): 5}, atomics=5)).gpus_apart == ()
