"""The symmetric exchange on a CPU, all ranks in one thread, through Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import Phase as Stage
from hypothesis import given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton", reason="Triton is not installed: torch's CPU builds bring none")
if not triton.knobs.runtime.interpret:
    pytest.skip("set TRITON_INTERPRET=1 to run the GPU kernels on the CPU", allow_module_level=True)

from interlock.moe.a2a.rows import MaskedRows  # noqa: E402
from interlock.moe.a2a.symmetric import BACKEND, exchange, pulled, shape  # noqa: E402
from interlock.moe.a2a.symmetric.exchange import Arrived  # noqa: E402
from interlock.moe.a2a.symmetric.shape import RegionShape  # noqa: E402
from interlock.moe.conformance.backend_suite import run_backend_suite  # noqa: E402
from interlock.moe.conformance.cases import Case, Setting, make_case  # noqa: E402
from interlock.moe.conformance.cases import settings as walk  # noqa: E402
from interlock.moe.conformance.oracle import combined  # noqa: E402
from interlock.moe.conformance.received import check_received, computed  # noqa: E402
from interlock.moe.terms import Layout, Phase  # noqa: E402
from interlock.parallel.topology import Groups  # noqa: E402
from tests.moe.symmetric.simulated import LOOKS, Simulated, shape_of  # noqa: E402
from tests.moe.symmetric.without_gpu import take_gpu_away  # noqa: E402

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True, scope="module")
def few_programs():
    """The interpreter runs one program after the other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "ROW_WORKERS", 6)
        patch.setattr(exchange, "RETURN_WORKERS", 24)
        patch.setattr(exchange, "LEAST_CHUNK", 16)
        patch.setattr(pulled, "TAKING_PROGRAMS", 6)
        patch.setattr(pulled, "PUBLISHERS", 4)
        patch.setattr(pulled, "COPY_WORKERS", 6)
        patch.setattr(pulled, "SCAN", 32)
        yield


def exchange_and_check(ranks: Simulated, case: Case) -> None:
    setting = ranks.setting
    received = ranks.dispatch(case, case.phase)
    assert ranks.problems() == []
    results = []
    for rank, (rows, _) in enumerate(received):
        check_received(rows, case, setting, rank, ordered=True)
        results.append(computed(rows, setting, rank))
    for rank, out in enumerate(ranks.combine(case, results, [arrived for _, arrived in received])):
        assert torch.equal(out, combined(case, setting, rank)), (case.label, rank)
    assert ranks.problems() == []


def first_setting(ranks: int, seed: int) -> Setting:
    return next(walk(BACKEND, ranks, seed))


PLAIN = Setting(
    index=0, ranks=3, num_experts=7, top_k=2, hidden_size=16, row_dtype="bfloat16", dtype="bfloat16",
    layouts=((Phase.PREFILL, Layout.CONTIGUOUS), (Phase.DECODE, Layout.MASKED)),
    capacity=((Phase.PREFILL, 5), (Phase.DECODE, 3)), alignment=4, deterministic=False, validate=False,
)  # fmt: skip


@settings(max_examples=12, deadline=None, phases=(Stage.generate, Stage.shrink))
@given(ranks=st.sampled_from((1, 2, 3, 4)), seed=st.integers(0, 10_000), few=st.booleans())
def test_any_exchange_is_the_oracles(ranks: int, seed: int, few: bool) -> None:
    """Rows, counts, order, scales, weights and sums, in shared buffers; lanes in one chunk or more."""
    with pytest.MonkeyPatch.context() as patch:
        if not few:
            patch.setattr(exchange, "FEW_LANES", 4)
            patch.setattr(exchange, "CHUNK", 16)
        simulated = Simulated.of(first_setting(ranks, seed))
        for each in simulated.exchanges:
            each._histogram = torch.empty(64, each.shape.bins, dtype=torch.int32)
        for number in range(2):
            exchange_and_check(simulated, make_case(simulated.setting, number, seed))


@settings(max_examples=6, deadline=None, phases=(Stage.generate, Stage.shrink))
@given(ranks=st.sampled_from((1, 2, 3)), seed=st.integers(0, 10_000))
def test_slabs_of_many_tokens_are_the_oracles(ranks: int, seed: int) -> None:
    """Those that are too many for every program to look through their routes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shape, "FEW_ROUTES", 1)
        simulated = Simulated.of(first_setting(ranks, seed))
        assert simulated.exchanges[0].shape.few_tokens == 0
        for number in range(2):
            exchange_and_check(simulated, make_case(simulated.setting, number, seed))


def test_results_that_lie_where_they_are_read_from_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = Simulated.of(PLAIN)
    case = next(case for case in (make_case(PLAIN, n, 1) for n in range(9)) if case.phase is Phase.DECODE)
    received = simulated.dispatch(case, case.phase)
    results = []
    for rank, (rows, _) in enumerate(received):
        assert isinstance(rows, MaskedRows)
        assert rows.results is not None
        rows.results.copy_(computed(rows, PLAIN, rank))
        results.append(rows.results)
    monkeypatch.delattr(pulled.pulled_kernels, "copy_results_kernel")
    for rank, out in enumerate(simulated.combine(case, results, [arrived for _, arrived in received])):
        assert torch.equal(out, combined(case, PLAIN, rank))


def test_ranks_that_give_up_meet_before_the_next_step() -> None:
    simulated = Simulated.of(PLAIN)
    case = next(case for case in (make_case(PLAIN, n, 1) for n in range(9)) if case.phase is Phase.DECODE)
    simulated.dispatch(case, case.phase)
    for each in simulated.pulled[1:]:
        each.settle(waits=False)
    simulated.pulled[1].settle(signals=False)
    assert simulated.exchanges[1].notice.tolist()[:4] == [7, 0, 1, LOOKS], "rank 0 did not give up"
    simulated.pulled[0].settle()
    assert not int(simulated.exchanges[0].notice[0])


def test_a_rank_that_does_not_publish_is_named() -> None:
    """J02: and the ranks that saw it late tell nobody that rows came."""
    simulated = Simulated.of(PLAIN)
    case = next(case for case in (make_case(PLAIN, n, 1) for n in range(9)) if case.phase is Phase.DECODE)

    def dispatch(rank: int, **halves: bool) -> Arrived:
        inputs = case.hidden[rank], case.scales[rank], case.ids[rank], case.weights[rank]
        return simulated.pulled[rank].dispatch(*inputs, 9, **halves)

    dispatch(0, takes=False)
    dispatch(2, takes=False)
    arrived = dispatch(2, publishes=False)
    assert arrived.counts.tolist() == [0, 0]
    assert simulated.exchanges[2].notice.tolist()[:4] == [6, 1, 1, LOOKS]
    before = simulated.exchanges[0]._own.clone()
    dispatch(2)
    assert torch.equal(simulated.exchanges[0]._own, before), "it gave up, and sends nothing more"


@pytest.mark.parametrize("expert", [7, 10**12, -2])
def test_an_expert_that_does_not_exist_is_named_of_few_tokens(expert: int) -> None:
    simulated = Simulated.of(PLAIN)
    ids = torch.tensor([[0, 1], [2, expert]])
    x, weights = torch.zeros(2, 16).bfloat16(), torch.zeros(2, 2)
    first = simulated.exchanges[0]
    simulated.pulled[0].dispatch(x, None, ids, weights, 9, takes=False)
    assert first.notice.tolist()[0] == 4
    assert first.notice.tolist()[1] == 3
    assert first.notice.tolist()[3] == expert
    flags = simulated.exchanges[1].section("published", torch.int32)
    assert not bool(flags[: pulled.PUBLISHERS].all())


def test_more_rows_than_a_slab_holds_are_not_written() -> None:
    """B24: a token that names an expert twice."""
    simulated = Simulated.of(PLAIN)
    ids = torch.tensor([[6, 6]] * 3)
    x, weights = torch.zeros(3, 16).bfloat16(), torch.ones(3, 2)
    for halves in ({"takes": False}, {"publishes": False}):
        arrived = [each.dispatch(x, None, ids, weights, 9, **halves) for each in simulated.pulled]
    assert int(arrived[2].counts.max()) <= 9
    assert simulated.exchanges[2].notice.tolist()[0] == 5


def test_eight_ranks() -> None:
    simulated = Simulated.of(first_setting(8, 9))
    exchange_and_check(simulated, make_case(simulated.setting, 1, 9))


def test_what_is_allocated_is_what_the_plan_says() -> None:
    for seed in range(6):
        setting = first_setting(1 + seed % 4, seed)
        simulated = Simulated.of(setting)
        region = RegionShape.of(shape_of(setting))
        for each, beside in zip(simulated.exchanges, simulated.pulled, strict=True):
            assert each.private_bytes + beside.private_bytes == region.private_bytes
        assert BACKEND.buffer_bytes(shape_of(setting)) == region.region_bytes + region.private_bytes


@pytest.mark.parametrize("epoch", [2**31 - 2, -2])
def test_steps_are_counted_beyond_what_the_counter_holds(epoch: int) -> None:
    simulated = Simulated.of(PLAIN)
    for each in simulated.exchanges:
        each.state[0] = epoch
        each._own[: each.shape.sizes()["flags"]].view(torch.int32)[:] = epoch
    for number in range(3):
        exchange_and_check(simulated, make_case(PLAIN, number, 3))


def test_a_rank_that_does_not_come_is_named() -> None:
    """J02: the error says which rank, and which of its steps is missing; nobody hangs."""
    simulated = Simulated.of(PLAIN)
    case = make_case(PLAIN, 0, 0)
    first, second, _ = simulated.exchanges
    first.exchange_counts(case.ids[0], 9, 1)
    assert first.notice.tolist()[:4] == [1, 1, 1, LOOKS], "rank 1 is the first that is late, in exchange 1"
    second.exchange_counts(case.ids[1], 9, 1)
    assert second.notice.tolist()[:2] == [1, 2], "rank 0 has told its counts, rank 2 has not"


def test_a_rank_that_gave_up_sends_nothing_more() -> None:
    """Its peers must not take what it has not finished for rows."""
    simulated = Simulated.of(PLAIN)
    case = make_case(PLAIN, 0, 0)
    first, second, third = simulated.exchanges
    first.exchange_counts(case.ids[0], 9, 1)
    before = second._own.clone()
    first.send_rows(case.hidden[0], case.scales[0], case.weights[0])
    assert first.notice.tolist()[:2] == [1, 1]
    assert torch.equal(second._own, before)
    arrived = first.exchange_counts(case.ids[0], 9, 1)
    assert arrived.counts.tolist() == [0, 0, 0]
    assert torch.equal(second._own, before)
    for each, rank in ((second, 1), (third, 2)):
        each.exchange_counts(case.ids[rank], 9, 1, waits=False)
    second.exchange_counts(case.ids[1], 9, 1, sends=False)
    second.send_rows(case.hidden[1], case.scales[1], case.weights[1])
    assert second.notice.tolist()[:2] == [2, 0], "rank 0 did not finish the dispatch"


@pytest.mark.parametrize(("stage", "code"), [(1, 2), (2, 3)])
def test_each_wait_says_what_is_missing(stage: int, code: int) -> None:
    simulated = Simulated.of(PLAIN)
    simulated.exchanges[1].state[0] = 5
    simulated.exchanges[1].await_stage(stage)
    assert simulated.exchanges[1].notice.tolist()[:4] == [code, 0, 5, LOOKS]


@pytest.mark.parametrize("expert", [7, 10**12, -2])
@pytest.mark.parametrize("few", [True, False])
def test_an_expert_that_does_not_exist_is_named(expert: int, few: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if not few:
            patch.setattr(exchange, "FEW_LANES", 1)
        simulated = Simulated.of(PLAIN)
        ids = torch.tensor([[0, 1], [2, expert]])
        simulated.exchanges[0].exchange_counts(ids, 9, 1, waits=False)
    assert simulated.exchanges[0].notice.tolist()[:4] == [4, 3, few * 0, expert]
    assert int(simulated.exchanges[0]._own[: simulated.exchanges[0].shape.sizes()["flags"]].sum()) == 0


def test_rows_beyond_the_memory_are_not_written() -> None:
    """B24: an expert that is named twice by a token, which the contract forbids, overwrites nothing."""
    simulated = Simulated.of(PLAIN)
    ids = torch.tensor([[6, 6]] * 5)
    for each in simulated.exchanges:
        each.exchange_counts(ids, 9, 1, waits=False)
    for each in simulated.exchanges:
        each.exchange_counts(ids, 9, 1, sends=False)
    first = simulated.exchanges[0]
    rows = first.shape.slab_rows
    targets = first._targets[:10]
    assert int((targets & 0xFFFFFFFF).max()) < rows
    last = simulated.exchanges[2]
    assert last.notice.tolist()[0] == 5
    assert last._targets[:10].tolist().count(-1) == 9 + 30 - rows


def test_the_dispatcher_of_one_rank_conforms(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole suite, misuse and receipts included.

    The interpreter runs the programs of a launch one after the other, so that it would stand still if one of
    them waited for a later one: with ranks that share a GPU none does.
    """
    on_cpu = take_gpu_away(monkeypatch)
    found = run_backend_suite(on_cpu, Groups.single(), device="cpu", cases=16, seed=2, ranks_per_gpu=2)
    assert found.failures == []
    assert found.cases == 16
    assert {"contiguous", "masked"} <= set(found.coverage)


def launches_of_a_step(monkeypatch: pytest.MonkeyPatch, waiting: int) -> list[tuple[str, int, bool]]:
    """Name, programs, and whether they wait for peers, of a dispatch and combine of few tokens."""
    launched: list[tuple[str, int, bool]] = []

    class Recorded:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*_: object, **options: object) -> None:
                raises = bool(options.get("publishes") or options.get("signals"))
                alone = self.name in ("meet_kernel", "await_routes_kernel")
                waits = alone or (raises and bool(options.get("takes")))
                launched.append((self.name, prod(grid), waits))

            return launch

    for name in [name for name in vars(pulled.pulled_kernels) if name.endswith("_kernel")]:
        monkeypatch.setattr(pulled.pulled_kernels, name, Recorded(name))
    wide = replace(PLAIN, num_experts=24, top_k=8, capacity=((Phase.PREFILL, 64), (Phase.DECODE, 64)))
    few = pulled.PulledExchange(Simulated.of(wide).exchanges[0], waiting)
    x, ids = torch.zeros(64, 16).bfloat16(), torch.zeros(64, 8, dtype=torch.int64)
    arrived = few.dispatch(x, None, ids, torch.zeros(64, 8), 192)
    few.combine(few.result_slab.view(torch.bfloat16), ids, arrived, 192)
    return launched


def test_ranks_that_share_a_gpu_wait_in_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ranks and jobs share it: those who wait leave room for those who are waited for."""
    monkeypatch.setattr(pulled, "TAKING_PROGRAMS", 256)
    launched = launches_of_a_step(monkeypatch, pulled.waiting_programs(132, ranks_per_gpu=2))
    assert [name for name, _, _ in launched] == [
        "dispatch_kernel", "await_routes_kernel", "dispatch_kernel", "meet_kernel", "combine_kernel",
    ]  # fmt: skip
    assert all(programs == 1 for _, programs, waits in launched if waits)
    assert {programs for _, programs, waits in launched if not waits} == {256, 64}


@pytest.mark.parametrize("multiprocessors", [1, 2, 16, 40, 132])
def test_a_rank_of_its_own_gpu_waits_in_no_more_programs_than_fit(
    multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulled, "TAKING_PROGRAMS", 256)
    waiting = pulled.waiting_programs(multiprocessors, ranks_per_gpu=1)
    launched = launches_of_a_step(monkeypatch, waiting)
    assert [(name, waits) for name, _, waits in launched] == [
        ("dispatch_kernel", True), ("combine_kernel", True),
    ]  # fmt: skip
    registers = pulled.REGISTERS * pulled.WARPS * 32
    assert all(programs <= waiting for _, programs, _ in launched)
    assert waiting * registers <= multiprocessors * 65536


def test_few_kernels_are_compiled_whatever_the_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """B25: what a kernel is compiled for does not follow the size of the batch."""
    variants: dict[str, set[tuple[object, ...]]] = {}

    class Recorded:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: object) -> Callable[..., None]:
            def launch(*_: object, **constants: object) -> None:
                variants.setdefault(self.name, set()).add(tuple(sorted(constants.items())))

            return launch

    for module in (exchange.exchange_kernels, exchange.row_kernels, pulled.pulled_kernels):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Recorded(name))
    monkeypatch.setattr(exchange, "LEAST_CHUNK", 128)
    monkeypatch.setattr(exchange, "FEW_LANES", 1024)
    wide = replace(PLAIN, num_experts=24, top_k=8, capacity=((Phase.PREFILL, 300), (Phase.DECODE, 300)))
    simulated = Simulated.of(wide)
    one, few = simulated.exchanges[0], simulated.pulled[0]
    for tokens in range(258):
        arrived = one.exchange_counts(torch.zeros(tokens, 8, dtype=torch.int64), 900, 1)
        one.send_rows(torch.zeros(tokens, 16).bfloat16(), None, torch.zeros(tokens, 8))
        one.return_rows(torch.zeros(2700, 16).bfloat16(), arrived)
        ids, weights = torch.zeros(tokens, 8, dtype=torch.int64), torch.zeros(tokens, 8)
        arrived = few.dispatch(torch.zeros(tokens, 16).bfloat16(), None, ids, weights, 900)
        few.combine(torch.zeros(7200, 16).bfloat16(), ids, arrived, 900)
    few.settle()
    assert set(variants) == {
        *("count_kernel", "exchange_kernel", "target_kernel"),
        *("send_rows_kernel", "return_rows_kernel"),
        *("dispatch_kernel", "combine_kernel", "copy_results_kernel", "meet_kernel"),
    }
    assert sum(len(each) for each in variants.values()) <= 14
