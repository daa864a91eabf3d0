"""One MoE layer in one process: every backend and runner against the loop oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from interlock.errors import CheckpointError, InterlockError, StartupError
from interlock.kernels.availability import native_cpu_unavailable
from interlock.moe.a2a.contract import ContractError
from interlock.moe.a2a.registry import a2a_backends
from interlock.moe.terms import Phase
from tests.moe.layers import Weights, build_layer, make_step
from tests.moe.oracle import make_card

ON_ONE_RANK = [
    backend
    for backend in a2a_backends().entries.values()
    if "cpu" in backend.devices and backend.min_ranks == 1
]
COMBINATIONS = [
    (backend.name, layout.value, runner)
    for backend in ON_ONE_RANK
    for layout in sorted(backend.layouts[Phase.DECODE])
    for runner in ("torch", "cpu")
]


def layer_of(
    backend: str = "none", layout: str = "replicated", runner: str = "torch", **overrides: object
) -> tuple:
    weights = Weights(make_card(8, 3, routed_scaling_factor=1.5), 48)
    layer, context = build_layer(
        weights,
        moe_a2a_backend=backend,
        moe_runner_backend=runner,
        moe_layout_prefill=layout,
        moe_layout_decode=layout,
        **overrides,
    )
    return weights, layer, context


def hidden_rows(tokens: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(tokens, 48, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("backend", "layout", "runner"), COMBINATIONS)
@pytest.mark.parametrize("tokens", [0, 1, 5, 16])
def test_equals_loop_oracle(backend: str, layout: str, runner: str, tokens: int) -> None:
    """B15: one rank is an ordinary group: every backend gives what the loop over experts gives."""
    weights, layer, context = layer_of(backend, layout, runner)
    hidden = hidden_rows(tokens)
    for _ in range(2):
        out = layer.forward(hidden, make_step(tokens))
        assert out.shape == (tokens, 48)
        np.testing.assert_allclose(out.numpy(), weights.expected(hidden), atol=2e-6)
    context.close()


@pytest.mark.parametrize(("backend", "layout", "runner"), COMBINATIONS)
def test_padding_rows_give_zeros(backend: str, layout: str, runner: str) -> None:
    """B15, B11: 5 tokens padded to 8 with rows of NaN: rows 5 to 7 are zeros and 10 routes were computed."""
    weights, layer, context = layer_of(backend, layout, runner)
    hidden = hidden_rows(8)
    hidden[5:] = torch.nan
    out = layer.forward(hidden, make_step(8, live=5))
    np.testing.assert_allclose(out[:5].numpy(), weights.expected(hidden[:5]), atol=2e-6)
    assert out[5:].eq(0).all()
    context.close()


@pytest.mark.parametrize(("backend", "layout", "runner"), COMBINATIONS)
def test_a_token_of_nan_changes_no_other_bits(backend: str, layout: str, runner: str) -> None:
    """B11: a NaN in one request's row stays in that row; to the bit where the kernels are row-invariant."""
    if native_cpu_unavailable() and runner == "cpu":
        pytest.skip(str(native_cpu_unavailable()))
    kernels = "cpu" if runner == "cpu" else "torch"
    _, layer, context = layer_of(backend, layout, runner, kernels=kernels)
    hidden = hidden_rows(6)
    clean = layer.forward(hidden, make_step(6))
    hidden[2, 7] = torch.nan
    dirty = layer.forward(hidden, make_step(6))
    others = [0, 1, 3, 4, 5]
    if runner == "cpu":
        assert torch.equal(dirty[others], clean[others])
    torch.testing.assert_close(dirty[others], clean[others], rtol=0, atol=1e-6)
    assert dirty[2].isnan().any()
    context.close()


@pytest.mark.parametrize(("backend", "layout", "runner"), COMBINATIONS)
def test_bfloat16(backend: str, layout: str, runner: str) -> None:
    weights, layer, context = layer_of(backend, layout, runner, dtype="bfloat16")
    hidden = hidden_rows(7).bfloat16()
    out = layer.forward(hidden, make_step(7))
    assert out.dtype == torch.bfloat16
    expected = weights.expected(hidden.float())
    np.testing.assert_allclose(out.float().numpy(), expected, atol=0.02 * np.abs(expected).max())
    context.close()


@pytest.mark.parametrize(("backend", "layout", "runner"), COMBINATIONS)
def test_strided_rows(backend: str, layout: str, runner: str) -> None:
    """B23: rows that are not contiguous are read by their strides or copied, never reinterpreted."""
    weights, layer, context = layer_of(backend, layout, runner)
    wide = torch.randn(6, 96, generator=torch.Generator().manual_seed(4))
    out = layer.forward(wide[:, :48], make_step(6))
    np.testing.assert_allclose(out.numpy(), weights.expected(wide[:, :48]), atol=2e-6)
    context.close()


@pytest.mark.parametrize("backend", [backend.name for backend in ON_ONE_RANK])
def test_more_tokens_than_capacity_are_refused(backend: str) -> None:
    """B24: n > T is an error with both numbers, and the next step works."""
    layout = "replicated" if backend == "none" else "contiguous"
    weights, layer, context = layer_of(backend, layout, moe_decode_capacity=4)
    with pytest.raises(ContractError, match="5 tokens in a decode step, the capacity of a rank is 4"):
        layer.forward(hidden_rows(5), make_step(5))
    out = layer.forward(hidden_rows(4), make_step(4))
    np.testing.assert_allclose(out.numpy(), weights.expected(hidden_rows(4)), atol=2e-6)
    assert layer.forward(hidden_rows(5), make_step(5, phase=Phase.PREFILL)).shape == (5, 48)
    context.close()


def test_a_failing_runner_releases_the_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    """B28: an error between dispatch and combine does not poison the next step."""
    weights, layer, context = layer_of("collective", "masked")
    with monkeypatch.context() as patch:
        patch.setattr(layer, "_runner", None)
        with pytest.raises(AttributeError):
            layer.forward(hidden_rows(3), make_step(3))
    out = layer.forward(hidden_rows(3), make_step(3))
    np.testing.assert_allclose(out.numpy(), weights.expected(hidden_rows(3)), atol=2e-6)
    context.close()


def test_receipts() -> None:
    """What was built and what was called, for each layer and phase."""
    _, layer, context = layer_of("collective", "contiguous", "cpu")
    layer.forward(hidden_rows(3), make_step(3))
    layer.forward(hidden_rows(3), make_step(3, phase=Phase.PREFILL))
    layer.forward(hidden_rows(2), make_step(2, phase=Phase.PREFILL))
    receipt = layer.observed()
    assert receipt["a2a_backend"] == "collective"
    assert receipt["dispatcher"] == "interlock.moe.a2a.collective.dispatcher:Collective"
    assert receipt["runner"] == "interlock.moe.experts.cpu.runner:CpuRunner"
    assert receipt["layouts"] == {"decode": "contiguous", "prefill": "contiguous"}
    assert receipt["capacity"] == {"prefill": 256, "decode": 16}
    assert receipt["dispatches"] == receipt["combines"] == {"prefill": 2, "decode": 1}
    assert receipt["dtype"] == "float32"
    assert context.observed()["moe_layers"] == [receipt]
    assert context.observed()["moe_a2a_backend"] == "collective"
    context.close()


def test_a_layer_that_was_never_called_shows_no_calls() -> None:
    _, layer, context = layer_of()
    receipt = layer.observed()
    assert receipt["layouts"] == {}
    assert receipt["dispatches"] == {"prefill": 0, "decode": 0}
    context.close()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"moe_a2a_backend": "telepathy"}, "unknown a2a backend 'telepathy'; available: .*collective"),
        ({"moe_runner_backend": "abacus"}, "unknown expert runner 'abacus'"),
        ({"moe_layout_decode": "masked"}, "none cannot produce masked rows in decode"),
    ],
)
def test_combinations_that_do_not_exist_are_refused(overrides: dict[str, str], message: str) -> None:
    """A03: whatever reaches the build without a declaration ends before a weight is read."""
    with pytest.raises((InterlockError, StartupError), match=message):
        build_layer(Weights(make_card(8, 2), 48), **overrides)


def test_loading_is_checked() -> None:
    """J05: missing, doubled, foreign and mis-shaped experts are refused by name."""
    weights, layer, context = layer_of()
    fresh = type(layer)(weights.card, 48, 1, context)
    t = weights.tensors
    with pytest.raises(CheckpointError, match="router was not loaded"):
        fresh.finish_loading()
    fresh.load_router(t["router"], t["bias"])
    with pytest.raises(CheckpointError, match="expert 8 is not held here"):
        fresh.load_expert(8, t["gate"][0], t["up"][0], t["down"][0])
    with pytest.raises(CheckpointError, match="expert 2: up projection"):
        fresh.load_expert(2, t["gate"][0], t["up"][0][:5], t["down"][0])
    fresh.load_expert(2, t["gate"][2], t["up"][2], t["down"][2])
    with pytest.raises(CheckpointError, match="loaded twice"):
        fresh.load_expert(2, t["gate"][2], t["up"][2], t["down"][2])
    with pytest.raises(CheckpointError, match="were not loaded"):
        fresh.finish_loading()
    context.close()
