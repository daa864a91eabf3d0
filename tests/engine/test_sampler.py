"""The sampler against plain numpy formulas, and its independence of batch companions.

Cases G11 (seeds), G12 (bias), G22 (penalties), G24 (nothing allowed) and G26 (raw logprobs) of the public
reports, at the level of the sampler.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.engine.batch import Batch
from interlock.engine.draw import draw_rows
from interlock.engine.messages import AddRequest, SamplingParams
from interlock.engine.penalties import adjust_row
from interlock.engine.philox import philox4x32, uniforms
from interlock.engine.sampler import Sampler
from interlock.engine.scheduler import Scheduler
from interlock.kernels import torch_draw
from tests.engine.simulation import EOS, VOCAB, sim_plan

DRAW_SEED = 12345


def make_batch(*params: dict[str, Any], prompts: list[list[int]] | None = None, drawn: int = 0) -> Batch:
    """A prefill batch of one request for each set of parameters, made by the scheduler itself."""
    scheduler = Scheduler(
        sim_plan(chunked_prefill_size=4096, max_running_requests=64, full_pages=4096),
        draw_seed=lambda: DRAW_SEED,
    )
    for index, given_params in enumerate(params):
        prompt = prompts[index] if prompts else [1, 2, 3]
        sampling = SamplingParams(**given_params)
        message = AddRequest(request_id=str(index), token_ids=tuple(prompt), sampling=sampling)
        assert scheduler.add(message) == []
    batch = scheduler.schedule()
    assert batch is not None
    assert len(batch.requests) == len(params)
    return batch


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


# ---- the generator


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """The known-answer vectors that the authors publish with Random123."""

    def words(values: tuple[int, ...]) -> np.ndarray:
        return np.array(values, dtype=np.uint64)[:, None].repeat(3, axis=1)

    assert philox4x32(words(counter), words(key)).T.tolist() == [list(expected)] * 3


def test_uniforms_are_uniform_and_distinct() -> None:
    """Moments of 100,000 draws over positions and over seeds."""
    count = 100_000
    for seed, position in (
        (np.full(count, 7, np.uint64), np.arange(count)),
        (np.arange(count, dtype=np.uint64), np.full(count, 3)),
    ):
        u = uniforms(seed, position)
        assert len(np.unique(u)) == count
        assert 0 <= u.min() <= u.max() < 1
        assert abs(u.mean() - 0.5) < 0.005
        assert abs(u.var() - 1 / 12) < 0.002
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.02


# ---- truncation and draws against a numpy oracle


def oracle(logits: np.ndarray, params: SamplingParams, top_p: float) -> np.ndarray:
    """Probabilities after temperature, min_p, top_k and top_p, written as their definitions read."""
    x = logits.astype(np.float64) / params.temperature
    p = np.exp(x - x.max())
    p[p < params.min_p * p.max()] = 0
    if params.top_k:
        p[p < np.sort(p)[::-1][min(params.top_k, len(p)) - 1]] = 0
    p /= p.sum()
    if top_p < 1:
        descending = np.sort(p)[::-1]
        enough = int(np.searchsorted(np.cumsum(descending), top_p))
        p[p < descending[min(enough, len(p) - 1)] * (1 - 1e-9)] = 0
    return p / p.sum()


def is_where_the_number_falls(token: int, logits: np.ndarray, params: SamplingParams, position: int) -> bool:
    """Whether the request's uniform number lies on the token's part of the oracle's cumulative distribution.

    A nucleus edge that rounding can move is tried on both sides.
    """
    u = float(uniforms(np.array([params.seed], np.uint64), np.array([position]))[0])
    for nudge in (0, -1e-6, 1e-6):
        p = oracle(logits, params, params.top_p + nudge if params.top_p < 1 else 1.0)
        upper = np.cumsum(p)
        if p[token] > 0 and upper[token] - p[token] - 1e-4 <= u <= upper[token] + 1e-4:
            return True
    return False


@settings(max_examples=80, deadline=None)
@given(
    vocab=st.sampled_from([3, 255, 4096, 9001]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 8.0]),
    temperature=st.floats(0.05, 5),
    top_k=st.sampled_from([0, 1, 2, 17, 300, 9000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 1.0]),
    seed=st.integers(0, 1 << 63),
)
def test_host_and_device_draw_what_the_definitions_say(
    vocab: int, spread: float, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    """Both implementations, on distributions from flat to peaked, with a third of the tokens excluded."""
    params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    batch = make_batch(params)
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed % 1000)) * spread
    logits[0, : vocab // 3] = -torch.inf
    host = int(Sampler().sample(logits, batch).token_ids[0])
    device = int(draw_rows(torch_draw.draw, logits, batch.sampling, np.zeros(1, dtype=np.int64))[0])
    for token in (host, device):
        assert is_where_the_number_falls(token, logits[0].numpy(), SamplingParams(**params), 3)


def test_frequencies_follow_the_distribution() -> None:
    """A chi-square of 10,000 draws over ten tokens stays below its 99.99 % quantile."""
    logits = torch.full((64, VOCAB), -torch.inf)
    logits[:, :10] = torch.linspace(0, 2, 10)
    counts = np.zeros(10)
    for start in range(160):
        batch = make_batch(*({"seed": start * 64 + i} for i in range(64)))
        np.add.at(counts, Sampler().sample(logits, batch).token_ids, 1)
    p = np.exp(np.linspace(0, 2, 10))
    due = p / p.sum() * counts.sum()
    assert ((counts - due) ** 2 / due).sum() < 33.7


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1, [5, 9]] = 2.0
    batch = make_batch({"temperature": 0.0}, {"temperature": 0.0})
    assert batch.sampling.plain_greedy
    assert Sampler().sample(logits, batch).token_ids.tolist() == [0, 5]


# ---- independence of companions


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_companions_do_not_change_a_row(data: st.DataObject) -> None:
    """G11: any mixture of requests, alone or together in any order: same tokens, bit-equal logprobs."""
    kinds = st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.7, 1.0, 2.0]),
            "top_k": st.sampled_from([0, 1, 5, VOCAB]),
            "top_p": st.sampled_from([1.0, 0.9, 0.3]),
            "min_p": st.sampled_from([0.0, 0.1]),
            "repetition_penalty": st.sampled_from([1.0, 1.3]),
            "frequency_penalty": st.sampled_from([0.0, 0.5]),
            "logit_bias": st.sampled_from([{}, {3: 5.0}]),
            "min_tokens": st.sampled_from([0, 2]),
            "logprobs": st.sampled_from([None, 0, 3]),
            "seed": st.integers(-5, 1 << 64),
        }
    )
    params = data.draw(st.lists(kinds, min_size=2, max_size=8))
    logits = random_logits(len(params), 3, vocab=300)
    together = Sampler().sample(logits, make_batch(*params))
    for row, alone in enumerate(params):
        single = Sampler().sample(logits[row : row + 1].clone(), make_batch(alone))
        assert single.token_ids[0] == together.token_ids[row]
        assert single.logprobs.get(0) == together.logprobs.get(row)


def test_unseeded_requests_differ_and_seeds_reproduce() -> None:
    """G11: five unseeded requests are not all equal; seed 7 gives the same token beside others."""
    logits = torch.zeros(6, 5000)
    scheduler = Scheduler(sim_plan(max_running_requests=8))
    for index in range(6):
        params = SamplingParams(seed=7 if index == 5 else None)
        scheduler.add(AddRequest(request_id=str(index), token_ids=(1, 2, 3), sampling=params))
    batch = scheduler.schedule()
    assert batch is not None
    tokens = Sampler().sample(logits, batch).token_ids
    assert len(set(tokens[:5].tolist())) > 1
    assert tokens[5] == Sampler().sample(logits[:1], make_batch({"seed": 7})).token_ids[0]


# ---- adjustments


def test_penalties_are_the_formula() -> None:
    """G22: repetition over prompt and output, frequency and presence over the output only."""
    batch = make_batch(
        {"temperature": 0.0, "repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 0.25},
        {"temperature": 0.0},
        prompts=[[4, 4, 9], [0]],
    )
    request = batch.requests[0]
    table = request._table
    assert table is not None
    table.tokens[request.slot, 3:6] = [9, 7, 7]
    table.length[request.slot] = 6
    logits = random_logits(2, 5)
    before = logits.clone()
    wanted = logits[0].double().clone()
    for token, generated in ((4, 0), (9, 1), (7, 2)):
        value = wanted[token]
        value = value / 2 if value > 0 else value * 2
        wanted[token] = value - 0.5 * generated - 0.25 * (generated > 0)
    row = logits[0].clone()
    adjust_row(row, request)
    torch.testing.assert_close(row.double(), wanted, atol=1e-6, rtol=0)
    Sampler().sample(logits, batch)
    assert torch.equal(logits, before)


def test_frequency_penalty_switches_token_when_it_should() -> None:
    """G22: margin 3 and penalty 2.0: the favourite is left after its second appearance."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = 3.0
    batch = make_batch({"temperature": 0.0, "frequency_penalty": 2.0}, prompts=[[0, 0]])
    request = batch.requests[0]
    table = request._table
    assert table is not None
    drawn = []
    for _ in range(3):
        token = int(Sampler().sample(logits, batch).token_ids[0])
        drawn.append(token)
        table.tokens[request.slot, table.length[request.slot]] = token
        table.length[request.slot] += 1
    assert drawn == [5, 5, 0]


def test_bias_decides_only_its_own_row() -> None:
    """G12: +100 forces a token, -100 forbids it, and the neighbour is unaffected."""
    logits = random_logits(3, 8)
    best = int(logits[1].argmax())
    batch = make_batch(
        {"temperature": 1.0, "logit_bias": {5: 100.0}},
        {"temperature": 0.0, "logit_bias": {best: -100.0}},
        {"temperature": 0.0},
    )
    tokens = Sampler().sample(logits, batch).token_ids
    assert tokens[0] == 5
    assert tokens[1] == logits[1].topk(2).indices[1]
    assert tokens[2] == logits[2].argmax()


def test_min_tokens_forbids_end_tokens() -> None:
    """Until min_tokens, neither the end of sequence nor a stop token can be drawn."""
    logits = torch.zeros(2, VOCAB)
    logits[:, EOS] = 50.0
    logits[:, 4] = 40.0
    params = {"temperature": 0.0, "stop_token_ids": (4, 10**6)}
    batch = make_batch({**params, "min_tokens": 1}, params)
    assert Sampler().sample(logits, batch).token_ids.tolist() == [0, EOS]


def test_mask_limits_and_an_empty_mask_is_an_error_of_its_row() -> None:
    """G24: a row that may take nothing gets an error; companions equal a clean run."""
    logits = random_logits(4, 2)
    params = [{"temperature": 1.0, "seed": 1, "logprobs": 2}, {"temperature": 0.0}] * 2
    batch = make_batch(*params)
    clean = Sampler().sample(logits, batch)
    allowed = torch.zeros(VOCAB, dtype=torch.bool)
    only = allowed.clone()
    only[33] = True
    masked = Sampler().sample(logits, batch, masks={0: allowed, 1: only})
    assert set(masked.errors) == {0}
    assert "no token is allowed" in masked.errors[0]
    assert masked.token_ids.tolist() == [-1, 33, *clean.token_ids[2:].tolist()]
    assert masked.logprobs[2] == clean.logprobs[2]


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("plain", [True, False])
def test_a_bad_row_disturbs_nobody(poison: float, plain: bool) -> None:
    params = {"temperature": 0.0} if plain else {"temperature": 1.0, "seed": 3, "top_p": 0.9, "logprobs": 1}
    logits = random_logits(3, 4)
    batch = make_batch(params, params, params)
    assert batch.sampling.plain_greedy is plain
    clean = Sampler().sample(logits, batch)
    bad = logits.clone()
    bad[1, 17] = poison
    result = Sampler().sample(bad, batch)
    assert set(result.errors) == {1}
    assert "not finite" in result.errors[1]
    assert result.token_ids.tolist() == [clean.token_ids[0], -1, clean.token_ids[2]]
    assert 1 not in result.logprobs
    assert all(result.logprobs.get(row) == clean.logprobs.get(row) for row in (0, 2))


# ---- log-probabilities


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.3, "seed": 1},
        {"temperature": 2.0, "top_p": 0.1, "seed": 2},
        {"temperature": 0.0, "logit_bias": {7: 100.0}, "presence_penalty": 1.0},
    ],
)
def test_logprobs_are_raw_whatever_the_parameters(params: dict[str, Any]) -> None:
    """G26: the same definition for every way of choosing, in a batch where others want none."""
    logits = random_logits(2, 6)
    batch = make_batch({**params, "logprobs": 4}, {"temperature": 1.0})
    result = Sampler().sample(logits, batch)
    assert set(result.logprobs) == {0}
    entry = result.logprobs[0]
    exact = torch.log_softmax(logits[0].double(), 0)
    assert entry.token_id == result.token_ids[0]
    assert entry.logprob == pytest.approx(float(exact[entry.token_id]), abs=1e-5)
    best = exact.topk(4)
    assert [token for token, _ in entry.top] == best.indices.tolist()
    assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_prompt_logprobs_come_in_blocks_and_match_the_oracle() -> None:
    """Two of three requests want them; logits are never computed for more than one block of rows."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, size=n).tolist() for n in (100, 7, 60)]
    batch = make_batch(
        {"temperature": 0.0, "prompt_logprobs": 2},
        {"temperature": 0.0},
        {"temperature": 0.0, "prompt_logprobs": 0},
        prompts=prompts,
    )
    head = torch.randn(8, VOCAB)
    hidden = torch.randn(len(batch.arrays.token_ids), 8)
    sizes = []

    def logits(rows: torch.Tensor) -> torch.Tensor:
        sizes.append(len(rows))
        return rows @ head

    result = Sampler().sample_step(batch, hidden, logits).result()
    assert sizes == [64, 64, 99 + 59 - 128, 3]
    exact = torch.log_softmax(hidden.double() @ head.double(), -1)
    assert [len(entries) for entries in result.prompt_logprobs] == [99, 59]
    for entries, prompt, start in zip(
        result.prompt_logprobs, (prompts[0], prompts[2]), (0, 107), strict=True
    ):
        for index, entry in enumerate(entries):
            assert entry.token_id == prompt[index + 1]
            assert entry.logprob == pytest.approx(float(exact[start + index, entry.token_id]), abs=1e-4)
    assert len(result.prompt_logprobs[0][0].top) == 2
    assert result.prompt_logprobs[1][0].top == ()
    assert result.token_ids.tolist() == (hidden[batch.arrays.sample_rows] @ head).argmax(-1).tolist()
