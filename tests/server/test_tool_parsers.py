"""Tool calls in each model's own format: what is read, and that no cut of the text changes it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.options import OPTIONS
from interlock.server.chat_output import ChatOutput, OutputFormat
from interlock.server.reasoning import REASONING_FORMATS, reasoning_format_for
from interlock.server.tool_parsers import TOOL_PARSERS, tool_parser_for
from interlock.server.tool_parsers.base import CallArguments, CallStart, Content, Event, ToolParser

TOOLS = [
    {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "options": {"type": "object"},
                "note": {"type": ["string", "null"]},
            },
        },
    },
    {"name": "stop", "parameters": {"type": "object", "properties": {}}},
]
ARGUMENTS: dict[str, Any] = {
    "city": 'São "Paulo" </x> 漢字\n\\ 👋',
    "days": 3,
    "options": {"deep": [{"a": "}]"}, 1.5, None, True]},
}


def hermes(name: str, arguments: dict[str, Any]) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def hermes_arguments_first(name: str, arguments: dict[str, Any]) -> str:
    return f'<tool_call>{{"arguments": {json.dumps(arguments)}, "name": "{name}"}}</tool_call>'


def xml(name: str, arguments: dict[str, Any], line: str) -> str:
    def text(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value)

    inner = "".join(f"<parameter={k}>{line}{text(v)}{line}</parameter>{line}" for k, v in arguments.items())
    return f"<tool_call>{line}<function={name}>{line}{inner}</function>{line}</tool_call>"


def deepseek_v31(*calls: tuple[str, dict[str, Any]]) -> str:
    inner = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def deepseek_v3(*calls: tuple[str, dict[str, Any]]) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```"
        "<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def kimi(*calls: tuple[str, dict[str, Any]]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{json.dumps(arguments)}"
        "<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


TWO: tuple[tuple[str, dict[str, Any]], ...] = (("get_weather", ARGUMENTS), ("stop", {}))
BETWEEN = "Let me look.\n\n"
TEXTS = {
    "hermes": BETWEEN + "\n".join(hermes(*call) for call in TWO),
    "qwen": BETWEEN + "\n".join(hermes_arguments_first(*call) for call in TWO),
    "mimo": BETWEEN + "".join(xml(*call, line="") for call in TWO),
    "qwen3_coder": BETWEEN + "\n".join(xml(*call, line="\n") for call in TWO),
    "deepseek_v31": BETWEEN + deepseek_v31(*TWO),
    "deepseek_v3": BETWEEN + deepseek_v3(*TWO),
    "kimi_k2": BETWEEN + kimi(*TWO),
}


def pieces(text: str, cuts: Sequence[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def read(parser: type[ToolParser], parts: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    """Content, and name and arguments of each call, from the events of ``parts``."""
    reader = parser(TOOLS)
    events: list[Event] = [event for part in parts for event in reader.feed(part)] + reader.finish()
    content, calls = "", []
    for event in events:
        match event:
            case Content(text):
                content += text
            case CallStart(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case CallArguments(index, text):
                assert index == len(calls) - 1
                calls[index] = (calls[index][0], calls[index][1] + text)
    return content, calls


@pytest.mark.parametrize("name", TEXTS)
def test_two_calls_after_a_text(name: str) -> None:
    """G20: nested JSON, Unicode, quotes and markers in strings; index counts; the text before is kept."""
    content, calls = read(TOOL_PARSERS[name], [TEXTS[name]])
    assert content == "Let me look."
    assert [(call[0], json.loads(call[1])) for call in calls] == [("get_weather", ARGUMENTS), ("stop", {})]


@pytest.mark.parametrize("name", TEXTS)
def test_every_width_gives_the_same(name: str) -> None:
    """G20: joined deltas equal the parse at once, for each cut and for widths 1 to 12."""
    text = TEXTS[name]
    whole = read(TOOL_PARSERS[name], [text])
    for cut in range(len(text)):
        assert read(TOOL_PARSERS[name], [text[:cut], text[cut:]]) == whole
    for width in range(1, 13):
        assert read(TOOL_PARSERS[name], [text[i : i + width] for i in range(0, len(text), width)]) == whole


WORDS = (
    *(
        "<tool_call>",
        "</tool_call>",
        "<function=",
        "stop>",
        "<parameter=city>",
        "</parameter>",
        "</function>",
    ),
    *(
        '{"name": "stop", "arguments": ',
        "{}",
        "}",
        '"',
        "\\",
        "a",
        " ",
        "\n",
        "<",
        "漢",
        "```json\n",
        "\n```",
    ),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    *("<｜tool▁calls▁end｜>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.stop:0"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>", "function"),
)


@given(
    name=st.sampled_from(sorted(TOOL_PARSERS)),
    words=st.lists(st.sampled_from(WORDS), max_size=25),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
def test_no_cut_changes_what_is_read(name: str, words: list[str], cuts: list[int]) -> None:
    """G20: for any text, also for markers in the wrong order, and it never fails."""
    text = "".join(words)
    assert read(TOOL_PARSERS[name], pieces(text, cuts)) == read(TOOL_PARSERS[name], [text])


@given(name=st.sampled_from(sorted(TOOL_PARSERS)), text=st.text(max_size=60))
def test_text_without_calls_is_content_to_the_letter(name: str, text: str) -> None:
    if TOOL_PARSERS[name].opening not in text:
        assert read(TOOL_PARSERS[name], [text]) == (text, [])


@pytest.mark.parametrize("name", TEXTS)
def test_an_answer_cut_by_its_length_shows_what_there_was(name: str) -> None:
    """G20: partial arguments as they are; no call is made up."""
    text = TEXTS[name]
    _, whole = read(TOOL_PARSERS[name], [text])
    for cut in range(len(text)):
        _, calls = read(TOOL_PARSERS[name], [text[:cut]])
        for call, full in zip(calls, whole, strict=False):
            assert call[0] == full[0]
            assert full[1].startswith(call[1].rstrip()) or call[1] == full[1]


def test_what_is_no_call_is_content() -> None:
    broken = "<tool_call>no json</tool_call> and more"
    assert read(TOOL_PARSERS["hermes"], [broken]) == (broken, [])
    assert read(TOOL_PARSERS["mimo"], [broken]) == (broken, [])
    assert read(TOOL_PARSERS["hermes"], ['<tool_call>{"nam'])[0] == '<tool_call>{"nam'


def test_values_of_xml_follow_the_schema() -> None:
    """A string that looks like a number stays one; what is no JSON stays text."""
    text = xml("get_weather", {"city": "123", "days": "x", "note": "null", "other": "4"}, "")
    (call,) = read(TOOL_PARSERS["mimo"], [text])[1]
    assert json.loads(call[1]) == {"city": "123", "days": "x", "note": None, "other": "4"}


def test_kimi_calls_keep_their_own_ids() -> None:
    output = ChatOutput(OutputFormat(parser=TOOL_PARSERS["kimi_k2"], tools=TOOLS))
    output.feed(TEXTS["kimi_k2"], ended=True)
    assert [call["id"] for call in output.calls] == ["functions.get_weather:0", "functions.stop:1"]


TEMPLATES = {
    "{{ '<tool_call>\\n{\"name\": ' }}</tool_call>": "hermes",
    "<tool_call>\\n<function=": "qwen3_coder",
    "<tool_call><function=": "mimo",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>": "deepseek_v31",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + '\\n```json\\n'": "deepseek_v3",
    "<|tool_calls_section_begin|><|tool_call_begin|>": "kimi_k2",
}


def test_auto_reads_the_template() -> None:
    for template, name in TEMPLATES.items():
        assert tool_parser_for(template) is TOOL_PARSERS[name], name
    assert tool_parser_for("{{ messages }}") is None
    assert reasoning_format_for("... '<think>' ... '</think>'") is REASONING_FORMATS["qwen3"]
    assert reasoning_format_for("◁think▷◁/think▷") is REASONING_FORMATS["kimi"]
    assert reasoning_format_for("{{ messages }}") is None


def test_options_name_every_parser() -> None:
    assert set(OPTIONS["tool_call_parser"].allowed()) == {"auto", "none", *TOOL_PARSERS}
    assert set(OPTIONS["reasoning_parser"].allowed()) == {"auto", "none", *REASONING_FORMATS}
