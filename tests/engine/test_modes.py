"""However many ranks share the work, and however they exchange it, the answers are those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.conftest import Answers, ask, engine

EP = ("collective", "shared_memory")
MODES = [
    {"tp_size": 2},
    {"tp_size": 2, "ep_size": 2},
    {"tp_size": 2, "attn_dp_size": 2},
    {"tp_size": 4, "attn_dp_size": 2, "ep_size": 2},
    *({"tp_size": 2, "moe_a2a_backend": name} for name in EP),
    *({"tp_size": 2, "attn_dp_size": 2, "moe_a2a_backend": name} for name in EP),
    *({"tp_size": 4, "attn_dp_size": 2, "moe_a2a_backend": name} for name in EP),
]
DETERMINISTIC = [
    {},
    {"chunked_prefill_size": 16},
    {"tp_size": 2},
    {"tp_size": 2, "moe_a2a_backend": "collective", "chunked_prefill_size": 24},
    {"tp_size": 2, "attn_dp_size": 2, "moe_a2a_backend": "shared_memory"},
    {"tp_size": 4, "attn_dp_size": 2, "moe_a2a_backend": "shared_memory"},
]


def label(mode: dict[str, object]) -> str:
    return ",".join(f"{name}={value}" for name, value in mode.items()) or "one process"


@pytest.mark.parametrize("mode", MODES, ids=label)
def test_ranks_share_the_work_and_agree_with_one_process(
    tiny: Path, one_process: Answers, mode: dict[str, object]
) -> None:
    with engine(tiny, **mode) as llm:
        assert ask(llm).largest_difference(one_process) < 1e-5
        assert len(llm.receipts) == mode["tp_size"]


@pytest.fixture(scope="module")
def deterministic_answers(tiny: Path) -> Answers:
    with engine(tiny, deterministic=True) as llm:
        return ask(llm)


@pytest.mark.parametrize("mode", DETERMINISTIC[1:], ids=label)
def test_deterministic_mode_keeps_every_bit(
    tiny: Path, deterministic_answers: Answers, mode: dict[str, object]
) -> None:
    with engine(tiny, deterministic=True, **mode) as llm:
        assert ask(llm).largest_difference(deterministic_answers) == 0.0


def test_deterministic_mode_is_blind_to_companions_and_to_cached_prefixes(
    tiny: Path, deterministic_answers: Answers
) -> None:
    from tests.engine.conftest import PROMPTS

    with engine(tiny, deterministic=True) as llm:
        for _ in range(2):
            for index, prompt in enumerate(PROMPTS):
                alone = ask(llm, (prompt,))
                assert alone.tokens[0] == deterministic_answers.tokens[index]
                assert alone.logprobs[0] == deterministic_answers.logprobs[index]
