"""A model cut to its first layers, for benchmarks."""

from __future__ import annotations

import hashlib

import msgspec

from interlock.errors import Refusal
from interlock.options import Options
from interlock.plan.card import ModelCard
from interlock.plan.decided import Decided, asked_integer, from_model


def cut_card(options: Options, card: ModelCard) -> tuple[ModelCard, Decided[int]]:
    """The card of the layers that are built, and their number. A cut model has a config hash of its own."""
    asked = asked_integer(options, "num_hidden_layers")
    if asked is None:
        return card, from_model(card.num_layers, "config.json")
    if asked.value > card.num_layers:
        raise Refusal(
            option="--num-hidden-layers",
            given=asked.value,
            rule=f"the model has {card.num_layers} layers",
            alternatives=[f"--num-hidden-layers {card.num_layers}"],
        )
    if asked.value < card.num_layers and options.text("load_format") != "dummy":
        raise Refusal(
            option="--num-hidden-layers",
            given=asked.value,
            rule=f"a checkpoint of {card.num_layers} layers is served whole; only made-up weights can be cut",
            alternatives=["--load-format dummy", "--num-hidden-layers auto"],
        )
    if asked.value == card.num_layers:
        return card, asked
    from interlock.models.decoder_weights import count_decoder_parameters

    name = f"{card.config_hash} first {asked.value} layers"
    cut = msgspec.structs.replace(
        card, layers=card.layers[: asked.value], config_hash=hashlib.sha256(name.encode()).hexdigest()
    )
    return msgspec.structs.replace(cut, parameters=count_decoder_parameters(cut)), asked
