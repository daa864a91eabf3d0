"""Reasoning apart from the answer: formats, prompts that begin inside it, and any cut of the text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.server.chat_output import ChatOutput, OutputFormat
from interlock.server.reasoning import REASONING_FORMATS, THINK, ReasoningSplitter
from interlock.server.tool_parsers import TOOL_PARSERS
from tests.server.test_tool_parsers import TEXTS, TOOLS, pieces


def split(parts: Sequence[str], *, inside: bool, name: str = "qwen3") -> tuple[str, str]:
    splitter = ReasoningSplitter(REASONING_FORMATS[name], starts_inside=inside)
    done = [*(splitter.feed(part) for part in parts), splitter.finish()]
    return "".join(each.reasoning for each in done), "".join(each.content for each in done)


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>\nwhy\n</think>\n\nbecause", False, ("why", "because")),
        ("why\n</think>\n\nbecause", True, ("why", "because")),
        ("\n<think>why</think>because ", False, ("why", "because ")),
        (" plain <think>no</think>", False, ("", " plain <think>no</think>")),
        ("<think>never ends\n", False, ("never ends", "")),
        ("never ends </thin", True, ("never ends </thin", "")),
        ("<think></think>x", False, ("", "x")),
        ("<thi", False, ("", "<thi")),
        ("", True, ("", "")),
        ("a </think> b </think> c", True, ("a", "b </think> c")),
    ],
)
def test_formats(text: str, inside: bool, expected: tuple[str, str]) -> None:
    assert split([text], inside=inside) == expected


def test_kimi_has_other_markers() -> None:
    assert split(["◁think▷a◁/think▷b"], inside=False, name="kimi") == ("a", "b")


@given(
    words=st.lists(
        st.sampled_from(["<think>", "</think>", "<", "</", "think>", " ", "\n", "a", "漢"]), max_size=20
    ),
    cuts=st.lists(st.integers(0, 100), max_size=8),
    inside=st.booleans(),
)
def test_no_cut_changes_the_split(words: list[str], cuts: list[int], inside: bool) -> None:
    text = "".join(words)
    assert split(pieces(text, cuts), inside=inside) == split([text], inside=inside)


def test_prompts_tell_where_the_answer_begins() -> None:
    assert THINK.starts_inside("<|im_start|>assistant\n<think>\n")
    assert not THINK.starts_inside("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not THINK.starts_inside("<|im_start|>assistant\n")
    assert not THINK.starts_inside("user wrote <think> and more<|im_start|>assistant\n")
    implied = REASONING_FORMATS["deepseek_r1"]
    assert implied.starts_inside("<｜Assistant｜>")
    assert not implied.starts_inside("<｜Assistant｜></think>")


@given(cuts=st.lists(st.integers(0, 600), max_size=10), name=st.sampled_from(sorted(TEXTS)))
def test_reasoning_then_calls_in_any_pieces(cuts: list[int], name: str) -> None:
    """G20: both readers together, with deltas that join to the whole message."""
    form = OutputFormat(reasoning=THINK, parser=TOOL_PARSERS[name], tools=TOOLS)
    text = "<think>which tool?</think>\n\n" + TEXTS[name]
    whole = ChatOutput(form)
    whole.feed(text, ended=True)
    assert (whole.reasoning, whole.content) == ("which tool?", "Let me look.")
    assert whole.finish_reason("stop") == "tool_calls"
    assert whole.finish_reason("length") == "length"
    parts = pieces(text, cuts)
    streamed = ChatOutput(form)
    deltas = [
        delta
        for index, part in enumerate(parts)
        for delta in streamed.feed(part, ended=index == len(parts) - 1)
    ]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == whole.reasoning
    assert "".join(delta.get("content", "") for delta in deltas) == whole.content
    joined: list[dict[str, str]] = []
    for delta in deltas:
        for call in delta.get("tool_calls", []):
            if call["index"] == len(joined):
                assert call["type"] == "function"
                joined.append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
            joined[call["index"]]["arguments"] += call["function"]["arguments"]
    expected = [call["function"] for call in whole.calls]
    assert [{"name": c["name"], "arguments": c["arguments"]} for c in joined] == expected
    assert len({call["id"] for call in joined}) == len(joined)
