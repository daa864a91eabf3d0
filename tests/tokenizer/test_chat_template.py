from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.errors import RequestError
from interlock.tokenizer import Tokenizer, load_tokenizer
from interlock.tokenizer.chat_template import ChatTemplates

WriteFolder = Callable[..., Path]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "It's <b>cold</b> & é",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
TEMPLATES = {
    "loops": """
{%- set ns = namespace(last=-1) %}
{% for m in messages %}
    {% if m.role == 'skip' %}{% continue %}{% endif %}
    {%- if loop.index0 > 4 %}{% break %}{% endif %}
<{{ m['role'] }}>{{ m.content | trim }}{{ eos_token }}
    {% set ns.last = loop.index0 %}
{% endfor %}
{% if add_generation_prompt %}<assistant> {{ ns.last }}{% endif %}
""",
    "tools": """{{ bos_token }}{% if tools %}{{ tools | tojson }}
{% for tool in tools %}
{{ tool | tojson(indent=2) }}
{% endfor %}{% endif %}{% for m in messages %}{{ m | tojson }}{% endfor %}""",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}",
    "options": "{% if enable_thinking is defined and not enable_thinking %}no{% else %}yes{% endif %}",
}


def render(source: str, messages: Any, **options: Any) -> str:
    return ChatTemplates({"default": source}, TOKENS).render(messages, **options)


messages_strategy = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "skip"]), "content": st.text(max_size=20)}
    ),
    min_size=1,
    max_size=7,
)


@pytest.mark.parametrize("name", TEMPLATES)
@given(messages=messages_strategy, generation=st.booleans(), with_tools=st.booleans())
def test_equal_to_transformers(
    name: str, messages: list[dict[str, str]], generation: bool, with_tools: bool
) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    tools = TOOLS if with_tools else None
    options: dict[str, Any] = {"add_generation_prompt": generation, "enable_thinking": False}
    expected, _ = utils.render_jinja_template(
        conversations=[messages], tools=tools, chat_template=TEMPLATES[name], **options, **TOKENS
    )
    assert render(TEMPLATES[name], messages, tools=tools, **options) == expected[0]


def test_the_tiny_template(byte_level: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    text = "<|im_start|>user\nhi<|im_end|>\n"
    assert byte_level.apply_chat_template(messages, add_generation_prompt=False) == text
    assert byte_level.apply_chat_template(messages) == text + "<|im_start|>assistant\n"


def test_tojson_does_not_escape_html() -> None:
    assert render("{{ tools | tojson }}", [], tools=[{"a": "<é'&>"}]) == '[{"a": "<é\'&>"}]'


def test_raise_exception_reaches_the_client() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}", [{"role": "user", "content": "a"}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% if %}",
        "{{ messages[3].content }}",
        "{{ undefined_function() }}",
        "{{ 1 / 0 }}",
    ],
)
def test_whatever_a_template_does_is_a_request_error(source: str) -> None:
    with pytest.raises(RequestError, match="chat template"):
        render(source, [])


def test_strftime_now() -> None:
    assert render("{{ strftime_now('%Y') | int > 2000 }}", []) == "True"


def test_no_template_says_so(write_folder: WriteFolder) -> None:
    tokenizer = load_tokenizer(write_folder())
    assert tokenizer.chat_template_text == ""
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}])


def test_named_templates(write_folder: WriteFolder) -> None:
    entry = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    tokenizer = load_tokenizer(write_folder(tokenizer_config={"chat_template": entry}))
    assert tokenizer.apply_chat_template([]) == "D"
    assert tokenizer.apply_chat_template([], tools=TOOLS) == "T"


def test_only_a_template_of_another_name(write_folder: WriteFolder) -> None:
    entry = [{"name": "rag", "template": "R"}]
    tokenizer = load_tokenizer(write_folder(tokenizer_config={"chat_template": entry}))
    with pytest.raises(RequestError, match="only templates named rag"):
        tokenizer.apply_chat_template([])


def test_the_template_file_wins(write_folder: WriteFolder) -> None:
    folder = write_folder(tokenizer_config={"chat_template": "entry"}, chat_template="file {{ x }}")
    assert load_tokenizer(folder).apply_chat_template([], x=1) == "file 1"


@pytest.mark.parametrize("name", ["self", "name", "values", "template", "loop"])
def test_any_variable_name_may_be_sent(byte_level: Tokenizer, name: str) -> None:
    """G18: names that clash with Python's own must not turn into a server error."""
    messages = [{"role": "user", "content": "hi"}]
    plain = byte_level.apply_chat_template(messages)
    assert byte_level.apply_chat_template(messages, **{name: 1}) == plain


def test_template_variables_cannot_replace_the_messages(byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match="template variable messages is reserved"):
        byte_level.apply_chat_template([{"role": "user", "content": "hi"}], messages=[])


def test_special_tokens_from_both_files(write_folder: WriteFolder) -> None:
    folder = write_folder(
        special_tokens_map={"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|endoftext|>"},
        tokenizer_config={
            "eos_token": "<|im_end|>",
            "chat_template": "{{ bos_token }}{{ eos_token }}{{ pad_token }}",
        },
    )
    assert load_tokenizer(folder).apply_chat_template([]) == "<|im_start|><|im_end|>"


def test_continuing_the_last_message() -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "the answer is "}]
    text = render(template, messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "<user>q</><assistant>the answer is "


def test_continuing_excludes_a_generation_prompt() -> None:
    with pytest.raises(RequestError, match="exclude each other"):
        render("x", [], continue_final_message=True)


def test_continuing_needs_a_text() -> None:
    with pytest.raises(RequestError, match="last message"):
        render("x", [], add_generation_prompt=False, continue_final_message=True)
