"""Which experts the tokens of a run chose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from interlock.moe.routing import Router
from tests.harness import Harness


@contextmanager
def recorded_routes(harness: Harness) -> Iterator[list[torch.Tensor]]:
    """Inside, the expert ids int64 [n, k] of every MoE layer of every step are appended to the list."""
    routes: list[torch.Tensor] = []
    original = Router.route

    def route(self: Router, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        routes.append(result.ids.clone())
        return result

    with mock.patch.object(Router, "route", route):
        yield routes
