"""The launch plan: the frozen result of resolving options x model card x machine facts.

It is the only thing that the engine reads. Every field of ``LaunchPlan`` is a plan item; ``provenance``
says who set it and why, and every item that the engine acts on ends in a receipt of the same name.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from interlock.plan.card import ModelCard


class Source(StrEnum):
    """Who set a plan item."""

    DEFAULT = "default"
    USER = "user"
    RULE = "rule"
    LAUNCHER = "launcher"
    MODEL = "model"


class Provenance(msgspec.Struct, frozen=True):
    """Why an item has its value. ``reason`` is one sentence; a user's value names flag, file or variable."""

    source: Source
    reason: str


class MemoryEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes a rank will hold, as the planner computes them (the largest rank)."""

    weights: int
    kv_full: int
    kv_window: int
    a2a_buffers: int
    activations: int
    available: int
    graphs: int = 0

    @property
    def total(self) -> int:
        fixed = self.weights + self.a2a_buffers + self.activations + self.graphs
        return fixed + self.kv_full + self.kv_window


class LaunchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the engine needs to know. Sizes are in tokens, pages or bytes as their names say.

    Attributes:
        model_path: folder of the checkpoint.
        load_format: "safetensors" or "dummy".
        qkv_layout: row order of a fused qkv tensor: "auto", "plain" or "chunked".
        dtype: dtype of activations and of weights that are not quantised: "float32" or "bfloat16".
        attention_weight_format, mlp_weight_format, expert_weight_format: what these weights are held in:
            "fp8_block" (e4m3 with a float32 scale for each 128x128 block) or ``dtype``.
        num_hidden_layers: layers that are built; fewer than the checkpoint's in benchmarks only.
        kv_cache_dtype: "float32" or "bfloat16" (or "fp8_e4m3" where a device supports it).
        device: "cpu" or "cuda".
        kernels: name of the kernel set ("cpu", "torch", ...).
        attention_backend: name of what computes attention over the cache.
        threads: intra-op threads of each rank.
        tp_size: ranks in the world.
        ep_size: expert-parallel ranks; experts are sliced over tp_size / ep_size ranks.
        attn_dp_size: attention replicas; attention tensor parallelism is tp_size / attn_dp_size.
        ranks_per_gpu: consecutive ranks that share a GPU, 1 but in a rehearsal.
        nccl_library: file that the ranks of a rehearsal load as NCCL; "" for torch's own.
        moe_a2a_mode: way of exchanging that the backend lets choose; "" where it has one way only.
        moe_layout_prefill, moe_layout_decode: layout of dispatched rows for each phase.
        moe_prefill_capacity, moe_decode_capacity: T, tokens that one rank may dispatch in one step.
        moe_overlap: steps are exchanged in two halves, one beside the experts of the other.
        moe_buffer_bytes: bytes that the dispatcher reserves on a rank.
        max_running_requests: requests decoding at once, for each replica.
        chunked_prefill_size: tokens of one prefill step, for each replica.
        cuda_graph_sizes: decode batches that are captured as CUDA graphs, ascending; empty for none.
        overlap_schedule: the next decode step is made and queued while the device runs the last one.
        full_pages, window_pages: pages in each page space, for each replica.
        sliding_window_extra: 0 reads a window of W as W keys including the token, 1 as W + 1.
        stall_timeout: seconds after which a silent rank ends the server.
        evidence: "require", "warn" or "off": what to do about a launch that no evidence proves.
        dist_init: host:port of the ranks' rendezvous, "" for a free local port.
        log_format: "text" or "json".
        drain_timeout: seconds that running requests may go on after SIGTERM.
        tool_call_parser, reasoning_parser: names of parsers, "auto" or "none".
        cors_origins: origins that get CORS headers, with commas between; "" for none.
        max_waiting_requests: 0 for no limit. request_timeout: seconds, 0 for none.
        otlp_endpoint: URL of an OTLP/HTTP collector of traces, "" for none.
        disaggregation_mode: "none", "prefill" or "decode"; the others of the name are "" or 0 for "none".
        disaggregation_bootstrap_port: where decode servers reach a prefill server; 0 on a decode server.
        disaggregation_timeout, disaggregation_queue_timeout: seconds, of what the other server does at once
            and of what takes its turn.
    """

    model: str
    model_path: str
    model_family: str
    card: ModelCard
    served_model_name: str
    load_format: str
    qkv_layout: str
    dtype: str
    kv_cache_dtype: str
    attention_weight_format: str
    mlp_weight_format: str
    expert_weight_format: str
    num_hidden_layers: int
    device: str
    kernels: str
    threads: int
    seed: int

    tp_size: int
    ep_size: int
    attn_dp_size: int
    nnodes: int
    node_rank: int
    dist_init: str

    moe_a2a_backend: str
    moe_runner_backend: str
    moe_layout_prefill: str
    moe_layout_decode: str
    moe_prefill_capacity: int
    moe_decode_capacity: int
    moe_buffer_bytes: int
    deterministic: bool

    max_model_len: int
    max_running_requests: int
    chunked_prefill_size: int
    cuda_graph_sizes: tuple[int, ...]
    overlap_schedule: bool
    page_size: int
    full_pages: int
    window_pages: int
    prefix_cache: bool
    sliding_window_extra: int

    host: str
    port: int
    api_key_set: bool
    evidence: str
    stall_timeout: float
    log_level: str
    log_format: str = "text"
    drain_timeout: float = 20.0
    otlp_endpoint: str = ""
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    cors_origins: str = ""
    max_waiting_requests: int = 0
    request_timeout: float = 0.0
    max_request_bytes: int = 16777216

    disaggregation_mode: str = "none"
    disaggregation_transfer_backend: str = ""
    disaggregation_bootstrap_port: int = 0
    disaggregation_timeout: float = 0.0
    disaggregation_queue_timeout: float = 0.0

    attention_backend: str = "paged_attention"
    moe_a2a_mode: str = ""
    moe_overlap: bool = False
    ranks_per_gpu: int = 1
    nccl_library: str = ""

    memory: MemoryEstimate
    provenance: dict[str, Provenance]

    @property
    def gpus(self) -> int:
        """GPUs of all ranks (or ranks, on a CPU)."""
        return self.tp_size // self.ranks_per_gpu

    @property
    def attn_tp_size(self) -> int:
        return self.tp_size // self.attn_dp_size

    @property
    def sequence_pages(self) -> int:
        """Pages that the longest sequence takes."""
        return -(-self.max_model_len // self.page_size)

    @property
    def experts_tp_size(self) -> int:
        return self.tp_size // self.ep_size
