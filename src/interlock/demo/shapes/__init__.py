"""Shapes of public models, without weights, for benchmarks: ``shape:mimo-v2-flash --load-format dummy``.

Each folder holds the ``config.json`` of one model as its publisher describes it (widths, layer pattern,
experts, quantisation). No torch here.
"""

from __future__ import annotations

from pathlib import Path

from interlock.errors import Refusal
from interlock.options import Options

PREFIX = "shape:"


def shape_names() -> tuple[str, ...]:
    """Names that follow ``shape:``."""
    return tuple(sorted(path.parent.name for path in Path(__file__).parent.glob("*/config.json")))


def shape_folder(model: str) -> Path | None:
    """The folder of ``shape:NAME``; None for other models.

    Raises:
        Refusal: there is no such shape.
    """
    if not model.startswith(PREFIX):
        return None
    name = model.removeprefix(PREFIX)
    if name not in shape_names():
        known = ", ".join(PREFIX + each for each in shape_names())
        raise Refusal(option="MODEL", given=model, rule=f"is none of {known}")
    return Path(__file__).parent / name


def refuse_weights_of_shape(model: str, options: Options) -> None:
    """A shape has no weights to read.

    Raises:
        Refusal: ``model`` is a shape, and ``options`` do not ask for dummy weights.
    """
    given = options.text("load_format")
    if model.startswith(PREFIX) and given != "dummy":
        raise Refusal(
            option="--load-format",
            given=given,
            rule=f"{model} is a configuration without weights",
            alternatives=["--load-format dummy"],
        )
