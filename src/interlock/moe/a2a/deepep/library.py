"""Importing ``deep_ep``, and running its calls beside torch's deterministic fills, which it refuses."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from interlock.errors import StartupError
from interlock.moe.a2a.deepep.package import how_to_install


def load_library(flag: str, wanted: str, advice: Callable[[str], str] | None = None) -> Any:
    """The module ``deep_ep``, which must have the class ``wanted`` and take int64 expert ids.

    Args:
        advice: what to do about an error's text.

    Raises:
        StartupError: it cannot be imported here, or is of another generation.
    """
    try:
        library: Any = importlib.import_module("deep_ep")
    except Exception as error:  # the package asserts on import, and a broken build raises what it likes
        first = (str(error) or type(error).__name__).splitlines()[0]
        way_out = advice(str(error)) if advice else how_to_install()
        raise StartupError(f"{flag}: deep_ep cannot be imported: {first}. {way_out}") from error
    if not hasattr(library, wanted):
        version = getattr(library, "__version__", "of an unknown version")
        raise StartupError(f"{flag}: deep_ep {version} has no {wanted}: {how_to_install()}")
    if library.topk_idx_t != torch.int64:
        raise StartupError(
            f"{flag}: deep_ep was built for {library.topk_idx_t} expert ids, and Interlock sends "
            "torch.int64: build it without EP_NUM_TOPK_IDX_BITS"
        )
    return library


@contextmanager
def closed_to_torch_fills() -> Iterator[None]:
    """Without torch's filling of uninitialised memory, beside which the library refuses to run."""
    settings: Any = torch.utils.deterministic
    filling = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = filling
