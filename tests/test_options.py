"""The option table and its sources: flags, file, environment, keywords."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from interlock.errors import Refusal
from interlock.option_docs import options_markdown
from interlock.option_kinds import AUTO, Kind, Secret
from interlock.option_sources import gather, unknown_flag
from interlock.options import OPTIONS, Options
from interlock.plan.facts import TRACING_PACKAGES, MachineFacts
from interlock.plan.launch_plan import LaunchPlan, Source
from interlock.plan.resolve import resolve
from tests.plan.machines import gpu_machine, machine, mimo_card, mimo_pro_card, tiny_card

FROZEN = [
    "model",
    "demo_source",
    "load_format",
    "num_hidden_layers",
    "qkv_layout",
    "sliding_window_extra",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "deterministic",
    "seed",
    "device",
    "kernels",
    "attention_backend",
    "threads",
    "tp_size",
    "ep_size",
    "attn_dp_size",
    "nnodes",
    "ranks_per_gpu",
    "node_rank",
    "dist_init",
    "stall_timeout",
    "moe_a2a_backend",
    "deepep_v2_mode",
    "moe_runner_backend",
    "moe_overlap",
    "moe_prefill_capacity",
    "moe_decode_capacity",
    "max_model_len",
    "max_running_requests",
    "chunked_prefill_size",
    "cuda_graph_max_batch",
    "overlap_schedule",
    "page_size",
    "kv_memory",
    "prefix_cache",
    "disaggregation_mode",
    "disaggregation_transfer_backend",
    "disaggregation_bootstrap_port",
    "disaggregation_timeout",
    "disaggregation_queue_timeout",
    "served_model_name",
    "host",
    "port",
    "api_key",
    "api_key_file",
    "evidence",
    "log_level",
    "log_format",
    "drain_timeout",
    "otlp_endpoint",
    "tool_call_parser",
    "reasoning_parser",
    "cors_origins",
    "max_waiting_requests",
    "request_timeout",
    "max_request_bytes",
]

RULES_ONLY = {
    "card",
    "model_family",
    "moe_layout_prefill",
    "moe_layout_decode",
    "moe_buffer_bytes",
    "nccl_library",
    "memory",
    "provenance",
}
"""Plan items that follow from others and have no option of their own."""

CHANGED: dict[str, tuple[str, dict[str, object]]] = {
    "model": ("other-name", {}),
    "load_format": ("dummy", {}),
    "num_hidden_layers": ("2", {"load_format": "dummy"}),
    "quantization": ("none", {}),
    "qkv_layout": ("chunked", {}),
    "sliding_window_extra": ("1", {}),
    "dtype": ("bfloat16", {}),
    "kv_cache_dtype": ("bfloat16", {}),
    "deterministic": ("on", {}),
    "seed": ("7", {}),
    "device": ("cpu", {}),
    "kernels": ("torch", {}),
    "attention_backend": ("paged_attention", {}),
    "threads": ("3", {}),
    "tp_size": ("2", {}),
    "ep_size": ("2", {"tp_size": 2}),
    "attn_dp_size": ("2", {"tp_size": 2}),
    "nnodes": ("2", {"tp_size": 2, "dist_init": "10.0.0.1:29500"}),
    "ranks_per_gpu": ("2", {"tp_size": 2}),
    "node_rank": ("1", {"tp_size": 2, "nnodes": 2, "dist_init": "10.0.0.1:29500"}),
    "dist_init": ("10.0.0.1:29500", {}),
    "stall_timeout": ("5", {}),
    "moe_a2a_backend": ("collective", {}),
    "deepep_v2_mode": ("hybrid", {"tp_size": 2, "moe_a2a_backend": "deepep_v2"}),
    "moe_runner_backend": ("torch", {}),
    "moe_overlap": ("on", {"tp_size": 2, "moe_a2a_backend": "collective"}),
    "moe_prefill_capacity": ("700", {}),
    "moe_decode_capacity": ("100", {}),
    "max_model_len": ("1000", {}),
    "max_running_requests": ("3", {}),
    "chunked_prefill_size": ("48", {}),
    "page_size": ("8", {}),
    "kv_memory": ("8MiB", {}),
    "prefix_cache": ("off", {}),
    "cuda_graph_max_batch": ("8", {}),
    "overlap_schedule": ("off", {}),
    "disaggregation_mode": ("decode", {}),
    "disaggregation_transfer_backend": ("shared_memory", {"disaggregation_mode": "decode"}),
    "disaggregation_bootstrap_port": ("9000", {"disaggregation_mode": "prefill"}),
    "disaggregation_timeout": ("5", {"disaggregation_mode": "decode"}),
    "disaggregation_queue_timeout": ("5", {"disaggregation_mode": "decode"}),
    "served_model_name": ("mine", {}),
    "host": ("0.0.0.0", {}),
    "port": ("9000", {}),
    "api_key": ("s3cret", {}),
    "api_key_file": ("/run/key", {}),
    "evidence": ("require", {}),
    "log_level": ("debug", {}),
    "log_format": ("json", {}),
    "drain_timeout": ("3", {}),
    "otlp_endpoint": ("http://127.0.0.1:4318", {}),
    "tool_call_parser": ("hermes", {}),
    "reasoning_parser": ("qwen3", {}),
    "cors_origins": ("https://chat.example.org", {}),
    "max_waiting_requests": ("7", {}),
    "request_timeout": ("30", {}),
    "max_request_bytes": ("1MiB", {}),
}


def deepep_machine() -> MachineFacts:
    """Two GPUs without RDMA, with DeepEP as it must be installed there."""
    facts = gpu_machine(gpus=2)
    packages = {**facts.packages, "deep_ep": "2.1.0+local"}
    return msgspec.structs.replace(facts, packages=packages, environment={"EP_DISABLE_GIN": "1"})


ON_A_GPU = {"quantization", "cuda_graph_max_batch", "overlap_schedule", "ranks_per_gpu"}
"""Options that change a plan on a GPU only."""
ONE_CHOICE = {"device", "attention_backend", "disaggregation_transfer_backend"}
"""Options of which this machine leaves one value only, which auto takes too."""


def test_option_list_is_frozen_and_short() -> None:
    """Adding an option is a decision: change this list, docs/options.md and the changelog together."""
    assert list(OPTIONS) == FROZEN
    assert len(OPTIONS) < 60


def test_every_plan_item_has_an_option_or_follows_from_others() -> None:
    set_by_options = {item for option in OPTIONS.values() for item in option.items}
    assert set_by_options <= set(LaunchPlan.__struct_fields__)
    assert set(LaunchPlan.__struct_fields__) - set_by_options == RULES_ONLY


@pytest.mark.parametrize("name", [name for name in FROZEN if name != "demo_source"])
def test_every_option_reaches_its_plan_item(name: str) -> None:
    """A non-default value changes the item and is named in its provenance (``demo_source`` decides the folder
    before the planner runs; tests/demo covers it)."""
    text, context = CHANGED[name]
    card = mimo_pro_card() if name == "qkv_layout" else tiny_card()
    facts = machine(memory_total=4 << 40, memory_available=4 << 40) if name == "qkv_layout" else machine()
    if name in ON_A_GPU:
        card, facts = mimo_card(num_hidden_layers=2, n_routed_experts=16), gpu_machine(gpus=1)
    if name == "deepep_v2_mode":
        card, facts = mimo_card(num_hidden_layers=2, n_routed_experts=16), deepep_machine()
    facts = msgspec.structs.replace(
        facts, packages={**facts.packages, **dict.fromkeys(TRACING_PACKAGES, "1")}
    )
    base = {"model": "m", **context}
    plain = resolve(Options.of(**base), card, facts)
    plan = resolve(Options.of(**{**base, name: text}), card, facts)
    for item in OPTIONS[name].items:
        if item != "model_path":
            assert plan.provenance[item].source is Source.USER
            assert name in plan.provenance[item].reason
        if name not in ONE_CHOICE:
            assert getattr(plan, item) != getattr(plain, item), item


def test_switches_and_numbers_are_typed() -> None:
    options = Options.of(tp_size=2, prefix_cache=False, kv_memory="1.5GiB", stall_timeout=2)
    assert options.integer("tp_size") == 2
    assert options.switch("prefix_cache") is False
    assert options.integer("kv_memory") == 3 << 29
    assert options.number("stall_timeout") == 2.0
    assert options.integer("ep_size") is None


@pytest.mark.parametrize(
    ("text", "count"),
    [("4GiB", 4 << 30), ("512 MiB", 512 << 20), ("1000", 1000), ("2kb", 2000), ("0.5KiB", 512)],
)
def test_sizes(text: str, count: int) -> None:
    assert Options.of(kv_memory=text).integer("kv_memory") == count


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("tp_size", "two", "not a whole number"),
        ("tp_size", "0", "at least 1"),
        ("tp_size", "auto", "not a whole number"),
        ("tp_size", "1" * 40, "not a whole number"),
        ("stall_timeout", "nan", "not a number"),
        ("kv_memory", "4 gigs", "not a size"),
        ("prefix_cache", "maybe", "on or off"),
        ("dtype", "float16", "none of float32, bfloat16 or auto"),
        ("served_model_name", " ", "must not be empty"),
        ("api_key", "", "protects nothing"),
    ],
)
def test_unreadable_values_are_refused(name: str, text: str, words: str) -> None:
    with pytest.raises(Refusal, match=words):
        Options.of(**{name: text})


def test_a_broken_plugin_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from interlock.moe.a2a import registry
    from interlock.moe.a2a.backend import A2ABackend
    from interlock.plugins import Catalogue

    broken: Catalogue[A2ABackend] = Catalogue(
        kind="a2a backend", entries=registry.a2a_backends().entries, broken={"fast": "importing fast raised"}
    )
    monkeypatch.setattr(registry, "a2a_backends", lambda: broken)
    with pytest.raises(Refusal, match="installed but broken: importing fast raised"):
        Options.of(moe_a2a_backend="fast")


def test_precedence_is_flag_file_environment(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("tp-size: 4\nport: 2\nprefix_cache: off\n")
    environ = {"INTERLOCK_TP_SIZE": "8", "INTERLOCK_SEED": "3", "INTERLOCK_PORT": "9", "HOME": "/"}
    options = gather({"port": "1", "host": None}, config=str(file), environ=environ)
    assert (options.integer("tp_size"), options.origin("tp_size")) == (4, f"{file}, key tp-size")
    assert (options.integer("port"), options.origin("port")) == (1, "flag --port")
    assert (options.integer("seed"), options.origin("seed")) == (3, "environment variable INTERLOCK_SEED")
    assert options.switch("prefix_cache") is False
    assert not options.is_set("host")


def test_auto_on_the_command_line_undoes_the_environment() -> None:
    options = gather({"ep_size": "auto"}, config=None, environ={"INTERLOCK_EP_SIZE": "2"})
    assert not options.is_set("ep_size")


def test_config_may_come_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("seed: 5")
    assert gather({}, config=None, environ={"INTERLOCK_CONFIG": str(file)}).integer("seed") == 5


@pytest.mark.parametrize(
    ("flag", "ours"),
    [
        ("--tensor-parallel-size", "--tp-size"),
        ("--tp", "--tp-size"),
        ("--context-length", "--max-model-len"),
        ("--all2all-backend", "--moe-a2a-backend"),
        ("--enable-expert-parallel", "--ep-size"),
        ("--data-parallel-size", "--attn-dp-size"),
        ("--moe-backend", "--moe-runner-backend"),
        ("--max-num-batched-tokens", "--chunked-prefill-size"),
        ("--max-num-seqs", "--max-running-requests"),
        ("--gpu-memory-utilization", "--kv-memory"),
        ("--mem-fraction-static", "--kv-memory"),
        ("--page-siz", "--page-size"),
        ("--configg", "--config"),
    ],
)
def test_other_spellings_lead_to_ours(flag: str, ours: str) -> None:
    assert f"did you mean {ours}" in str(unknown_flag(flag))


def test_unknown_names_are_refused_from_every_source(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"INTERLOCK_TPSIZE.*INTERLOCK_TP_SIZE"):
        gather({}, config=None, environ={"INTERLOCK_TPSIZE": "2"})
    file = tmp_path / "c.yaml"
    file.write_text("tensor_parallel_size: 2")
    with pytest.raises(Refusal, match=r"tensor_parallel_size.*did you mean tp_size"):
        gather({}, config=str(file), environ={})
    with pytest.raises(Refusal, match=r"pagesize.*page_size"):
        Options.of(pagesize=4)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("tp_size: 2\ntp_size: 4", "twice"),
        ("tp_size: 2\ntp-size: 4", "twice"),
        ("- tp_size", "must be a mapping"),
        ("tp_size: [1, 2]", "must be a text"),
        ("tp_size: {", "not YAML"),
        ("!!python/object/apply:os.system ['true']", "not YAML"),
    ],
)
def test_broken_config_files(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(content)
    with pytest.raises(Refusal, match=words):
        gather({}, config=str(file), environ={})


def test_missing_config_file() -> None:
    with pytest.raises(Refusal, match="cannot be read"):
        gather({}, config="/nowhere.yaml", environ={})


def test_api_key_is_never_shown(tmp_path: Path) -> None:
    options = Options.of(api_key="topsecret", model="m")
    plan = resolve(options, tiny_card(), machine())
    assert plan.api_key_set
    assert "topsecret" not in repr(options) + repr(plan)
    key = options.api_key()
    assert isinstance(key, Secret)
    assert key.reveal() == "topsecret"
    file = tmp_path / "key"
    file.write_text("fromfile\n")
    from_file = Options.of(api_key_file=file).api_key()
    assert from_file is not None
    assert from_file.reveal() == "fromfile"


def test_api_key_given_twice_or_unreadable(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="both set") as caught:
        Options.of(api_key="topsecret", api_key_file="x")
    assert "topsecret" not in str(caught.value)
    with pytest.raises(Refusal, match="cannot be read"):
        Options.of(api_key_file=tmp_path / "none").api_key()
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(Refusal, match="holds no key"):
        Options.of(api_key_file=tmp_path / "empty").api_key()


def test_a_key_file_flag_wins_over_a_key_in_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("flagged")
    environ = {"INTERLOCK_API_KEY": "environment"}
    key = gather({"api_key_file": str(file)}, config=None, environ=environ).api_key()
    assert key is not None
    assert key.reveal() == "flagged"


def test_paste_is_read_back() -> None:
    from interlock.plan.nearest import paste, read_flags

    edits = {"tp_size": 4, "ep_size": AUTO, "deterministic": False, "kv_memory": 3 << 20, "dtype": "bfloat16"}
    text = "--tp-size 4 --ep-size auto --no-deterministic --kv-memory 3MiB --dtype bfloat16"
    assert paste(edits) == text
    assert read_flags(text) == edits


def test_every_option_has_help_and_a_sound_default() -> None:
    for option in OPTIONS.values():
        assert option.help
        assert not option.help.endswith(".")
        if isinstance(option.default, int | float | str) and option.kind is not Kind.SWITCH:
            assert option.parse(str(option.default), option.flag) == option.default


def test_docs_do_not_drift() -> None:
    page = Path(__file__).parents[1] / "docs" / "options.md"
    assert page.read_text(encoding="utf-8") == options_markdown(), (
        "run: python -m interlock.option_docs > docs/options.md"
    )
