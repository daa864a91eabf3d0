"""What a rehearsal takes for the choice of experts. The kernels: ``test_triton_gpu.py``."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed: torch's CPU builds bring none")

from interlock.kernels.triton.router import spread
from interlock.moe.placement import place


@given(tokens=st.integers(1, 70), experts=st.integers(1, 400), k=st.integers(1, 8), ranks=st.integers(1, 16))
def test_a_rehearsal_sends_something_to_every_rank(tokens: int, experts: int, k: int, ranks: int) -> None:
    k, ranks = min(k, experts), min(ranks, experts)
    ids = spread(tokens, k, experts)
    assert ids.shape == (tokens, k)
    assert int(ids.min()) >= 0
    assert int(ids.max()) < experts
    assert bool((ids.diff(dim=1) > 0).all())
    if tokens * k >= 2 * ranks:
        for held in place(experts, ranks):
            assert bool(((ids >= held.start) & (ids < held.stop)).any())
