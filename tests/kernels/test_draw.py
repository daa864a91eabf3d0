"""The draw of the GPU's kernels is the draw of torch: on a GPU, or in Triton's interpreter on small rows."""

from __future__ import annotations

import pytest
import torch

from interlock.kernels import torch_draw

triton = pytest.importorskip("triton", reason="Triton is not installed: torch's CPU builds bring none")
INTERPRETS = triton.knobs.runtime.interpret
if not INTERPRETS and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)
DEVICE = "cpu" if INTERPRETS else "cuda"
pytestmark = [] if INTERPRETS else [pytest.mark.gpu]

from interlock.kernels.triton import draw as triton_draw  # noqa: E402

WIDTHS = (97, 2048, 5000) if INTERPRETS else (97, 2048, 5000, 152_576)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 8.0])
def test_the_same_tokens_are_drawn(width: int, spread: float) -> None:
    """Every mix of limits; a third of the tokens is excluded. Rounding may move a draw to a neighbour whose
    share of the total is rounding itself, which these seeds do not meet."""
    generator = torch.Generator().manual_seed(width)
    limits = [
        (t, k, p, m)
        for t in (0.3, 1.0)
        for k in (0, 1, 17, 3000)
        for p in (1.0, 0.9, 0.3)
        for m in (0.0, 0.05)
    ]
    if INTERPRETS:
        limits = limits[::5]
    rows = len(limits)
    logits = torch.randn(rows, width, generator=generator) * spread
    logits[:, : width // 3] = -torch.inf
    columns = torch.tensor(limits, dtype=torch.float64)
    arguments = {
        "temperature": columns[:, 0].float(),
        "top_k": columns[:, 1].long(),
        "top_p": columns[:, 2].contiguous(),
        "min_p": columns[:, 3].contiguous(),
        "uniforms": torch.rand(rows, generator=generator, dtype=torch.float64),
    }
    wanted = torch_draw.draw(logits, **arguments)
    found = triton_draw.draw(logits.to(DEVICE), **{name: each.to(DEVICE) for name, each in arguments.items()})
    assert found.tolist() == wanted.tolist()
    assert bool((logits.gather(1, wanted[:, None]) > -torch.inf).all())
