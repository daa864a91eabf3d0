"""The command line: exit codes, messages, no torch in the planner, and what it shows."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import pytest

from interlock.cli import run
from interlock.cli_secrets import wipe
from interlock.option_kinds import Secret
from interlock.options import OPTIONS, Options
from interlock.plan.launch_plan import LaunchPlan, Source
from interlock.plan.resolve import resolve
from tests.plan.machines import machine, tiny_card
from tests.plan.test_receipts import honest

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "attention_bias": False,
}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder with config.json only: whatever works here has read no weights (A04, A12)."""
    monkeypatch.delenv("INTERLOCK_CONFIG", raising=False)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> LaunchPlan:
    assert run(["plan", *arguments, "--json"]) == 0
    return msgspec.json.decode(capsys.readouterr().out, type=LaunchPlan)


def test_plan_as_json_is_the_plan(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, model, "--device", "cpu", "--tp-size", "2", "--moe-a2a-backend", "collective")
    assert (plan.model_path, plan.tp_size, plan.ep_size) == (model, 2, 2)
    assert plan.provenance["tp_size"].source is Source.USER
    assert plan.provenance["tp_size"].reason == "flag --tp-size"
    assert plan.provenance["model"].reason == "argument MODEL"


def test_plan_for_people(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", model]) == 0
    text = capsys.readouterr().out
    for word in ("max_model_len", "Memory of a rank", "What fits at once", "T decode"):
        assert word in text


def test_model_and_options_from_file_and_environment(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "launch.yaml"
    file.write_text(f"model: {model}\ntp_size: 4\nport: 7\n")
    monkeypatch.setenv("INTERLOCK_SEED", "11")
    monkeypatch.setenv("INTERLOCK_TP_SIZE", "8")
    plan = planned(capsys, "--config", str(file), "--port", "9", "--no-prefix-cache", "--device", "cpu")
    assert (plan.tp_size, plan.seed, plan.port, plan.prefix_cache) == (4, 11, 9, False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--tensor-parallel-size", "2"],
            "--tensor-parallel-size: is not an option; did you mean --tp-size?",
        ),
        (["--tp=2"], "did you mean --tp-size?"),
        (["--tp-size", "two"], "--tp-size 'two': is not a whole number"),
        (["--tp-size"], "--tp-size"),
        (["--tp-size", "3", "--ep-size", "2"], "what would work: "),
        (["--moe-a2a-backend", "collectve"], "--moe-a2a-backend collective"),
        (["--config", "/nowhere.yaml"], "cannot be read"),
        (["--api-key", "a", "--api-key-file", "b"], "both set"),
    ],
)
def test_refusals_exit_with_2_and_no_traceback(
    model: str, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    for verb in ("plan", "serve"):
        assert run([verb, model, *arguments]) == 2
        text = capsys.readouterr().err
        assert words in text
        assert "Traceback" not in text


def test_unknown_environment_variables_are_refused(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INTERLOCK_TENSOR_PARALLEL_SIZE", "2")
    assert run(["plan", model]) == 2
    assert "did you mean INTERLOCK_TP_SIZE?" in capsys.readouterr().err


def test_a_folder_that_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(tmp_path / "none")]) == 1
    assert "is not a folder" in capsys.readouterr().err
    assert run(["plan"]) == 2
    assert "MODEL: is missing" in capsys.readouterr().err
    assert run(["plann"]) == 2


def test_help_lists_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(option.flag in text for option in OPTIONS.values() if option.name != "model")
    assert run(["generate", "--help"]) == 0
    assert "--port" not in capsys.readouterr().out


def test_planning_imports_no_torch_and_starts_nothing(model: str) -> None:
    code = (
        "import sys; from interlock.cli import run; "
        "model = sys.argv[1]; "
        "codes = [run(['plan', model]), run(['backends']), run(['plan', model, '--ep-size', '9'])]; "
        "heavy = {'torch', 'uvicorn', 'fastapi', 'transformers'} & set(sys.modules); "
        "print(codes, sorted(heavy), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, model], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[0, 0, 2] []"


def test_backends_shows_each_combination(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["backends", "--json", "--device", "cpu"]) == 0
    content = json.loads(capsys.readouterr().out)
    rows = {(c["a2a"], c["runner"], c["phase"], c["weight_format"]) for c in content["combinations"]}
    assert ("collective", "torch", "decode", "fp8_block") in rows
    assert all(c["problem"] or c["layout"] for c in content["combinations"])
    problems = {each["backend"]: each["problem"] for each in content["attention"]}
    assert problems == {"paged_attention": None, "flash_attention": "runs on cuda, not on cpu"}
    assert run(["backends", "--device", "cuda"]) == 0
    assert "runs on cpu, not on cuda" in " ".join(capsys.readouterr().out.split())
    assert run(["backends", "--device", "tpu"]) == 2


def test_a_plan_for_another_machine(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = tmp_path / "facts.json"
    facts.write_bytes(msgspec.json.encode(machine(cores=48)))
    assert planned(capsys, model, "--facts", str(facts)).threads == 48
    assert run(["plan", "--save-facts", str(tmp_path / "mine.json")]) == 0
    assert run(["plan", model, "--facts", str(tmp_path / "mine.json")]) == 0


@pytest.fixture
def server() -> Iterator[tuple[str, dict[str, object]]]:
    """A server that answers ``GET /plan`` with ``content`` and asks for the key "sesame"."""
    content: dict[str, object] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Authorization") != "Bearer sesame":
                self.send_error(401)
                return
            body = msgspec.json.encode(content)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}", content
    http.shutdown()
    thread.join()
    http.server_close()


def test_receipts_of_a_server_show_both_sides(
    server: tuple[str, dict[str, object]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, content = server
    plan = resolve(Options.of(model="m", tp_size=2), tiny_card(), machine())
    receipts = honest(plan)
    content |= {"digest": "x", "plan": plan, "receipts": {str(rank): r for rank, r in receipts.items()}}
    assert run(["plan", "--receipts", url]) == 1
    assert "401" in capsys.readouterr().err
    assert run(["plan", "--receipts", url, "--api-key", "sesame"]) == 0
    assert "every receipt agrees" in capsys.readouterr().out
    receipts[1]["moe_layers"] = []
    assert run(["plan", "--receipts", url, "--api-key", "sesame"]) == 1
    assert "--moe-a2a-backend: the plan says moe_a2a_backend = none" in capsys.readouterr().out
    assert run(["plan", "--receipts", url, "--api-key", "sesame", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["mismatches"]


def test_receipts_compare_with_a_local_plan(
    server: tuple[str, dict[str, object]], model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url, content = server
    served = planned(capsys, model, "--device", "cpu")
    receipts = {str(rank): items for rank, items in honest(served).items()}
    content |= {"digest": "x", "plan": served, "receipts": receipts}
    key = ["--receipts", url, "--api-key", "sesame", "--device", "cpu"]
    assert run(["plan", model, *key, "--page-size", "32"]) == 1
    assert (
        "--page-size: the plan says page_size = 32, but the server's plan has 16" in capsys.readouterr().out
    )


@pytest.mark.parametrize("url", ["127.0.0.1:1", "http://127.0.0.1:1", "file:///etc/passwd"])
def test_receipts_of_nobody(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--receipts", url]) == 1
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="the process list is read from /proc")
def test_the_api_key_leaves_the_process_list() -> None:
    code = (
        "import sys; from interlock.cli_secrets import wipe; from interlock.option_kinds import Secret; "
        "done = wipe(Secret('hunter22')); shown = open('/proc/self/cmdline').read(); "
        "print(done, 'hunter22' in shown.partition('--api-key')[2], sys.argv[1:], '--port' in shown)"
    )
    command = [sys.executable, "-c", code, "serve", "--api-key", "hunter22", "--port", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("True False")
    assert "hunter22" not in done.stdout
    assert "'--api-key', '***'" in done.stdout
    assert done.stdout.strip().endswith("True")


def test_wiping_a_key_that_is_not_shown_is_done() -> None:
    assert wipe(Secret("never-on-any-command-line-8f1d"))
