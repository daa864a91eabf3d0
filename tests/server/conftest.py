from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI

from interlock.demo.tiny_tokenizer import tiny_tokenizer, tiny_tokenizer_config
from interlock.server.app import create_app
from interlock.server.settings import ServerSettings
from interlock.tokenizer import Tokenizer, load_tokenizer
from tests.server.fake_engine import VOCAB, FakeEngine
from tests.server.live import live_server


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(VOCAB).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tiny_tokenizer_config(4096)))
    return load_tokenizer(folder)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def settings() -> ServerSettings:
    return ServerSettings(model_names=("tiny",))


@pytest.fixture
def app(engine: FakeEngine, tokenizer: Tokenizer, settings: ServerSettings) -> FastAPI:
    return create_app(engine, tokenizer, settings)


@pytest.fixture
def base_url(app: FastAPI) -> Iterator[str]:
    with live_server(app) as url:
        yield url


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url + "/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture
def http(base_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=base_url, timeout=20) as client:
        yield client


Post = Callable[..., httpx.Response]


@pytest.fixture
def complete(http: httpx.Client) -> Post:
    """POST /v1/completions with model and prompt filled in."""

    def post(**fields: Any) -> httpx.Response:
        return http.post("/v1/completions", json={"model": "tiny", "prompt": "Hello", **fields})

    return post


@pytest.fixture
def chat(http: httpx.Client) -> Post:
    """POST /v1/chat/completions with model and messages filled in."""

    def post(**fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "Hello"}]
        return http.post("/v1/chat/completions", json={"model": "tiny", "messages": messages, **fields})

    return post


@pytest.fixture(params=["completions", "chat"])
def either(request: pytest.FixtureRequest) -> Post:
    """Both endpoints in turn."""
    return request.getfixturevalue("complete" if request.param == "completions" else "chat")
