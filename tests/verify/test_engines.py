"""Real rank processes: the command line, several ranks, traces of several ranks, plugins that lie."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from interlock.cli import run
from interlock.engine.messages import Inspection
from interlock.evidence.check import problems
from interlock.evidence.ledger import read_evidence
from interlock.verify.arm import Ask
from interlock.verify.engine_arm import EngineArm
from interlock.verify.trace import read_trace, write_routes
from tests.conformance.installed import fake_install
from tests.e2e.processes import environment, running
from tests.tiny import flash, tiny_folder
from tests.verify.in_process import InProcessArm, make_plan

FLAGS = "--dtype float32 --threads 1 --max-model-len 160 --kv-memory 32MiB --max-running-requests 4"
TEXT = tuple((13 * i) % 480 + 8 for i in range(23))


@pytest.fixture
def two_prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(list(TEXT)) + "\n" + json.dumps(list(TEXT[5:40] * 2)))
    return path


def test_the_command_proves_two_ranks_to_the_last_bit(tiny: Path, two_prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    control = f"{FLAGS} --deterministic"
    candidate = f"{control} --tp-size 2 --moe-a2a-backend collective --chunked-prefill-size 16"
    arguments = ["verify", str(tiny), "--control", control, "--candidate", candidate, "--no-record"]
    assert run([*arguments, "--prompts", str(two_prompts), "--out", str(out), "--tokens", "4"]) == 0
    evidence = read_evidence(out / "evidence.json")
    assert problems(evidence) == []
    assert evidence.verdict == "equal"
    assert [prompt.outcome for prompt in evidence.prompts] == ["bit-identical"] * 2
    assert len(evidence.arms[1].receipts) == 2
    assert str(tiny) not in (out / "evidence.json").read_text()
    page = (out / "report.html").read_text()
    assert "<svg" in page
    assert not re.search(r"(src|href)\s*=|https?://|@import|url\(", page)
    assert "prefers-color-scheme: dark" in page


@pytest.fixture(scope="module")
def two_ranks(tiny: Path) -> Iterator[EngineArm]:
    with closing(EngineArm(make_plan(tiny, tp_size=2, moe_a2a_backend="shared_memory"))) as arm:
        yield arm


def test_traces_of_two_ranks_join_to_the_trace_of_one(
    tiny: Path, two_ranks: EngineArm, tmp_path: Path
) -> None:
    """Each rank routes its share of the tokens; together they routed all."""
    traces = {}
    for name, arm in (("one", InProcessArm(make_plan(tiny))), ("two", two_ranks)):
        folder = tmp_path / name
        folder.mkdir()
        scored = arm.score(Ask(TEXT, forced=(9, 10, 11), inspection=Inspection(trace=str(folder))))
        assert scored.token_ids == (*TEXT, 9, 10, 11)
        traces[name] = read_trace(folder)
    one, two = traces["one"], traces["two"]
    assert len(list((tmp_path / "two").glob("rank1-*"))) == 3
    assert one.positions.tolist() == two.positions.tolist() == list(range(25))
    assert one.outputs.keys() == two.outputs.keys()
    for layer, routes in one.routes.items():
        assert torch.equal(routes.ids, two.routes[layer].ids)
    for key, output in one.outputs.items():
        assert torch.allclose(output, two.outputs[key], atol=1e-4), key


def test_forced_routes_reach_every_rank(two_ranks: EngineArm, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    two_ranks.score(Ask(TEXT, forced=(9,), inspection=Inspection(trace=str(folders[0]))))
    trace = read_trace(folders[0])
    for routes in trace.routes.values():
        routes.ids[:] = torch.tensor([0, 1, 2, 3])
        routes.weights[:] = torch.tensor([0.5, 0.25, 0.125, 0.125])
    path = tmp_path / "routes.safetensors"
    write_routes(trace, path)
    asked = Inspection(trace=str(folders[1]), routes=str(path))
    two_ranks.score(Ask(TEXT, forced=(9,), inspection=asked))
    for routes in read_trace(folders[1]).routes.values():
        assert (routes.ids == torch.tensor([0, 1, 2, 3])).all()
        assert (routes.weights == torch.tensor([0.5, 0.25, 0.125, 0.125])).all()


def test_chunk_limits_cut_the_prompt_and_are_told(two_ranks: EngineArm) -> None:
    scored = two_ranks.score(Ask(TEXT, continuation=2, inspection=Inspection(chunk_limit=7)))
    assert scored.chunk_ends == (7, 14, 21, 23)


def test_nobody_else_pays_for_an_inspection(two_ranks: EngineArm) -> None:
    """A request that is not inspected writes nothing and tells no chunks."""
    assert two_ranks.score(Ask(TEXT, continuation=2)).chunk_ends == (23,)


def test_a_rank_with_a_smaller_capacity_is_refused_at_the_start(tmp_path: Path, two_prompts: Path) -> None:
    """The twelfth fault with real processes: the candidate never runs, which is exit code 2."""
    mutants = Path(__file__).parents[1] / "e2e" / "mutants" / "interlock_mutants"
    site = tmp_path / "site"
    shutil.copytree(mutants, site / "interlock_mutants")
    entries = {"smallercapacity": "interlock_mutants:SmallerCapacity"}
    fake_install(site, "interlock_mutants", "interlock.models", entries)
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder(flash()), folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["SmallerCapacityForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    ranks = f"{FLAGS} --tp-size 2 --moe-a2a-backend collective --moe-decode-capacity 32"
    arguments = ["verify", str(folder), "--control", FLAGS, "--candidate", ranks, "--no-record"]
    arguments += ["--prompts", str(two_prompts), "--tokens", "2"]
    env = environment()
    env["PYTHONPATH"] = f"{site}:{env['PYTHONPATH']}"
    with running(["-m", "interlock", *arguments], env=env) as process:
        assert process.wait(120) == 2, process.text
        assert "could not run: candidate: did not start" in process.text
        assert "moe_decode_capacity = 32, but rank 1, layer 1 observed 31" in process.text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--candidate", ""], "give either --control OPTIONS or --control-url URL"),
        (["--control", "", "--candidate", "--tp-sze 2"], "did you mean --tp-size"),
        (["--control", "--tp-size", "--candidate", ""], "needs a value"),
        (["--control-url", "http://127.0.0.1:9", "--candidate", ""], "does not answer"),
        (["--control-url", "ftp://x", "--candidate", ""], "must begin with http"),
        (["--control", "", "--prompts", "/nowhere/prompts"], "--prompts"),
    ],
)
def test_what_cannot_run_is_exit_code_two_with_the_reason(
    tiny: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert run(["verify", str(tiny), "--no-record", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_attention_replicas_take_turns(tiny: Path, tmp_path: Path) -> None:
    """With two replicas, the traces come from the ranks of both."""
    plan = make_plan(tiny, tp_size=2, attn_dp_size=2, moe_a2a_backend="collective")
    with closing(EngineArm(plan)) as arm:
        for turn in range(3):
            arm.score(Ask(TEXT, forced=(9,), turn=turn, inspection=Inspection(trace=str(tmp_path))))
            ranks = {path.name[:5] for path in tmp_path.glob("rank*")}
            assert ranks == ({"rank0"} if turn == 0 else {"rank0", "rank1"})
