"""The same numbers under the names that dashboards for vLLM and SGLang know, where the meaning is the same.

Labels: ``replica`` is vLLM's ``engine`` and SGLang's ``dp_rank``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from prometheus_client.core import Metric

ALIASES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "interlock:num_requests_running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
        "interlock:num_requests_waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
        "interlock:kv_cache_usage_perc": ("vllm:kv_cache_usage_perc", "sglang:token_usage"),
        "interlock:prompt_tokens": ("vllm:prompt_tokens", "sglang:prompt_tokens"),
        "interlock:generation_tokens": ("vllm:generation_tokens", "sglang:generation_tokens"),
        "interlock:prefix_cache_queries": ("vllm:prefix_cache_queries",),
        "interlock:prefix_cache_hits": ("vllm:prefix_cache_hits",),
        "interlock:prefix_cache_hit_rate": ("sglang:cache_hit_rate",),
        "interlock:num_preemptions": ("vllm:num_preemptions",),
        "interlock:requests_started": ("sglang:num_requests",),
        "interlock:request_success": ("vllm:request_success",),
        "interlock:requests_aborted": ("sglang:num_aborted_requests",),
        "interlock:generation_throughput": ("sglang:gen_throughput",),
        "interlock:time_to_first_token_seconds": (
            "vllm:time_to_first_token_seconds",
            "sglang:time_to_first_token_seconds",
        ),
        "interlock:inter_token_latency_seconds": (
            "vllm:inter_token_latency_seconds",
            "sglang:inter_token_latency_seconds",
        ),
        "interlock:e2e_request_latency_seconds": (
            "vllm:e2e_request_latency_seconds",
            "sglang:e2e_request_latency_seconds",
        ),
        "interlock:request_queue_time_seconds": (
            "vllm:request_queue_time_seconds",
            "sglang:queue_time_seconds",
        ),
        "interlock:request_prefill_time_seconds": ("vllm:request_prefill_time_seconds",),
        "interlock:request_decode_time_seconds": ("vllm:request_decode_time_seconds",),
        "interlock:request_inference_time_seconds": ("vllm:request_inference_time_seconds",),
        "interlock:request_time_per_output_token_seconds": ("vllm:request_time_per_output_token_seconds",),
        "interlock:request_prompt_tokens": ("vllm:request_prompt_tokens",),
        "interlock:request_generation_tokens": ("vllm:request_generation_tokens",),
        "interlock:cache_config_info": ("vllm:cache_config_info",),
        "interlock:rank_balancedness": ("sglang:eplb_balancedness",),
    }
)

ALIAS_NAMES: Final = frozenset(alias for aliases in ALIASES.values() for alias in aliases)

_LABELS: Final = MappingProxyType({"vllm": {"replica": "engine"}, "sglang": {"replica": "dp_rank"}})


def aliases_of(family: Metric) -> Iterator[Metric]:
    """``family`` under each of its other names."""
    for alias in ALIASES.get(family.name, ()):
        labels = _LABELS[alias.partition(":")[0]]
        copy = Metric(alias, family.documentation, family.type)
        copy.samples = [
            sample._replace(
                name=alias + sample.name[len(family.name) :],
                labels={labels.get(name, name): value for name, value in sample.labels.items()},
            )
            for sample in family.samples
        ]
        yield copy
