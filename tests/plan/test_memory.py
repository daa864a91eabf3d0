"""What fits: pools, the longest request, and numbers in refusals."""

from __future__ import annotations

import pytest

from interlock.engine.messages import AddRequest, SamplingParams
from interlock.engine.scheduler import Scheduler
from interlock.errors import Refusal
from interlock.options import Options
from interlock.plan.launch_plan import LaunchPlan
from interlock.plan.memory import size
from interlock.plan.nearest import read_flags
from interlock.plan.resolve import resolve
from tests.plan.machines import GIB, gpu_machine, machine, mimo_card, mimo_pro_card, tiny_card

TINY_TOKEN = 2 * 2 * (24 + 16) * 4
"""float32 bytes of one token in the two full layers of the tiny card: 2 kv heads, widths 24 and 16."""


def plan_for(**asked: object) -> LaunchPlan:
    return resolve(Options.of(model="m", **asked), tiny_card(), machine())


def test_pools_hold_no_more_than_the_limits_can_use() -> None:
    plan = plan_for(max_running_requests=3, max_model_len=100, page_size=16)
    assert plan.full_pages == 3 * 7
    assert plan.memory.kv_full == 21 * 16 * TINY_TOKEN


def test_kv_memory_is_kept_to() -> None:
    plan = plan_for(kv_memory="8MiB")
    used = plan.memory.kv_full + plan.memory.kv_window
    assert 0.9 * (8 << 20) < used <= 8 << 20


def test_the_longest_request_is_what_the_pool_holds() -> None:
    plan = plan_for(kv_memory="2MiB")
    assert plan.max_model_len == min(4096, plan.full_pages * plan.page_size)
    assert plan.max_model_len < 4096
    assert "what the KV pool holds" in plan.provenance["max_model_len"].reason


def test_a_longest_request_larger_than_the_pool_is_refused() -> None:
    """F01 at plan time: a request that is legal for the length but not for the pool cannot exist."""
    with pytest.raises(Refusal, match="one request of 4000 tokens needs") as caught:
        plan_for(kv_memory="1MiB", max_model_len=4000)
    options = Options.of(model="m", kv_memory="1MiB", max_model_len=4000)
    for alternative in caught.value.alternatives:
        resolve(options.changed(read_flags(alternative)), tiny_card(), machine())


def test_a_length_beyond_the_model_is_refused() -> None:
    with pytest.raises(Refusal, match="positions end at 4096") as caught:
        plan_for(max_model_len=5000)
    assert caught.value.alternatives == ("--max-model-len 4096",)


def test_memory_that_does_not_fit_is_refused_with_numbers() -> None:
    with pytest.raises(Refusal) as caught:
        plan_for(kv_memory="900GiB")
    text = str(caught.value)
    for word in ("900 GiB", "for weights", "for activations", "is available"):
        assert word in text
    plan_for(kv_memory=caught.value.alternatives[0].split()[1])


def test_buffers_are_reserved_before_the_pools() -> None:
    """A larger T takes from what the KV pool may have, on a machine that is just large enough."""
    facts = machine(memory_available=640 << 20)
    options = {"model": "m", "tp_size": 2, "moe_a2a_backend": "shared_memory"}
    small = resolve(Options.of(**options), tiny_card(), facts)
    large = resolve(Options.of(**options, moe_prefill_capacity=4000), tiny_card(), facts)
    assert large.memory.a2a_buffers > small.memory.a2a_buffers
    assert large.memory.kv_full < small.memory.kv_full
    assert large.memory.total <= large.memory.available


def test_window_extra_widens_the_window_pool() -> None:
    plain = plan_for(max_running_requests=1, prefix_cache=False, page_size=8, max_model_len=64)
    wider = plan_for(
        max_running_requests=1, prefix_cache=False, page_size=8, max_model_len=64, sliding_window_extra=1
    )
    assert wider.window_pages >= plain.window_pages


@pytest.mark.parametrize("extra", [2, 128])
def test_window_extra_is_0_or_1(extra: int) -> None:
    with pytest.raises(Refusal, match=r"\+ 1"):
        plan_for(sliding_window_extra=extra)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1536, "1.5 KiB"), (5 << 30, "5 GiB"), (3 << 40, "3 TiB")],
)
def test_size(count: int, text: str) -> None:
    assert size(count) == text


def test_mimo_flash_on_16_gpus() -> None:
    """Experts kept in fp8 are 18 GiB a rank over 16; the KV of one token on a rank of attention TP 4 is 9
    full layers x 1 kv head x (192 + 128) x 2 bytes."""
    facts = gpu_machine(gpus=8)
    options = Options.of(
        model="flash",
        tp_size=16,
        attn_dp_size=4,
        nnodes=2,
        dist_init="node0:29500",
        moe_a2a_backend="collective",
    )
    card = mimo_card()
    assert card.parameters == pytest.approx(309e9, rel=0.01)
    plan = resolve(options, card, facts)
    assert plan.device == "cuda"
    assert plan.ep_size == 16
    experts = 47 * 256 // 16 * 3 * 4096 * 2048
    assert experts < plan.memory.weights < experts + 4 * GIB
    assert plan.memory.kv_full == plan.full_pages * plan.page_size * 9 * (192 + 128) * 2
    assert plan.memory.total <= plan.memory.available < 139 * GIB
    assert plan.max_model_len == 262144


def test_mimo_pro_on_16_gpus_and_refused_on_8() -> None:
    """1.02T weights in bf16: 120 GiB a rank over 16 fit 139 GiB, 238 GiB over 8 do not, and more ranks are
    offered. Kept in fp8 they take half."""
    card = mimo_pro_card()
    assert card.parameters == pytest.approx(1.02e12, rel=0.01)
    facts = gpu_machine(gpus=8)
    two_nodes = {"nnodes": 2, "dist_init": "node0:29500"}
    kept = resolve(Options.of(model="pro", tp_size=16, **two_nodes), card, facts)
    assert kept.memory.weights == pytest.approx(1.021e12 / 16, rel=0.04)
    two_nodes["quantization"] = "none"
    plan = resolve(Options.of(model="pro", tp_size=16, **two_nodes), card, facts)
    assert plan.memory.weights == pytest.approx(1.021e12 * 2 / 16, rel=0.02)
    with pytest.raises(Refusal, match=r"238\.\d GiB for weights") as caught:
        resolve(Options.of(model="pro", tp_size=8, quantization="none"), card, facts)
    assert "--quantization auto" in caught.value.alternatives
    facts = gpu_machine(gpus=4)
    options = Options.of(model="pro", tp_size=4)
    with pytest.raises(Refusal, match=r"2\d\d\.\d GiB for weights") as caught:
        resolve(options, card, facts)
    assert caught.value.alternatives[0] == "--tp-size 8 --nnodes 2 --dist-init HOST:29500"
    resolve(options.changed(read_flags(caught.value.alternatives[0])), card, facts)


def test_weights_match_the_card_on_one_rank() -> None:
    """On one rank the estimate is the card's own parameter count (float32 routers aside)."""
    card = mimo_card()
    facts = machine(memory_total=4 << 40, memory_available=4 << 40)
    plan = resolve(Options.of(model="m"), card, facts)
    assert plan.memory.weights == pytest.approx(card.parameters * 2, rel=0.002)


@pytest.mark.parametrize(("count", "tokens"), [(8, 2048), (32, 512), (5, 3000), (60, 250)])
def test_window_pages_hold_a_chunk_of_many_prompts(count: int, tokens: int) -> None:
    """A chunk that several prompts fill together is not cut by a pool that was sized for one long prompt."""
    options = Options.of(
        model="m",
        max_model_len=9216,
        max_running_requests=64,
        chunked_prefill_size=min(16384, count * tokens),
        prefix_cache=False,
        num_hidden_layers=12,
        load_format="dummy",
    )
    scheduler = Scheduler(resolve(options, mimo_card(), gpu_machine(1)))
    sampling = SamplingParams(max_tokens=4)
    for index in range(count):
        prompt = tuple(range(1, tokens + 1))
        assert not scheduler.add(AddRequest(request_id=str(index), token_ids=prompt, sampling=sampling))
    batch = scheduler.schedule()
    assert batch is not None
    assert batch.arrays.live_tokens == min(16384, count * tokens)
