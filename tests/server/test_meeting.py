"""The fields that routers add, and what they become."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from interlock.engine.messages import Meeting
from interlock.server.errors import ApiError
from interlock.server.meeting import meetings
from interlock.server.protocol import CompletionBody
from tests.server.fake_engine import fake_plan

PREFILL = fake_plan(disaggregation_mode="prefill")


def body(**fields: object) -> CompletionBody:
    return CompletionBody(model="m", prompt="x", **fields)


def test_one_room_serves_every_choice() -> None:
    made = meetings(
        body(bootstrap_host="p", bootstrap_port=9, bootstrap_room=2**63 - 1), PREFILL, prompts=2, n=2
    )
    assert made == [Meeting(host="p", port=9, room=2**63 - 1, choice=i) for i in range(4)]


def test_a_list_has_a_room_for_each_prompt() -> None:
    asked = body(bootstrap_host=["p", "q"], bootstrap_port=[None, 9], bootstrap_room=[5, 6])
    assert meetings(asked, PREFILL, prompts=2, n=2) == [
        Meeting(host="p", port=8998, room=5, choice=0),
        Meeting(host="p", port=8998, room=5, choice=1),
        Meeting(host="q", port=9, room=6, choice=0),
        Meeting(host="q", port=9, room=6, choice=1),
    ]


def test_a_list_may_have_a_room_for_each_choice() -> None:
    """What sglang-router sends for one prompt with n > 1."""
    asked = body(bootstrap_host=["p", "p"], bootstrap_port=[9, 9], bootstrap_room=[5, 6], n=2)
    assert meetings(asked, PREFILL, prompts=1, n=2) == [
        Meeting(host="p", port=9, room=5),
        Meeting(host="p", port=9, room=6),
    ]


def test_fields_that_routers_add_and_that_ask_for_nothing_are_taken() -> None:
    body(no_stop_trim=False, return_hidden_states=False)
    with pytest.raises(ValidationError):
        body(return_hidden_states=True)


@pytest.mark.parametrize(
    ("mode", "fields", "words"),
    [
        ("none", {"bootstrap_room": 1}, "neither a prefill nor a decode"),
        ("none", {"bootstrap_host": "p"}, "neither a prefill nor a decode"),
        ("prefill", {}, "this is a prefill server: a request needs bootstrap_host"),
        ("decode", {"bootstrap_host": "p"}, "this is a decode server: a request needs bootstrap_room"),
        ("decode", {"bootstrap_host": "p", "bootstrap_room": [1, 2]}, "2 entries for 1 prompts"),
        ("decode", {"bootstrap_host": [None], "bootstrap_room": [1]}, "need a value for every prompt"),
    ],
)
def test_what_does_not_fit_the_role_is_refused(mode: str, fields: dict[str, object], words: str) -> None:
    with pytest.raises(ApiError, match=words) as refusal:
        meetings(body(**fields), fake_plan(disaggregation_mode=mode), prompts=1, n=1)
    assert refusal.value.status == 400


def test_a_server_of_both_phases_has_no_meetings() -> None:
    assert meetings(body(), fake_plan(), prompts=2, n=2) == [None] * 4
