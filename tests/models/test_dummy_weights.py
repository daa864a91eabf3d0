"""Dummy weights: no tensor is read, and tokens spread over the experts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from interlock.checkpoint.dummy import DummyWeights
from interlock.checkpoint.specs import TensorSpec
from interlock.demo.tiny import TinySpec
from interlock.demo.tiny_config import tiny_config
from interlock.models.card_reader import find_family
from interlock.plan.card import ModelCard
from tests.harness import build_model, run_chunks
from tests.models.prompts import PROMPT
from tests.models.routes import recorded_routes
from tests.tiny import flash, v25


def config_only(folder: Path, spec: TinySpec) -> Path:
    """A folder without any weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_config(spec)))
    return folder


def card(spec: TinySpec) -> ModelCard:
    config = tiny_config(spec)
    return find_family(config).read_card(config)


@pytest.mark.parametrize(
    "spec",
    [
        flash(experts=32, top_k=4),
        v25(hidden_size=2048, experts=64, top_k=8, moe_intermediate_size=64, layers=4),
        flash(layers=24, hidden_size=128, experts=16, num_heads=4, num_kv_heads=1, swa_num_kv_heads=2),
        TinySpec.qwen3_moe(experts=32, top_k=4),
    ],
    ids=["tiny", "wide", "deep", "qwen"],
)
def test_routing_is_spread_in_every_layer(spec: TinySpec, tmp_path: Path) -> None:
    """No expert takes more than a few times its share, and hardly any is never chosen."""
    harness = build_model(
        config_only(tmp_path / "m", spec), load_format="dummy", full_pages=20, window_pages=20
    )
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(0, spec.vocab_size, (192,), generator=generator).tolist()
    with recorded_routes(harness) as routes:
        rows = run_chunks(harness, token_ids, 64)
    assert bool(rows.isfinite().all())
    layers = harness.plan.card.num_moe_layers
    assert len(routes) == 3 * layers
    share = spec.top_k * len(token_ids) / spec.experts
    for layer in range(layers):
        ids = torch.cat(routes[layer::layers])
        load = torch.bincount(ids.flatten(), minlength=spec.experts)
        assert int(load.max()) <= 3.5 * share, f"layer {layer}: {load.tolist()}"
        assert int((load == 0).sum()) <= spec.experts // 10, f"layer {layer}: {load.tolist()}"
        assert len({tuple(row) for row in ids.tolist()}) > len(token_ids) // 4


def test_dummy_weights_depend_on_the_seed_only(tmp_path: Path) -> None:
    folder = config_only(tmp_path / "m", flash(layers=2))
    one, again, other = (
        run_chunks(build_model(folder, load_format="dummy", seed=seed), PROMPT) for seed in (0, 0, 1)
    )
    assert torch.equal(one, again)
    assert not torch.allclose(one, other, atol=0.1)


def test_a_shard_of_dummy_weights_is_a_part_of_the_whole() -> None:
    source = DummyWeights(card(flash()))
    specs = [TensorSpec("a.weight", (70, 1000)), TensorSpec("b.weight", (9, 8), role="router")]
    source.validate(specs, ())
    for spec in specs:
        whole = source.read(spec.name)
        part = source.read(spec.name, rows=[range(3, 7), range(1)], columns=None)
        assert torch.equal(part, torch.cat([whole[3:7], whole[:1]]))
    columns = source.read("a.weight", rows=[range(60, 70)], columns=range(10, 20))
    assert torch.equal(columns, source.read("a.weight")[60:70, 10:20])


def test_rows_of_large_tensors_differ() -> None:
    """The pool of random numbers starts at another place in every row."""
    source = DummyWeights(card(flash()))
    source.validate([TensorSpec("a.weight", (4000, 512))], ())
    rows = source.read("a.weight")
    assert len({tuple(row) for row in rows[:, :4].tolist()}) == 4000
    assert float(rows.std()) == pytest.approx(512**-0.5, rel=0.02)
