"""A request whose rows become NaN fails alone: its companions keep every bit, also in the pages it leaves."""

from __future__ import annotations

import concurrent.futures
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.e2e.processes import BASE, READY, Served, running
from tests.tiny import flash, tiny_folder

POISON, HARMLESS = 300, 301
MODES = [(), ("--tp-size", "2", "--moe-a2a-backend", "shared_memory", "--deterministic")]
COMPANIONS = [[7 + 5 * row + column for column in range(20 + row)] for row in range(4)]


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in which the embedding of one token is NaN."""
    folder = tmp_path_factory.mktemp("poisoned") / "model"
    shutil.copytree(tiny_folder(flash()), folder)
    (path,) = folder.glob("*.safetensors")
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    embedding = tensors["model.embed_tokens.weight"].clone()
    embedding[POISON] = torch.nan
    tensors["model.embed_tokens.weight"] = embedding
    save_file(tensors, path, metadata=metadata)
    return folder


@pytest.fixture(scope="module", params=MODES, ids=" ".join)
def served(poisoned: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    flags = ("--port", "0", "--no-prefix-cache", "--served-model-name", "m", *request.param)
    with running(["-m", "interlock", "serve", str(poisoned), *BASE, *flags]) as process:
        yield Served(process, process.wait_for(READY)[1])


def ask(served: Served, prompt: list[int], tokens: int) -> Any:
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 2}
    body["logit_bias"] = {str(POISON): -100}
    return served.post("/v1/completions", {**body, "ignore_eos": True, "echo": True})


def together(served: Served, guest: int) -> tuple[list[Any], list[Any]]:
    """Companions' answers in full, and those of guests that join and leave while they run."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        companions = [pool.submit(ask, served, prompt, 60) for prompt in COMPANIONS]
        guests = [pool.submit(ask, served, [9] * length + [guest] * 9, 5) for length in (0, 3, 17, 40)]
        answered = [future.result().raise_for_status().json()["choices"][0] for future in companions]
        return answered, [future.result() for future in guests]


def test_companions_of_a_request_with_nan_keep_their_bits(served: Served) -> None:
    alone = [ask(served, prompt, 60).raise_for_status().json()["choices"][0] for prompt in COMPANIONS]
    fine, harmless = together(served, HARMLESS)
    assert [guest.status_code for guest in harmless] == [200] * 4
    beside_nan, failed = together(served, POISON)
    for guest in failed:
        assert guest.status_code == 500, guest.text
        assert "NaN" in guest.json()["error"]["message"], guest.text
    assert fine == alone
    assert beside_nan == alone
    after, _ = together(served, HARMLESS)
    assert after == alone
    assert served.get("/health").status_code == 200
