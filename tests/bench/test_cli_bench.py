"""One small real run of each verb: real rank processes, real HTTP, real files."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from interlock.bench import limits
from interlock.bench.arms import parse_arms
from interlock.bench.plots import plot
from interlock.cli import run
from interlock.demo.tiny_tokenizer import tiny_tokenizer, tiny_tokenizer_config
from interlock.errors import Refusal
from interlock.evidence.check import problems
from interlock.evidence.ledger import read_evidence
from interlock.evidence.schema import Evidence
from interlock.server.app import create_app
from interlock.server.settings import ServerSettings
from interlock.tokenizer import load_tokenizer
from tests.server.fake_engine import VOCAB, FakeEngine
from tests.server.live import live_server
from tests.tiny import flash, tiny_folder

SMALL = "--threads 1 --kv-memory 64MiB --kernels torch"


@pytest.fixture
def model() -> str:
    return str(tiny_folder(flash(layers=2)))


def recorded(folder: Path) -> Evidence:
    """The one evidence file in ``folder``; nothing speaks against it."""
    (path,) = folder.glob("*.json")
    evidence = read_evidence(path)
    assert [text for text in problems(evidence) if not text.startswith("server: its own receipts")] == []
    assert evidence.kind == "bench"
    assert str(folder) not in path.read_text()
    return evidence


def test_decode_over_real_ranks(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps are those that the ranks report; plan, receipts, routing and discarded steps are recorded."""
    arms = ("--arm", f"one={SMALL}", "--arm", f"ep2={SMALL} --tp-size 2 --moe-a2a-backend collective")
    sizes = ("--batch", "1,3", "--context", "16", "--steps", "3", "--rounds", "1", "--seed", "4")
    assert run(["bench", "decode", model, *arms, *sizes, "--out", str(tmp_path), "--no-plot"]) == 0
    evidence = recorded(tmp_path)
    assert [arm.name for arm in evidence.arms] == ["one", "ep2"]
    plan = evidence.arms[1].plan
    assert plan is not None
    assert (plan["ep_size"], plan["prefix_cache"], plan["max_running_requests"]) == (2, False, 3)
    assert evidence.arms[1].receipts["1"]["moe_a2a_backend"] == "collective"
    points = {(m.arm, m.conditions["batch"]): m for m in evidence.measurements if m.unit == "ms"}
    assert points.keys() == {("one", 1), ("one", 3), ("ep2", 1), ("ep2", 3)}
    for (_, batch), point in points.items():
        assert point.value > 0
        assert point.conditions["steps_counted"] == 3
        assert point.discarded >= 2
        client = point.conditions["client_step_ms"]
        assert isinstance(client, float)
        assert client > 0
        assert point.conditions["cached_tokens"] == 0
        first = point.conditions["context_first"]
        assert isinstance(first, float)
        assert 16 < first < 16 + 8
        distinct = point.conditions["routing_distinct_experts"]
        assert isinstance(distinct, float)
        assert 0 < distinct <= 2 * batch + 1e-9
    assert any("ep2 generated 100.0%" in note for note in evidence.notes)
    assert "Decode: ms per token" in capsys.readouterr().out


def test_decode_counts_replicas_together(model: str, tmp_path: Path) -> None:
    """A07: two attention replicas decode one global batch; steps are joined over both."""
    options = f"{SMALL} --tp-size 2 --attn-dp-size 2 --moe-a2a-backend collective"
    sizes = ("--batch", "4", "--context", "8", "--steps", "3", "--rounds", "1")
    out = ("--out", str(tmp_path), "--no-plot")
    assert run(["bench", "decode", model, "--arm", f"dp2={options}", *sizes, *out]) == 0
    evidence = recorded(tmp_path)
    assert evidence.arms[0].plan is not None
    assert evidence.arms[0].plan["max_running_requests"] == 2
    (point,) = [m for m in evidence.measurements if m.unit == "ms"]
    assert point.conditions["batch"] == 4


def test_prefill_reports_the_chunk_that_capacity_cut(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """K08: a small T halves the chunk; the tool reads it from the steps and says why."""
    arms = ("--arm", f"full={SMALL}", "--arm", f"cut={SMALL} --moe-prefill-capacity 32")
    sizes = ("--chunk", "64", "--prompt-tokens", "64", "--prompts", "3", "--rounds", "1")
    assert run(["bench", "prefill", model, *arms, *sizes, "--out", str(tmp_path), "--no-plot"]) == 0
    points = {m.arm: m.conditions for m in recorded(tmp_path).measurements}
    assert {arm: each["chunk_delivered"] for arm, each in points.items()} == {"full@64": 64, "cut@64": 32}
    assert points["full@64"]["submitted_tokens"] == 192
    assert "--moe-prefill-capacity 32" in str(points["cut@64"]["cut"])
    assert "not compared: chunk 32 against 64" in capsys.readouterr().out


def test_serve_over_real_http(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Against this project's own server, over an engine that plays: every request completes with the length
    that was asked for, and the server's plan is recorded."""
    engine = FakeEngine()
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tiny_tokenizer(VOCAB).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tiny_tokenizer_config(4096)))
    app = create_app(engine, load_tokenizer(folder), ServerSettings(model_names=("tiny",)))
    with live_server(app) as url:
        load = ("--rate", "200", "--requests", "8", "--input-tokens", "8", "--output-tokens", "4")
        assert run(["bench", "serve", "--base-url", url, *load, "--out", str(tmp_path), "--no-plot"]) == 0
    evidence = recorded(tmp_path)
    ttft = next(m for m in evidence.measurements if m.name == "serve_ttft_completed_only")
    assert (ttft.conditions["completed"], ttft.conditions["mean_output_tokens"]) == (8, 4.0)
    assert evidence.arms[0].plan is not None
    assert evidence.arms[0].plan["max_model_len"] == engine.plan.max_model_len
    assert "8 completed, 0 failed, 0 incomplete" in capsys.readouterr().out
    assert run(["bench", "serve", "--base-url", "http://127.0.0.1:9", "--rate", "1", "--no-plot"]) == 1


@pytest.fixture
def quick_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of the device measured on little memory and a small product."""
    monkeypatch.setattr(limits, "CPU_STREAM_BYTES", 16 << 20)
    monkeypatch.setattr(limits, "GEMM_ROWS", {"cpu": 8})
    monkeypatch.setattr(limits, "GEMM_WIDTH", {"cpu": 128})


@pytest.mark.usefixtures("quick_limits")
def test_moe_and_a2a(tmp_path: Path) -> None:
    sizes = ("--hidden", "32", "--experts", "4", "--top-k", "2", "--rounds", "2", "--tokens", "1,4")
    layer = ("--expert-width", "16", "--working-set", "0", "--kernels", "torch", "--runner", "torch")
    out = ("--out", str(tmp_path / "moe"), "--no-plot")
    assert run(["bench", "moe", *sizes, *layer, *out]) == 0
    evidence = recorded(tmp_path / "moe")
    assert {m.conditions["layout"] for m in evidence.measurements} == {"contiguous", "masked", "replicated"}
    for point in evidence.measurements:
        share, roofline = point.conditions["share_of_roofline"], point.conditions["roofline_us"]
        assert isinstance(share, float)
        assert isinstance(roofline, float)
        assert share == pytest.approx(roofline / point.value)
    out = ("--out", str(tmp_path / "a2a"), "--no-plot")
    assert run(["bench", "a2a", *sizes, "--a2a", "collective", *out]) == 0
    parts = {m.conditions["part"] for m in recorded(tmp_path / "a2a").measurements}
    assert parts == {"both", "dispatch", "combine"}


@pytest.mark.usefixtures("quick_limits")
def test_plots_are_drawn_from_the_evidence(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra interlock[bench] is not installed")
    sizes = ("--hidden", "16", "--experts", "4", "--top-k", "2", "--rounds", "1", "--tokens", "1,2")
    layer = ("--expert-width", "16", "--working-set", "0", "--kernels", "torch", "--runner", "torch")
    assert run(["bench", "moe", *sizes, *layer, "--out", str(tmp_path), "--name", "layer"]) == 0
    assert (tmp_path / "layer.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "layer.svg").read_text()
    assert svg.startswith("<?xml")
    assert plot(recorded(tmp_path), tmp_path / "again") == [tmp_path / "again.png", tmp_path / "again.svg"]


def test_a_missing_extra_is_named_before_anything_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    assert run(["bench", "decode", "no-such-model"]) == 2
    assert "pip install 'interlock[bench]'; --no-plot" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arm", "tp2"], "an arm is a name, an equals sign and options"),
        (["--arm", "a=--tp-size 2", "--arm", "a="], "two arms cannot have the same name"),
        (["--arm", "a=--tensor-parallel-size 2"], "did you mean --tp-size?"),
        (["--arm", "a=--ep-size 3"], "arm a: --ep-size"),
        (["--batch", "1,x"], "needs whole numbers from 1"),
        (["--batch", "1", "--context", "100000"], "arm default: --max-model-len"),
    ],
)
def test_what_cannot_be_run_is_refused_before_it_starts(
    model: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "decode", model, *arguments, "--no-plot"]) == 2
    assert message in capsys.readouterr().err


def test_arms_are_complete_in_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment does not leak into an arm."""
    monkeypatch.setenv("INTERLOCK_TP_SIZE", "4")
    (arm,) = parse_arms(["a=--ep-size 1"])
    assert (arm.options.integer("tp_size"), arm.options.integer("ep_size")) == (1, 1)
    with pytest.raises(Refusal):
        parse_arms(["a=--port 1 --what"])


def test_a_rehearsal_is_asked_for_in_all_arms_at_once() -> None:
    own, other = parse_arms(["own=--tp-size 4 --ranks-per-gpu 2", "other=--tp-size 4"], ranks_per_gpu=4)
    assert (own.text, other.text) == ("--tp-size 4 --ranks-per-gpu 2", "--tp-size 4 --ranks-per-gpu 4")
    assert (own.options.integer("ranks_per_gpu"), other.options.integer("ranks_per_gpu")) == (2, 4)
    assert parse_arms([], ranks_per_gpu=4)[0].text == "--ranks-per-gpu 4"
    assert parse_arms([])[0].text == ""


def test_a_rehearsal_on_a_cpu_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    arm = ("--arm", f"ep2={SMALL} --tp-size 2 --device cpu")
    assert run(["bench", "decode", "tiny-random", *arm, "--ranks-per-gpu", "2", "--no-plot"]) == 2
    assert "on a CPU the ranks share the machine without this option" in capsys.readouterr().err
