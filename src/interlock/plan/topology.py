"""Ranks: how the world is cut for attention and for experts, and what does not fit.

Legend: tp ranks in the world, ep ranks that share the experts out, dp attention replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from interlock.errors import Refusal
from interlock.options import Options
from interlock.plan.card import ModelCard
from interlock.plan.decided import Decided, asked_integer, asked_text, integer, rule


@dataclass(frozen=True, slots=True)
class World:
    """Ranks and machines. ``local_ranks`` run on one machine, on ``local_gpus`` where the device is a GPU."""

    tp_size: Decided[int]
    attn_dp_size: Decided[int]
    nnodes: Decided[int]
    node_rank: Decided[int]
    dist_init: Decided[str]
    ranks_per_gpu: Decided[int]

    def items(self) -> dict[str, Decided[Any]]:
        """Plan items."""
        return {
            "tp_size": self.tp_size,
            "attn_dp_size": self.attn_dp_size,
            "nnodes": self.nnodes,
            "node_rank": self.node_rank,
            "dist_init": self.dist_init,
            "ranks_per_gpu": self.ranks_per_gpu,
        }

    @property
    def local_gpus(self) -> int:
        return self.local_ranks // self.ranks_per_gpu.value

    @property
    def local_ranks(self) -> int:
        return self.tp_size.value // self.nnodes.value

    @property
    def attn_tp_size(self) -> int:
        return self.tp_size.value // self.attn_dp_size.value


def divisors(number: int) -> list[int]:
    """Ascending divisors of a positive number."""
    return [size for size in range(1, number + 1) if number % size == 0]


def decide_world(options: Options, card: ModelCard) -> World:
    """The world, with every size that does not divide refused."""
    tp = integer(options, "tp_size")
    dp = asked_integer(options, "attn_dp_size") or _attn_dp(card, tp.value)
    nnodes, node_rank = integer(options, "nnodes"), integer(options, "node_rank")
    if tp.value % nnodes.value:
        raise Refusal(
            option="--nnodes",
            given=nnodes.value,
            rule=f"--tp-size {tp.value} ranks cannot be spread evenly over {nnodes.value} machines",
            alternatives=[f"--nnodes {size}" for size in divisors(tp.value)],
        )
    if node_rank.value >= nnodes.value:
        raise Refusal(
            option="--node-rank",
            given=node_rank.value,
            rule=f"machines are numbered 0 to {nnodes.value - 1} (--nnodes {nnodes.value})",
            alternatives=[f"--node-rank {nnodes.value - 1}", f"--nnodes {node_rank.value + 1}"],
        )
    if tp.value % dp.value:
        raise Refusal(
            option="--attn-dp-size",
            given=dp.value,
            rule=f"attention TP is tp-size / attn-dp-size = {tp.value} / {dp.value}, which is not whole",
            alternatives=[f"--attn-dp-size {size}" for size in divisors(tp.value)],
        )
    sharing = _ranks_per_gpu(options, tp.value // nnodes.value)
    world = World(tp, dp, nnodes, node_rank, _dist_init(options, nnodes.value), sharing)
    _refuse_attention(card, world)
    return world


def _ranks_per_gpu(options: Options, local_ranks: int) -> Decided[int]:
    given = integer(options, "ranks_per_gpu")
    if local_ranks % given.value:
        raise Refusal(
            option="--ranks-per-gpu",
            given=given.value,
            rule=f"{local_ranks} ranks of a machine cannot be spread evenly, {given.value} to a GPU",
            alternatives=[f"--ranks-per-gpu {size}" for size in reversed(divisors(local_ranks))],
        )
    return given


def _dist_init(options: Options, nnodes: int) -> Decided[str]:
    given = asked_text(options, "dist_init")
    if given is None:
        if nnodes > 1:
            raise Refusal(
                option="--dist-init",
                given="auto",
                rule=f"{nnodes} machines need one address (host:port) of the machine with --node-rank 0",
                alternatives=["--dist-init HOST:29500"],
            )
        return rule("", "one machine: a free local port is taken")
    host, _, port = given.value.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise Refusal(
            option="--dist-init",
            given=given.value,
            rule="is not host:port",
            alternatives=[f"--dist-init {given.value.split(':')[0]}:29500"],
        )
    return given


def _attn_dp(card: ModelCard, tp: int) -> Decided[int]:
    """The fewest attention replicas whose heads can be shared out."""
    problem = attention_problem(card, tp)
    if problem is None:
        return rule(1, f"the attention can be sliced over all {tp} ranks")
    replicas = next(size for size in divisors(tp) if attention_problem(card, tp // size) is None)
    return rule(replicas, f"the fewest that fit: {problem}")


def _refuse_attention(card: ModelCard, world: World) -> None:
    size, tp = world.attn_tp_size, world.tp_size.value
    problem = attention_problem(card, size)
    if problem is None:
        return
    fitting = [other for other in divisors(tp) if attention_problem(card, other) is None]
    raise Refusal(
        option="--attn-dp-size",
        given=world.attn_dp_size.value,
        rule=f"{problem} (attention TP is --tp-size {tp} / {world.attn_dp_size.value} = {size})",
        alternatives=[f"--attn-dp-size {tp // other}" for other in reversed(fitting)],
    )


def attention_problem(card: ModelCard, size: int) -> str | None:
    """Why the heads cannot be shared out over ``size`` ranks, or None. (Dense layers and the vocabulary are
    padded where they must be.)"""
    for attention in {layer.attention for layer in card.layers}:
        heads, kv_heads = attention.num_heads, attention.num_kv_heads
        if heads % size:
            return f"{heads} attention heads cannot be shared out over {size} ranks"
        if kv_heads % size and size % kv_heads:
            return f"{kv_heads} kv heads can be neither shared out over nor copied evenly to {size} ranks"
    return None


def decide_ep(
    options: Options, card: ModelCard, tp: int, *, exchanges: bool, full_ep: bool, sliced_block: int
) -> Decided[int]:
    """Ranks that share the experts out.

    Args:
        exchanges: the a2a backend moves tokens between the ranks of an EP group.
        full_ep: the a2a backend works with ep_size == tp_size only.
        sliced_block: experts may be sliced at multiples of this many rows (a quantisation block, or 1).
    """
    given = asked_integer(options, "ep_size")
    fitting = [size for size in divisors(tp) if experts_problem(card, tp, size, sliced_block) is None]
    deterministic = options.switch("deterministic")
    if card.experts is None:
        return _without_experts(given)
    if full_ep or deterministic:
        fitting = [size for size in fitting if size == tp]
    elif exchanges and tp > 1:
        fitting = [size for size in fitting if size > 1]
    alternatives = [f"--ep-size {size}" for size in reversed(fitting)]
    if given is not None:
        problem = _given_problem(card, given.value, tp, fitting, sliced_block, deterministic, full_ep)
        if problem:
            raise Refusal(option="--ep-size", given=given.value, rule=problem, alternatives=alternatives)
        return given
    if not fitting:
        raise Refusal(
            option="--tp-size",
            given=tp,
            rule=experts_problem(card, tp, tp, sliced_block) or f"no --ep-size fits {tp} ranks",
            alternatives=[
                f"--tp-size {size}"
                for size in range(tp - 1, 0, -1)
                if experts_problem(card, size, size, sliced_block) is None
            ][:3],
        )
    if deterministic:
        return rule(tp, "--deterministic needs whole experts, so every rank holds its own")
    if exchanges:
        return rule(
            fitting[-1], f"--moe-a2a-backend exchanges tokens: experts over {fitting[-1]} of {tp} ranks"
        )
    reason = "without token exchange, the experts are sliced over all ranks"
    if fitting[0] > 1:
        reason = f"the smallest size whose slices fit: {experts_problem(card, tp, 1, sliced_block)}"
    return rule(fitting[0], reason)


def _without_experts(given: Decided[int] | None) -> Decided[int]:
    if given is not None and given.value != 1:
        raise Refusal(
            option="--ep-size",
            given=given.value,
            rule="this model has no experts to share out",
            alternatives=["--ep-size 1"],
        )
    return given or rule(1, "the model has no experts")


def _given_problem(
    card: ModelCard,
    ep: int,
    tp: int,
    fitting: list[int],
    sliced_block: int,
    deterministic: bool,
    full_ep: bool,
) -> str | None:
    if ep in fitting:
        return None
    problem = experts_problem(card, tp, ep, sliced_block)
    if problem:
        return problem
    if deterministic:
        return f"--deterministic needs whole experts, so ep-size must be tp-size = {tp}"
    if full_ep:
        return f"--moe-a2a-backend spans the world, so ep-size must be tp-size = {tp}"
    return "an EP group of one rank exchanges nothing, so --moe-a2a-backend would have no effect"


def experts_problem(card: ModelCard, tp: int, ep: int, sliced_block: int) -> str | None:
    """Why the experts cannot be laid out as ep groups of slices over tp / ep ranks, or None."""
    if card.experts is None:
        return None
    experts, width = card.experts.num_experts, card.experts.intermediate_size
    if tp % ep:
        return f"tp-size must be a multiple of ep-size; {tp} / {ep} is not whole"
    if experts % ep:
        return f"{experts} experts cannot be shared out evenly over {ep} ranks"
    slices = tp // ep
    if width % slices:
        return f"the expert width {width} cannot be sliced over tp-size / ep-size = {slices} ranks"
    if slices > 1 and (width // slices) % sliced_block:
        return (
            f"the expert width {width} sliced over tp-size / ep-size = {slices} ranks is {width // slices}, "
            f"not a multiple of the checkpoint's quantisation block of {sliced_block}"
        )
    return None
