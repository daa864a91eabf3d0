"""Log-probabilities from llama.cpp through the prebuilt wheel ``xllamacpp`` (CPU, float32).

A completion call returns the top-V log-probabilities of the raw logits for every generated token; a logit
bias of 1e6 on one token forces which one is generated without touching those numbers. Flash attention loses
precision in this build and is off. The library opens a loopback port.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

FORCED_TOKEN = 40


def server(path: Path) -> Any:
    """A llama.cpp server of the GGUF at ``path``, in this process."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.verbosity = 1
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.warmup = 512, 1, False
    params.cpuparams.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return xllamacpp.Server(params)


def prefix_logprobs(
    running: Any, token_ids: Sequence[int], positions: Sequence[int], vocab_size: int
) -> torch.Tensor:
    """float64 [len(positions), V]: one request for the prefix that ends at each position."""
    return torch.cat([forced_logprobs(running, token_ids[: n + 1], 1, vocab_size) for n in positions])


def forced_logprobs(running: Any, prompt: Sequence[int], steps: int, vocab_size: int) -> torch.Tensor:
    """float64 [steps, V]: prefill of ``prompt``, then decoding ``FORCED_TOKEN`` again and again.

    Raises:
        RuntimeError: a step or a value is missing from the answer.
    """
    answer = running.handle_completions(
        {
            "prompt": list(prompt),
            "max_tokens": steps,
            "temperature": 0,
            "n_probs": vocab_size,
            "logprobs": vocab_size,
            "cache_prompt": False,
            "logit_bias": [[FORCED_TOKEN, 1e6]],
        }
    )
    content = answer["choices"][0]["logprobs"]["content"]
    if len(content) != steps:
        raise RuntimeError(f"llama.cpp returned {len(content)} of {steps} steps")
    rows = torch.full((steps, vocab_size), float("nan"), dtype=torch.float64)
    for row, token in zip(rows, content, strict=True):
        for entry in token["top_logprobs"]:
            row[entry["id"]] = entry["logprob"]
    if bool(rows.isnan().any()):
        raise RuntimeError("llama.cpp left values out")
    return rows
