"""What each rank does in the tests of two-batch overlap."""

from __future__ import annotations

import threading
from typing import Any

import torch

from interlock.moe.layer import MoELayer
from interlock.moe.terms import Phase
from interlock.parallel.topology import Groups
from tests.moe.layers import Weights, build_layer, make_step
from tests.moe.oracle import make_card
from tests.moe.rank_work import HIDDEN, sizes_of, tokens_of

STEPS = 8
ARMS = [
    (backend, layout) for backend in ("shared_memory", "collective") for layout in ("masked", "contiguous")
]


def plan_of(backend: str, layout: str) -> dict[str, Any]:
    return {
        "moe_a2a_backend": backend,
        "moe_runner_backend": "cpu",
        "moe_layout_prefill": layout,
        "moe_layout_decode": layout,
        "moe_prefill_capacity": 15,
        "moe_decode_capacity": 16,
    }


def same_bits_as_whole_steps(groups: Groups) -> int:
    """Replicas of 0, 1 and more tokens with padding, both phases in turn: the bits of whole steps."""
    weights = Weights(make_card(8, 3), HIDDEN, seed=4)
    compared = 0
    for backend, layout in ARMS:
        plan = plan_of(backend, layout) | sizes_of(groups)
        whole, one = build_layer(weights, groups=groups, kernels="cpu", **plan)
        halved, two = build_layer(weights, groups=groups, kernels="cpu", moe_overlap=True, **plan)
        for step in range(STEPS):
            hidden, live = tokens_of(groups.attn_dp.rank, step, 5)
            taken = make_step(len(hidden), live, list(Phase)[step % 2])
            assert torch.equal(halved.forward(hidden, taken), whole.forward(hidden, taken)), (plan, step)
            compared += 1
        _check_receipts(whole, halved)
        one.close()
        two.close()
    return compared


def _check_receipts(whole: MoELayer, halved: MoELayer) -> None:
    one, two = whole.observed(), halved.observed()
    assert (one.pop("overlapped"), two.pop("overlapped")) == (False, True)
    both = [receipt.pop("buffer_bytes") for receipt in (one, two)]
    assert one["capacity"] == two["capacity"] == {"prefill": 15, "decode": 16}
    assert all(isinstance(size, int) for size in both)
    two["runner_calls"] //= 2  # type: ignore[operator]
    assert one == two


def tokens_of_one_rank_only(groups: Groups, tokens: int) -> None:
    """One rank has ``tokens``, the others none: every half of every rank is exchanged all the same."""
    weights = Weights(make_card(8, 3), HIDDEN, seed=6)
    alone, context = build_layer(weights, kernels="cpu", moe_runner_backend="cpu")
    for backend, layout in ARMS:
        plan = plan_of(backend, layout) | sizes_of(groups)
        layer, two = build_layer(weights, groups=groups, kernels="cpu", moe_overlap=True, **plan)
        for busy in range(groups.world.size):
            mine = tokens if groups.attn_dp.rank == busy else 0
            hidden = torch.randn(mine, HIDDEN, generator=torch.Generator().manual_seed(busy))
            step = make_step(mine)
            assert torch.equal(layer.forward(hidden, step), alone.forward(hidden, step)), (plan, busy)
        two.close()
    context.close()


def experts_run_beside_the_exchange(groups: Groups) -> list[str]:
    """Which threads dispatch and combine, seen from the dispatchers; experts run in the caller's."""
    weights = Weights(make_card(8, 3), HIDDEN)
    plan = plan_of("shared_memory", "masked") | sizes_of(groups)
    layer, context = build_layer(weights, groups=groups, kernels="cpu", moe_overlap=True, **plan)
    assert context.overlap is not None
    seen: list[str] = []
    for name, dispatcher in zip(("first", "second"), context.overlap.dispatchers, strict=True):
        _watch(dispatcher, name, seen)
    runner: Any = layer._runner
    compute = runner.run

    def run(rows: Any) -> torch.Tensor:
        assert threading.current_thread() is threading.main_thread()
        return compute(rows)

    runner.run = run
    layer.forward(torch.randn(5, HIDDEN), make_step(5))
    context.close()
    return seen


def _watch(dispatcher: Any, name: str, seen: list[str]) -> None:
    for method in ("dispatch", "combine"):
        call = getattr(dispatcher, method)

        def watched(*args: Any, call: Any = call, what: str = f"{method} of the {name}") -> Any:
            where = "beside" if threading.current_thread() is not threading.main_thread() else "alone"
            seen.append(f"{what}: {where}")
            return call(*args)

        setattr(dispatcher, method, watched)


def experts_that_fail_leave_nothing_pending(groups: Groups, half: int) -> str:
    """The experts of one half raise on every rank: the error is theirs, and both dispatchers go on."""
    weights = Weights(make_card(8, 3), HIDDEN)
    plan = plan_of("shared_memory", "contiguous") | sizes_of(groups)
    layer, context = build_layer(weights, groups=groups, kernels="cpu", moe_overlap=True, **plan)
    runner: Any = layer._runner
    compute, calls = runner.run, []

    def run(rows: Any) -> torch.Tensor:
        calls.append(rows)
        if len(calls) == 1 + half:
            raise ZeroDivisionError(f"half {half}")
        return compute(rows)

    runner.run = run
    message = ""
    try:
        layer.forward(torch.randn(4, HIDDEN), make_step(4))
    except ZeroDivisionError as error:
        message = str(error)
    assert context.overlap is not None
    assert all(dispatcher._pending is None for dispatcher in context.overlap.dispatchers)  # type: ignore[attr-defined]
    groups.world.barrier()
    context.close()
    return message


def near_whole_steps_on_a_gpu(groups: Groups) -> int:
    """On a GPU kernels choose their tiles by the number of rows, so only rounding may differ."""
    weights = Weights(make_card(8, 3), HIDDEN, seed=4)
    compared = 0
    for layout in ("masked", "contiguous"):
        plan = plan_of("collective", layout) | sizes_of(groups)
        plan |= {"moe_runner_backend": "torch", "device": "cuda"}
        whole, one = build_layer(weights, groups=groups, device="cuda", **plan)
        halved, two = build_layer(weights, groups=groups, device="cuda", moe_overlap=True, **plan)
        for step in range(STEPS):
            hidden, live = tokens_of(groups.attn_dp.rank, step, 7)
            hidden, taken = hidden.cuda(), make_step(len(hidden), live, list(Phase)[step % 2])
            got, wanted = halved.forward(hidden, taken), whole.forward(hidden, taken)
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5, msg=f"{layout}, step {step}")
            compared += 1
        one.close()
        two.close()
    return compared
