"""Changes to the logits of single rows before temperature: penalties, bias, forbidden and forced tokens."""

from __future__ import annotations

import torch

from interlock.engine.request import Request
from interlock.engine.token_counts import TokenCounts


def adjust_row(row: torch.Tensor, request: Request) -> None:
    """Change the float32 logits [V] of one request in place: penalties, then bias, then ``min_tokens``;
    a forced token overrules them all.

    As OpenAI and vLLM define them: the repetition penalty divides positive logits (multiplies negative
    ones) of tokens in prompt or output; frequency and presence penalties count the output only.
    """
    params = request.params
    if request.num_generated < len(params.forced_token_ids):
        row.fill_(-torch.inf)
        row[params.forced_token_ids[request.num_generated]] = 0.0
        return
    if params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty:
        _penalise(row, request)
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), dtype=torch.int64, device=row.device)
        row[ids] += torch.tensor(list(params.logit_bias.values()), dtype=row.dtype, device=row.device)
    if request.num_generated < params.min_tokens:
        stops = [token for token in request.stop_ids if 0 <= token < len(row)]
        row[torch.tensor(stops, dtype=torch.int64, device=row.device)] = -torch.inf


def _penalise(row: torch.Tensor, request: Request) -> None:
    params = request.params
    if request.token_counts is None:
        request.token_counts = TokenCounts()
    counts = request.token_counts
    counts.update(request.tokens, request.prompt_len)
    ids = torch.from_numpy(counts.ids).to(row.device)
    generated = torch.from_numpy(counts.generated).to(row.device)
    values = row[ids]
    if params.repetition_penalty != 1.0:
        factor = params.repetition_penalty
        values = torch.where(values > 0, values / factor, values * factor)
    values = values - params.frequency_penalty * generated - params.presence_penalty * (generated > 0)
    row[ids] = values
