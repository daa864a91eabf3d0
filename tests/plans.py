"""Launch plans for tests: every field with a sane value for one process on a CPU."""

from __future__ import annotations

from typing import Any

from interlock.plan.card import ModelCard
from interlock.plan.launch_plan import LaunchPlan, MemoryEstimate


def make_plan(card: ModelCard, **overrides: Any) -> LaunchPlan:
    """A LaunchPlan for ``card`` with the torch kernels, float32 and one rank; ``overrides`` replace fields.

    ``model_path`` may be given as a Path. Provenance is empty: tests that need it go through the planner.
    """
    fields: dict[str, Any] = {
        "model": "test",
        "model_path": "",
        "model_family": card.family,
        "card": card,
        "served_model_name": "test",
        "load_format": "safetensors",
        "qkv_layout": "auto",
        "dtype": "float32",
        "kv_cache_dtype": "float32",
        **dict.fromkeys(
            ("attention_weight_format", "mlp_weight_format", "expert_weight_format"),
            overrides.get("dtype", "float32"),
        ),
        "num_hidden_layers": card.num_layers,
        "device": "cpu",
        "kernels": "torch",
        "attention_backend": "paged_attention",
        "threads": 1,
        "seed": 0,
        "tp_size": 1,
        "ep_size": 1,
        "attn_dp_size": 1,
        "nnodes": 1,
        "node_rank": 0,
        "dist_init": "",
        "ranks_per_gpu": 1,
        "nccl_library": "",
        "moe_a2a_backend": "none",
        "moe_runner_backend": "torch",
        "moe_layout_prefill": "replicated",
        "moe_layout_decode": "replicated",
        "moe_prefill_capacity": 256,
        "moe_decode_capacity": 16,
        "moe_buffer_bytes": 0,
        "moe_overlap": False,
        "deterministic": False,
        "max_model_len": min(card.max_position, 512),
        "max_running_requests": 16,
        "chunked_prefill_size": 256,
        "cuda_graph_sizes": (),
        "overlap_schedule": False,
        "page_size": 16,
        "full_pages": 64,
        "window_pages": 64,
        "prefix_cache": True,
        "sliding_window_extra": 0,
        "host": "127.0.0.1",
        "port": 0,
        "api_key_set": False,
        "evidence": "off",
        "stall_timeout": 60.0,
        "log_level": "warning",
        "log_format": "text",
        "drain_timeout": 20.0,
        "otlp_endpoint": "",
        "tool_call_parser": "auto",
        "reasoning_parser": "auto",
        "cors_origins": "",
        "max_waiting_requests": 0,
        "request_timeout": 0.0,
        "max_request_bytes": 1 << 24,
        "disaggregation_mode": "none",
        "disaggregation_transfer_backend": "",
        "disaggregation_bootstrap_port": 0,
        "disaggregation_timeout": 0.0,
        "disaggregation_queue_timeout": 0.0,
        "memory": MemoryEstimate(
            weights=0, kv_full=0, kv_window=0, a2a_buffers=0, activations=0, available=1 << 34
        ),
        "provenance": {},
    }
    unknown = overrides.keys() - fields.keys()
    if unknown:
        raise TypeError(f"not fields of LaunchPlan: {sorted(unknown)}")
    fields.update(overrides)
    fields["model_path"] = str(fields["model_path"])
    return LaunchPlan(**fields)
