"""In what the weights are held in memory: as the checkpoint's fp8 blocks where kernels and shapes allow it.

Three items: ``attention_weight_format`` (q, k, v and, where the checkpoint quantises it, o),
``mlp_weight_format`` (dense layers) and ``expert_weight_format``; each is "fp8_block" or the plan's dtype.
Embedding, head, norms and router are never quantised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from interlock.errors import Refusal
from interlock.kernels.availability import capability_of
from interlock.options import Options
from interlock.plan.card import ModelCard
from interlock.plan.decided import Decided, asked_text, from_model, rule
from interlock.plan.facts import MachineFacts
from interlock.plan.kernel_choice import FP8_CAPABILITIES, FP8_EMULATIONS, FP8_LINEARS, REFERENCE
from interlock.plan.qkv_blocks import BLOCK, Stored, blocks_of_ranks
from interlock.plan.topology import World, divisors

if TYPE_CHECKING:
    from interlock.moe.experts.base import ExpertRunner

FP8: Final = "fp8_block"


@dataclass(frozen=True, slots=True)
class LinearFormats:
    """Formats of the linears outside the experts."""

    attention: Decided[str]
    mlp: Decided[str]

    def items(self) -> dict[str, Decided[str]]:
        """Plan items."""
        return {"attention_weight_format": self.attention, "mlp_weight_format": self.mlp}


def offered_format(options: Options, card: ModelCard) -> str:
    """What a runner is handed: the checkpoint's format, or fp8 blocks that are made while loading."""
    return FP8 if options.text("quantization") == "fp8" else card.weight_format


def decide_linear_formats(
    options: Options, card: ModelCard, facts: MachineFacts, world: World, *, kernels: str, dtype: str
) -> LinearFormats:
    """Whether attention and dense MLPs keep fp8 blocks, or are given them; what was asked for is kept or
    refused."""
    asked = asked_text(options, "quantization")
    if offered_format(options, card) != FP8:
        plain = _unquantised(options, dtype)
        return LinearFormats(plain, plain)
    if asked is not None and asked.value == "none":
        given = Decided(dtype, asked.source, f"{asked.reason}: dequantised while loading")
        return LinearFormats(given, given)
    machine = machine_problem(facts, world.local_ranks, kernels, dtype, emulates=asked is not None)
    size = world.attn_tp_size
    problems = (
        machine or attention_problem(card, options, size),
        machine or mlp_problem(card, size),
    )
    if asked is not None:
        _refuse(problems[0] or problems[1], card, options, world, machine)
        made = "kept as stored" if card.weight_format == FP8 else "quantised while loading"
        formats = tuple(Decided(FP8, asked.source, f"{asked.reason}: {made}") for _ in problems)
    else:
        formats = tuple(_kept(problem, dtype) for problem in problems)
    attention, mlp = formats
    if all(layer.is_moe for layer in card.layers):
        mlp = from_model(dtype, "the model has no dense layers")
    return LinearFormats(attention, mlp)


def decide_expert_format(
    options: Options, card: ModelCard, runner: ExpertRunner | None, dtype: str
) -> Decided[str]:
    """What the chosen runner holds the experts in."""
    if runner is None:
        return rule(dtype, "the model has no experts")
    asked = asked_text(options, "quantization")
    if runner.dequantises:
        if card.weight_format != FP8:
            return _unquantised(options, dtype)
        if asked is not None:
            return Decided(dtype, asked.source, f"{asked.reason}: dequantised while loading")
        return rule(dtype, f"runner {runner.name} dequantises fp8 blocks while loading")
    if card.weight_format == FP8:
        return rule(FP8, f"runner {runner.name} computes the checkpoint's fp8 blocks as they are")
    assert asked is not None, "only --quantization fp8 offers blocks that the checkpoint does not have"
    return Decided(FP8, asked.source, f"{asked.reason}: quantised while loading")


def machine_problem(
    facts: MachineFacts, ranks: int, kernels: str, dtype: str, *, emulates: bool
) -> str | None:
    """Why no linear can be computed in fp8 here, or None. ``emulates``: slow references will do."""
    if emulates and kernels in FP8_EMULATIONS:
        return None
    if kernels not in FP8_LINEARS:
        return f"--kernels {kernels} compute linears in float32 or bfloat16"
    if dtype != "bfloat16":
        return f"the fp8 kernels take bfloat16 activations, not {dtype}"
    low, high = FP8_CAPABILITIES
    for device in facts.devices[:ranks]:
        if not low <= capability_of(device.capability) <= high:
            return (
                f"the fp8 kernels need a GPU of compute capability {low[0]}.{low[1]}, "
                f"and one has {device.capability or 'none'}"
            )
    return None


def attention_problem(card: ModelCard, options: Options, size: int) -> str | None:
    """Why q, k, v (and o, if it is quantised) of one of ``size`` ranks are no whole blocks, or None."""
    if card.hidden_size % BLOCK:
        return f"the hidden size {card.hidden_size} is no multiple of {BLOCK}"
    kinds = {layer.attention for layer in card.layers}
    if "o_proj" not in card.fp8_except:
        for kind in kinds:
            columns = kind.num_heads * kind.v_head_dim // size
            if columns % BLOCK:
                return f"o_proj of a rank has {columns} input features, no multiple of {BLOCK}"
    if card.weight_format != FP8:
        return None
    if card.weight_block != (BLOCK, BLOCK):
        return _other_blocks(card)
    for kind in kinds:
        for chunks in _chunks(card, options):
            for part, blocks in blocks_of_ranks(Stored(kind, chunks), size):
                if blocks is None:
                    return f"the {part} heads of a rank lie in its blocks of {BLOCK} rows in several ways"
    return None


def mlp_problem(card: ModelCard, size: int) -> str | None:
    """Why the dense MLP of one of ``size`` ranks is no whole blocks, or None."""
    if all(layer.is_moe for layer in card.layers):
        return None
    if card.hidden_size % BLOCK:
        return f"the hidden size {card.hidden_size} is no multiple of {BLOCK}"
    width = card.intermediate_size
    if width % size or width // size % BLOCK:
        return f"the dense width {width} over {size} ranks is no multiple of the block of {BLOCK}"
    return _other_blocks(card) if card.weight_format == FP8 and card.weight_block != (BLOCK, BLOCK) else None


def _chunks(card: ModelCard, options: Options) -> set[int]:
    """Chunks in which q, k and v may turn out to be stored (see ``qkv_blocks.Stored``)."""
    if not card.fused_qkv:
        return {0}
    layout = "plain" if options.text("load_format") == "dummy" else options.text("qkv_layout")
    full = [layer.attention for layer in card.layers if layer.attention.window is None]
    chunked = (full[0] if full else card.layers[0].attention).num_kv_heads
    return {"plain": {1}, "chunked": {chunked}}.get(layout or "", {1, chunked})


def _unquantised(options: Options, dtype: str) -> Decided[str]:
    """The format of a checkpoint without blocks that is not quantised either."""
    asked = asked_text(options, "quantization")
    if asked is None:
        return rule(dtype, "as --dtype: the checkpoint is not quantised")
    return Decided(dtype, asked.source, f"{asked.reason}: the checkpoint is not quantised")


def _other_blocks(card: ModelCard) -> str:
    rows, columns = card.weight_block
    return f"the fp8 kernels compute blocks of {BLOCK}x{BLOCK}, and the checkpoint has {rows}x{columns}"


def _kept(problem: str | None, dtype: str) -> Decided[str]:
    if problem is None:
        return from_model(FP8, "the checkpoint's fp8 blocks, kept as they are")
    return rule(dtype, f"dequantised while loading: {problem}")


def _refuse(
    problem: str | None, card: ModelCard, options: Options, world: World, machine: str | None
) -> None:
    if problem is None:
        return
    alternatives = ["--quantization auto", "--quantization none"]
    if machine is not None:
        alternatives.append(f"--kernels {REFERENCE}")
    tp = world.tp_size.value
    if machine is None:
        fitting = [
            size
            for size in divisors(tp)
            if attention_problem(card, options, size) is None and mlp_problem(card, size) is None
        ]
        alternatives[:0] = [f"--attn-dp-size {tp // size}" for size in reversed(fitting)]
    raise Refusal(option="--quantization", given="fp8", rule=problem, alternatives=alternatives)
