"""Clients that wrap the API: litellm, langchain-openai, llm. Skipped where they are not installed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.clients.conftest import MESSAGES, TOOL, WEATHER
from tests.e2e.processes import Served, environment

MISSING = "not installed; pip install 'interlock[clients]'"


@pytest.fixture(scope="module")
def litellm_call(served: Served) -> Any:
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm", reason=f"litellm is {MISSING}")
    target = {"model": "hosted_vllm/tiny-random", "api_base": served.url + "/v1", "api_key": "none"}

    def ask(**fields: Any) -> Any:
        return litellm.completion(**target, messages=MESSAGES, num_retries=0, **fields)

    return ask


@pytest.fixture(scope="module")
def langchain_chat(served: Served) -> Any:
    module = pytest.importorskip("langchain_openai", reason=f"langchain-openai is {MISSING}")
    return module.ChatOpenAI(
        model="tiny-random",
        base_url=served.url + "/v1",
        api_key="none",
        max_tokens=300,
        max_retries=0,
        seed=4,
    )


@pytest.fixture(scope="module")
def llm_home(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("llm", reason=f"llm is {MISSING}")
    home = tmp_path_factory.mktemp("llm")
    entry = f"- model_id: interlock\n  model_name: tiny-random\n  api_base: {served.url}/v1\n"
    (home / "extra-openai-models.yaml").write_text(entry)
    return home


class TestLitellm:
    def test_whole_and_stream(self, litellm_call: Any) -> None:
        fields = {"max_tokens": 16, "temperature": 0}
        whole = litellm_call(**fields).choices[0].message.content or ""
        parts = [chunk.choices[0].delta.content or "" for chunk in litellm_call(**fields, stream=True)]
        assert "".join(parts) == whole

    def test_tools(self, litellm_call: Any) -> None:
        answer = litellm_call(
            tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=400, seed=5
        )
        (tool_call,) = answer.choices[0].message.tool_calls
        jsonschema.validate(json.loads(tool_call.function.arguments), WEATHER)

    def test_json_schema(self, litellm_call: Any) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER, "strict": True}}
        answer = litellm_call(response_format=form, max_tokens=400, seed=2)
        jsonschema.validate(json.loads(answer.choices[0].message.content), WEATHER)


class TestLangchain:
    def test_whole_stream_and_async(self, langchain_chat: Any) -> None:
        greedy = langchain_chat.bind(temperature=0, max_tokens=16)
        whole = greedy.invoke("Signal?").content
        assert "".join(str(chunk.content) for chunk in greedy.stream("Signal?")) == whole
        assert asyncio.run(greedy.ainvoke("Signal?")).content == whole

    def test_tools(self, langchain_chat: Any) -> None:
        answer = langchain_chat.bind_tools([TOOL], tool_choice="get_weather").invoke("Weather in Rome?")
        (call,) = answer.tool_calls
        assert call["name"] == "get_weather"
        jsonschema.validate(call["args"], WEATHER)

    def test_structured_output(self, langchain_chat: Any) -> None:
        schema = {"title": "Weather", **WEATHER}
        answer = langchain_chat.with_structured_output(schema, method="json_schema").invoke(
            "Weather in Rome?"
        )
        jsonschema.validate(answer, WEATHER)


class TestLlm:
    @pytest.mark.parametrize("flags", [(), ("--no-stream",)])
    def test_the_command(self, llm_home: Path, flags: tuple[str, ...]) -> None:
        arguments = ["-m", "interlock", "Signal?", "-o", "temperature", "0", "-o", "max_tokens", "8", *flags]
        done = subprocess.run(
            [sys.executable, "-m", "llm", *arguments],
            env={**environment(), "LLM_USER_PATH": str(llm_home), "OPENAI_API_KEY": "none"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
