"""No option is inert: each one is given a value that is not its default, and is seen to have it.

``PROOFS`` has an entry for every option; a test fails when one is missing. Most are seen in the receipts of
four servers, which are started once; some by what a client sees; those that this machine cannot run by
their refusal.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import httpx
import pytest

from interlock.cli import run
from interlock.engine.endpoints import free_ports
from interlock.launch import plan_launch
from interlock.options import OPTIONS, Options
from tests.e2e.processes import READY, Process, Served, running, serving
from tests.tiny import tiny_folder, v25

KEY = "correct-horse"


@dataclass
class Launches:
    """Servers by name, started when they are first asked for."""

    stack: ExitStack
    scratch: Path
    _started: dict[str, Served] = field(default_factory=dict)

    def get(self, name: str) -> Served:
        if name not in self._started:
            makers = {"one": self._one, "two": self._two, "nodes": self._nodes, "prefill": self._prefill}
            self._started[name] = makers[name]()
        return self._started[name]

    def port(self, name: str) -> int:
        """A free port, the same one for the same name."""
        path = self.scratch / name
        if not path.exists():
            path.write_text(str(free_ports("127.0.0.1", 1)[0]))
        return int(path.read_text())

    def model(self) -> Path:
        return tiny_folder(v25())

    def _run(self, *flags: object) -> Process:
        arguments = ["-m", "interlock", "serve", *map(str, flags)]
        return self.stack.enter_context(running(arguments))

    def _one(self) -> Served:
        process = self._run(
            *("tiny-random", "--load-format", "dummy", "--sliding-window-extra", 1, "--dtype", "float32"),
            *("--kv-cache-dtype", "bfloat16", "--seed", 7, "--device", "cpu", "--kernels", "torch"),
            *("--moe-runner-backend", "torch", "--threads", 2, "--stall-timeout", 33, "--page-size", 8),
            *("--num-hidden-layers", 3, "--overlap-schedule", "on"),
            *("--max-model-len", 192, "--max-running-requests", 5, "--chunked-prefill-size", 48),
            *("--no-prefix-cache", "--served-model-name", "tea", "--host", "127.0.0.2"),
            *("--port", self.port("http"), "--api-key", KEY, "--log-level", "debug", "--evidence", "off"),
            *("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3", "--max-waiting-requests", 1),
            *("--cors-origins", "https://chat.example.org", "--max-request-bytes", "64KiB"),
        )
        return Served(process, process.wait_for(READY)[1])

    def _two(self) -> Served:
        secret = self.scratch / "key"
        secret.write_text(KEY + "\n")
        process = self._run(
            *(self.model(), "--tp-size", 2, "--attn-dp-size", 2, "--deterministic", "--threads", 1),
            *(
                "--moe-a2a-backend",
                "collective",
                "--moe-overlap",
                "on",
                "--moe-prefill-capacity",
                300,
                "--moe-decode-capacity",
                20,
            ),
            *("--chunked-prefill-size", 128, "--max-running-requests", 16, "--qkv-layout", "chunked"),
            *("--kv-memory", "32MiB", "--max-model-len", 128, "--api-key-file", secret, "--port", 0),
            *("--log-format", "json"),
        )
        return Served(process, process.wait_for(READY)[1])

    def _prefill(self) -> Served:
        process = self._run(
            *("tiny-random", "--disaggregation-mode", "prefill", "--kv-memory", "32MiB", "--threads", 1),
            *("--disaggregation-transfer-backend", "shared_memory", "--disaggregation-timeout", 7),
            *("--disaggregation-bootstrap-port", self.port("bootstrap")),
            *("--disaggregation-queue-timeout", 77, "--api-key", KEY, "--port", 0),
        )
        return Served(process, process.wait_for(READY)[1])

    def _nodes(self) -> Served:
        flags = ("tiny-random", "--tp-size", 2, "--ep-size", 2, "--nnodes", 2, "--threads", 1)
        flags += ("--dist-init", f"127.0.0.1:{self.port('store')}", "--kv-memory", "32MiB", "--port", 0)
        first, _ = (self._run(*flags, "--node-rank", rank) for rank in (0, 1))
        return Served(first, first.wait_for(READY)[1])


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launches]:
    with ExitStack() as stack:
        yield Launches(stack, tmp_path_factory.mktemp("launches"))


def receipts(served: Served) -> dict[int, dict[str, Any]]:
    answer = served.get("/plan", headers={"Authorization": f"Bearer {KEY}"}).raise_for_status().json()
    return {int(rank): items for rank, items in sorted(answer["receipts"].items())}


Proof = Callable[[Launches], None]


def receipt(launch: str, item: str, expected: object) -> Proof:
    """Every rank that shows ``item`` observed ``expected``, and at least one does."""

    def prove(launches: Launches) -> None:
        seen = [items[item] for items in receipts(launches.get(launch)).values() if item in items]
        assert seen
        assert set(seen) == {expected}

    return prove


def in_layers(launch: str, *path: str, expected: object) -> Proof:
    """Every MoE layer of every rank observed ``expected``."""

    def prove(launches: Launches) -> None:
        for items in receipts(launches.get(launch)).values():
            assert items["moe_layers"]
            for layer in items["moe_layers"]:
                value: Any = layer
                for key in path:
                    value = value[key]
                assert value == expected

    return prove


def prove_model(launches: Launches) -> None:
    receipt("two", "model_path", str(launches.model()))(launches)


def prove_kv_memory(launches: Launches) -> None:
    def pages(memory: str) -> tuple[int, int]:
        options = {"max_model_len": 128, "threads": 1, "tp_size": 2, "attn_dp_size": 2, "kv_memory": memory}
        plan = plan_launch(str(launches.model()), Options.of(**options, max_running_requests=16))
        return plan.full_pages, plan.window_pages

    small, large = pages("32MiB"), pages("64MiB")
    assert small < large
    for items in receipts(launches.get("two")).values():
        assert (items["full_pages"], items["window_pages"]) == small


def prove_node_rank(launches: Launches) -> None:
    assert [items["node_rank"] for items in receipts(launches.get("nodes")).values()] == [0, 1]


def prove_dist_init(launches: Launches) -> None:
    """The ranks met there: the first one listens at the address."""
    served = launches.get("nodes")
    (rank,) = served.process.ranks()
    listening = {
        connection.laddr.port for connection in rank.net_connections("tcp") if connection.status == "LISTEN"
    }
    assert launches.port("store") in listening


def prove_served_model_name(launches: Launches) -> None:
    served = launches.get("one")
    models = served.get("/v1/models", headers={"Authorization": f"Bearer {KEY}"}).json()
    assert [model["id"] for model in models["data"]] == ["tea"]


def prove_host_and_port(launches: Launches) -> None:
    assert launches.get("one").url == f"http://127.0.0.2:{launches.port('http')}"
    assert launches.get("one").get("/health").status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{launches.port('http')}/health")


def key_is_needed(launch: str) -> Proof:
    def prove(launches: Launches) -> None:
        served = launches.get(launch)
        assert served.get("/v1/models").status_code == 401
        assert served.get("/v1/models", headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert served.get("/v1/models", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200
        assert KEY not in served.process.text
        assert all(KEY not in argument for argument in served.process.command_line())

    return prove


def prove_evidence(launches: Launches) -> None:
    """Off says nothing; the default says of a checkpoint that nobody verified that it is unproven."""
    assert "unproven" not in launches.get("one").process.text
    assert "unproven" in launches.get("two").process.text


def prove_log_level(launches: Launches) -> None:
    assert " DEBUG " in launches.get("one").process.text
    assert " DEBUG " not in launches.get("two").process.text


def prove_log_format(launches: Launches) -> None:
    """json: every line that the server writes is an object; text: the ready line is none."""
    ready = [line for line in launches.get("two").process.lines if "ready: http" in line]
    assert [json.loads(line)["level"] for line in ready] == ["info"]
    assert all(isinstance(json.loads(line), dict) for line in launches.get("two").process.lines)
    assert not any(line.startswith("{") for line in launches.get("one").process.lines)


def prove_drain_timeout(launches: Launches) -> None:
    """J04: with 0 seconds a signal aborts a running answer, which says so; the end is orderly."""
    body = {"prompt": [5] * 8, "max_tokens": 240, "ignore_eos": True, "stream": True, "n": 16}
    with serving("--drain-timeout", "0") as served:
        url = served.url + "/v1/completions"
        with httpx.stream("POST", url, json={"model": "tiny-random", **body}, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            served.process.signal(signal.SIGTERM)
            text = "".join(lines)
        assert '"finish_reason":"abort"' in text.replace(" ", "")
        assert text.endswith("data: [DONE]")
        assert served.process.wait() == 0


def refused(*flags: str, words: str) -> Proof:
    """``plan`` refuses, as ``serve`` would, with exit code 2 and the option's name."""

    def prove(launches: Launches) -> None:
        import contextlib
        import io

        told = io.StringIO()
        with contextlib.redirect_stderr(told):
            assert run(["plan", *flags]) == 2
        assert words in told.getvalue()

    return prove


def post(served: Served, path: str, **body: Any) -> httpx.Response:
    return served.post(path, body, headers={"Authorization": f"Bearer {KEY}"})


MESSAGES = [{"role": "user", "content": "x"}]


def prove_tool_call_parser(launches: Launches) -> None:
    """Where the format is known, a forced call is looked at; where it is not, that is the error."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}
    fields = {"messages": MESSAGES, "tools": [tool], "tool_choice": "required"}
    known = post(launches.get("one"), "/v1/chat/completions", model="tea", **fields)
    assert known.json()["error"]["param"] == "tools.0.function.parameters"
    name = launches.get("two").get("/v1/models", headers={"Authorization": f"Bearer {KEY}"}).json()
    other = post(launches.get("two"), "/v1/chat/completions", model=name["data"][0]["id"], **fields)
    assert "--tool-call-parser" in other.json()["error"]["message"]


def prove_reasoning_parser(launches: Launches) -> None:
    answer = post(launches.get("one"), "/v1/chat/completions", model="tea", messages=MESSAGES, max_tokens=3)
    assert "reasoning_content" in answer.raise_for_status().json()["choices"][0]["message"]


def prove_cors_origins(launches: Launches) -> None:
    for origin, allowed in (("https://chat.example.org", True), ("https://other.example.org", False)):
        headers = launches.get("one").get("/version", headers={"Origin": origin}).headers
        assert (headers.get("access-control-allow-origin") == origin) is allowed
    headers = launches.get("two").get("/version", headers={"Origin": "https://chat.example.org"}).headers
    assert "access-control-allow-origin" not in headers


def prove_max_waiting_requests(launches: Launches) -> None:
    served = launches.get("one")
    body = {"model": "tea", "prompt": [5] * 8, "max_tokens": 150, "ignore_eos": True, "stream": True, "n": 30}
    options = {"headers": {"Authorization": f"Bearer {KEY}"}, "timeout": 60}
    with httpx.stream("POST", served.url + "/v1/completions", json=body, **options) as answer:
        assert answer.status_code == 200, answer.read()
        while not served.get("/load", headers=options["headers"]).json()["waiting"]:
            time.sleep(0.02)
        refused = post(served, "/v1/completions", model="tea", prompt="x")
        assert refused.status_code == 429
        assert "Retry-After" in refused.headers


def prove_request_timeout(launches: Launches) -> None:
    body = {"model": "tiny-random", "prompt": [5] * 8, "max_tokens": 240, "ignore_eos": True, "n": 16}
    with serving("--request-timeout", "0.5") as served:
        answer = served.post("/v1/completions", body)
        ended = {(c["finish_reason"], c["stop_reason"]) for c in answer.json().get("choices", [])}
        assert answer.status_code == 504 or ended == {("abort", "timeout")}


def prove_max_request_bytes(launches: Launches) -> None:
    answer = post(launches.get("one"), "/v1/completions", model="tea", prompt="x" * 70_000)
    assert answer.status_code == 413
    assert "65536" in answer.json()["error"]["message"]


def prove_attention_backend(launches: Launches) -> None:
    receipt("one", "attention_backend", "paged_attention")(launches)
    refused(
        *("tiny-random", "--device", "cpu", "--attention-backend", "flash_attention"),
        words="--attention-backend flash_attention: runs on cuda, not on cpu",
    )(launches)


def prove_bootstrap_port(launches: Launches) -> None:
    receipt("prefill", "disaggregation_bootstrap_port", launches.port("bootstrap"))(launches)


PROOFS: Final[Mapping[str, Proof]] = MappingProxyType(
    {
        "disaggregation_mode": receipt("prefill", "disaggregation_mode", "prefill"),
        "disaggregation_transfer_backend": receipt(
            "prefill", "disaggregation_transfer_backend", "shared_memory"
        ),
        "disaggregation_bootstrap_port": prove_bootstrap_port,
        "disaggregation_timeout": receipt("prefill", "disaggregation_timeout", 7),
        "disaggregation_queue_timeout": receipt("prefill", "disaggregation_queue_timeout", 77),
        "model": prove_model,
        "demo_source": refused(
            *("tiny-random", "--demo-source", "x.gguf"), words="--demo-source x.gguf: only the model demo"
        ),
        "load_format": receipt("one", "load_format", "dummy"),
        "num_hidden_layers": receipt("one", "num_hidden_layers", 3),
        "quantization": refused(
            *("tiny-random", "--kernels", "torch", "--quantization", "fp8"),
            words="--quantization fp8: the dense width 320 over 1 ranks is no multiple",
        ),
        "qkv_layout": receipt("two", "qkv_layout", "chunked"),
        "sliding_window_extra": receipt("one", "sliding_window_extra", 1),
        "dtype": receipt("one", "dtype", "float32"),
        "kv_cache_dtype": receipt("one", "kv_cache_dtype", "bfloat16"),
        "deterministic": receipt("two", "deterministic", True),
        "seed": receipt("one", "seed", 7),
        "device": receipt("one", "device", "cpu"),
        "kernels": receipt("one", "kernels", "torch"),
        "attention_backend": prove_attention_backend,
        "threads": receipt("one", "threads", 2),
        "tp_size": receipt("two", "tp_size", 2),
        "ep_size": receipt("nodes", "ep_size", 2),
        "attn_dp_size": receipt("two", "attn_dp_size", 2),
        "nnodes": receipt("nodes", "nnodes", 2),
        "ranks_per_gpu": refused(
            *("tiny-random", "--tp-size", "2", "--device", "cpu", "--ranks-per-gpu", "2"),
            words="--ranks-per-gpu 2: ranks share GPUs, and with --device cpu there is none",
        ),
        "deepep_v2_mode": refused(
            *("tiny-random", "--deepep-v2-mode", "hybrid"),
            words="--deepep-v2-mode hybrid: belongs to --moe-a2a-backend deepep_v2, and none is used",
        ),
        "node_rank": prove_node_rank,
        "dist_init": prove_dist_init,
        "stall_timeout": receipt("one", "stall_timeout", 33),
        "moe_a2a_backend": in_layers("two", "a2a_backend", expected="collective"),
        "moe_runner_backend": in_layers("one", "runner_backend", expected="torch"),
        "moe_overlap": in_layers("two", "overlapped", expected=True),
        "moe_prefill_capacity": in_layers("two", "capacity", "prefill", expected=300),
        "moe_decode_capacity": in_layers("two", "capacity", "decode", expected=20),
        "max_model_len": receipt("one", "max_model_len", 192),
        "max_running_requests": receipt("one", "max_running_requests", 5),
        "chunked_prefill_size": receipt("one", "chunked_prefill_size", 48),
        "cuda_graph_max_batch": refused(
            *("tiny-random", "--device", "cpu", "--cuda-graph-max-batch", "8"),
            words="--cuda-graph-max-batch 8: there are no CUDA graphs on cpu",
        ),
        "overlap_schedule": receipt("one", "overlap_schedule", True),
        "page_size": receipt("one", "page_size", 8),
        "kv_memory": prove_kv_memory,
        "prefix_cache": receipt("one", "prefix_cache", False),
        "served_model_name": prove_served_model_name,
        "host": prove_host_and_port,
        "port": prove_host_and_port,
        "api_key": key_is_needed("one"),
        "api_key_file": key_is_needed("two"),
        "evidence": prove_evidence,
        "log_level": prove_log_level,
        "log_format": prove_log_format,
        "drain_timeout": prove_drain_timeout,
        "tool_call_parser": prove_tool_call_parser,
        "reasoning_parser": prove_reasoning_parser,
        "cors_origins": prove_cors_origins,
        "max_waiting_requests": prove_max_waiting_requests,
        "request_timeout": prove_request_timeout,
        "max_request_bytes": prove_max_request_bytes,
        "otlp_endpoint": refused(
            *("tiny-random", "--otlp-endpoint", "udp://x:4317"),
            words="--otlp-endpoint udp://x:4317: is no http://",
        ),
    }
)


def test_every_option_has_a_proof() -> None:
    assert PROOFS.keys() == OPTIONS.keys()


@pytest.mark.parametrize("name", PROOFS)
def test_the_option_is_not_inert(launches: Launches, name: str) -> None:
    PROOFS[name](launches)
