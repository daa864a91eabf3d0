from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from interlock.demo.tiny_tokenizer import tiny_tokenizer, tiny_tokenizer_config
from interlock.server.app import create_app
from interlock.server.settings import ServerSettings
from interlock.tokenizer import Tokenizer, load_tokenizer
from tests.server.fake_engine import VOCAB, FakeEngine, fake_plan
from tests.server.live import live_server


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(VOCAB).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tiny_tokenizer_config(4096)))
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return load_tokenizer(tokenizer_folder)


@pytest.fixture(scope="session")
def shared_engine(tokenizer_folder: Path) -> FakeEngine:
    return FakeEngine(plan=fake_plan(model_path=str(tokenizer_folder)))


@pytest.fixture(scope="session")
def base_url(shared_engine: FakeEngine, tokenizer: Tokenizer) -> Iterator[str]:
    """One server with default settings for all tests."""
    with live_server(create_app(shared_engine, tokenizer, ServerSettings(model_names=("tiny",)))) as url:
        yield url


@pytest.fixture
def engine(shared_engine: FakeEngine) -> FakeEngine:
    """The engine behind ``base_url``, as new."""
    shared_engine.reset()
    return shared_engine


Serve = Callable[..., tuple[FakeEngine, httpx.Client]]


@pytest.fixture
def serve(tokenizer: Tokenizer, tokenizer_folder: Path) -> Iterator[Serve]:
    """Starts a server of one's own: ``serve(engine, **settings)`` gives the engine and an HTTP client."""
    with ExitStack() as stack:

        def start(engine: FakeEngine | None = None, **settings: Any) -> tuple[FakeEngine, httpx.Client]:
            engine = engine or FakeEngine()
            engine.plan = msgspec.structs.replace(engine.plan, model_path=str(tokenizer_folder))
            app = create_app(engine, tokenizer, ServerSettings(**{"model_names": ("tiny",), **settings}))
            url = stack.enter_context(live_server(app))
            return engine, stack.enter_context(httpx.Client(base_url=url, timeout=20))

        yield start


@pytest.fixture
def client(base_url: str, engine: FakeEngine) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url + "/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture
def http(base_url: str, engine: FakeEngine) -> Iterator[httpx.Client]:
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
