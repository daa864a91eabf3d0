"""Copies of the package that compile kernels at once, into the cache on disk that all of them share."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

MOST = 6
"""Kernels compiled at once, and no more than this process has cores: each copy keeps 32 MiB on the card for a
library that it does not call."""

Library = TypeVar("Library")


class Copies(Generic[Library]):
    """Threads with a copy each, made when it is first needed.

    Args:
        load: another copy. What it raises is logged, and so is what a product raises: whoever asked for them
            meets that himself, one product after the other.
    """

    def __init__(self, load: Callable[[], Library]) -> None:
        self._load = load
        most = min(MOST, len(os.sched_getaffinity(0)))
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="deep-gemm-copy")
        self._own = threading.local()

    def fill_cache(self, products: Iterable[Callable[[Library], None]]) -> list[Future[None]]:
        """Have each product called by a copy; the futures never raise."""
        return [self._threads.submit(self._fill, product) for product in products]

    def _fill(self, product: Callable[[Library], None]) -> None:
        try:
            if not hasattr(self._own, "library"):
                self._own.library = self._load()
            product(self._own.library)
        except Exception as problem:
            logger.info(
                "deep_gemm: kernels are compiled one after the other, since a copy failed: %s", problem
            )
