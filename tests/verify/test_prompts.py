"""The built-in prompts sit at the edges of the plans; files are read line by line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.errors import InterlockError
from interlock.verify.prompts import DrawnTokens, built_in_prompts, chosen_lengths, prompts_of_file
from tests.plan.machines import tiny_card
from tests.plans import make_plan


class Characters:
    """One token a character."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return ([1] if add_special_tokens else []) + [ord(letter) % 500 for letter in text]


@given(
    chunk=st.integers(1, 300), other=st.integers(1, 300), page=st.integers(1, 40), limit=st.integers(20, 512)
)
def test_there_are_twelve_and_two_need_a_second_chunk(chunk: int, other: int, page: int, limit: int) -> None:
    plans = [
        make_plan(tiny_card(), chunked_prefill_size=size, page_size=page, max_model_len=limit)
        for size in (chunk, other)
    ]
    lengths = [length for length, _ in chosen_lengths(plans, 4)]
    assert len(lengths) == 12
    assert all(1 <= length <= limit - 4 for length in lengths)
    smallest = min(chunk, other)
    if smallest >= 10 and limit - 4 > 2 * max(chunk, other) + 1:
        assert len(set(lengths)) == 12
        assert sum(length > smallest for length in lengths) == 2
        assert {smallest - 1, smallest, smallest + 1} <= set(lengths)
        assert max(lengths) > max(chunk, other)


def test_edges_of_page_window_chunk_and_capacity_are_among_them() -> None:
    plan = make_plan(tiny_card(), chunked_prefill_size=64, moe_prefill_capacity=48, page_size=8)
    chosen = {label: length for length, label in chosen_lengths([plan], 4)}
    assert chosen["page, window"] == 8
    assert chosen["capacity"] == 48
    assert (chosen["chunk"], chosen["chunk + 1"]) == (64, 65)


def test_built_in_prompts_share_no_prefix_and_repeat_exactly() -> None:
    plan = make_plan(tiny_card(), chunked_prefill_size=64)
    prompts = built_in_prompts([plan], Characters(), 4)
    assert prompts == built_in_prompts([plan], Characters(), 4)
    beginnings = {prompt.token_ids[1:6] for prompt in prompts if len(prompt.token_ids) > 6}
    assert len(beginnings) == sum(len(prompt.token_ids) > 6 for prompt in prompts)


def test_a_server_of_another_make_limits_the_length() -> None:
    plan = make_plan(tiny_card(), chunked_prefill_size=64)
    assert max(length for length, _ in chosen_lengths([plan], 4, 50)) <= 46


def test_files_hold_texts_and_token_ids(tmp_path: Path) -> None:
    path = tmp_path / "p"
    path.write_text('plain text\n\n{"prompt": "hi"}\n{"token_ids": [3, 4]}\n[5]\n"quoted"\n')
    prompts = [prompt.token_ids for prompt in prompts_of_file(path, Characters())]
    encode = Characters().encode
    assert prompts == [
        tuple(encode("plain text")),
        tuple(encode("hi")),
        (3, 4),
        (5,),
        tuple(encode("quoted")),
    ]


@pytest.mark.parametrize(
    "content", ["", "\n", '{"other": 1}', "[-1]", "[1.5]", '{"token_ids": []}', "[true]", f"[{10**20}]"]
)
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "p"
    path.write_text(content)
    with pytest.raises(InterlockError):
        prompts_of_file(path, Characters())
    with pytest.raises(InterlockError, match="cannot be read"):
        prompts_of_file(tmp_path / "absent", Characters())


def test_models_without_a_tokenizer_get_prompts_of_drawn_tokens() -> None:
    plan = make_plan(tiny_card(), chunked_prefill_size=64)
    prompts = built_in_prompts([plan], DrawnTokens(512), 4)
    assert prompts == built_in_prompts([plan], DrawnTokens(512), 4)
    assert len({prompt.token_ids for prompt in prompts}) == 12
    assert all(0 <= token < 512 for prompt in prompts for token in prompt.token_ids)
    longest = max((prompt.token_ids for prompt in prompts), key=len)
    assert len(set(longest)) > len(longest) // 2
