"""Checkpoint folder -> ModelCard, by the architecture its config.json names. No torch here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from interlock.errors import CheckpointError
from interlock.models.registry import ModelFamily, model_families
from interlock.plan.card import ModelCard

MAX_CONFIG_BYTES = 16 << 20


def read_config(folder: str | Path) -> dict[str, Any]:
    """The parsed config.json of a folder.

    Raises:
        CheckpointError: no folder, no file, or not a JSON object.
    """
    folder = Path(folder)
    path = folder / "config.json"
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give the folder of a checkpoint (with config.json)")
    if not path.is_file():
        raise CheckpointError(f"{folder} has no config.json; give the folder of a Hugging Face checkpoint")
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise CheckpointError(f"{path} has {path.stat().st_size} bytes; that is no model configuration")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds a {type(config).__name__}; expected a JSON object")
    return config


def find_family(config: dict[str, Any]) -> ModelFamily:
    """The family that serves ``architectures[0]``; exact match only, plugins included.

    Raises:
        CheckpointError: no architecture, or one that no family serves; lists those that are served.
    """
    architectures = config.get("architectures")
    families = model_families().values()
    served = ", ".join(f"{name} ({family.name})" for family in families for name in family.architectures)
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise CheckpointError(f"config.json: 'architectures' is {architectures!r}; expected one of {served}")
    for family in families:
        if architectures[0] in family.architectures:
            return family
    raise CheckpointError(
        f"config.json: architecture {architectures[0]!r} is not supported; served: {served}"
    )


def read_model_card(folder: str | Path) -> ModelCard:
    """Read the card of the checkpoint in ``folder``.

    Raises:
        CheckpointError: the folder or its config.json cannot be used; the message names what is wrong.
    """
    config = read_config(folder)
    return find_family(config).read_card(config)
